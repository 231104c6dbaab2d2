"""What an offline run shows while it works (rows, tokens a second, time left), and what it says at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxtool.decoding.offline_job import OfflineJob

_SHOWN = 5


class OfflineProgress:
    """A bar over a process's rows; a context manager.

    Args:
        job: whose rows they are; those of finished parts count as done.
        console: where the bar is drawn.
    """

    def __init__(self, job: OfflineJob, console: Console) -> None:
        self.job = job
        self.total, self.resumed = job.own_rows
        self.read = self.made = self.done = 0
        self.errors: list[str] = []
        self.failed = 0
        self.started = time.monotonic()
        self.progress = Progress(
            TextColumn("rows"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            # Rows are finished in bursts: over less time the estimate would jump.
            TimeRemainingColumn(compact=True),
            console=console,
            speed_estimate_period=600,
        )

    def __enter__(self) -> OfflineProgress:
        self.progress.start()
        self.task = self.progress.add_task("rows", total=self.total, completed=self.resumed, speed="")
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        self.seconds = time.monotonic() - self.started

    def tokens(self, read: int, made: int) -> None:
        """So many tokens of prompts were read, and so many generated."""
        self.read, self.made = self.read + read, self.made + made
        speed = (self.made or self.read) / max(time.monotonic() - self.started, 1e-9)
        self.progress.update(self.task, speed=f"{speed:,.0f} tokens/s {'generated' if self.made else 'read'}")

    def row(self, rows: int = 1) -> None:
        """Rows have their results."""
        self.done += rows
        self.progress.advance(self.task, rows)

    def part(self, records: Sequence[Mapping[str, Any]]) -> None:
        """A part is written; rows with an error are counted and the first of them remembered."""
        wrong = [str(record["error"]) for record in records if "error" in record]
        self.failed += len(wrong)
        self.errors += wrong[: max(_SHOWN - len(self.errors), 0)]
        self.progress.advance(self.task, len(wrong))

    def summary(self) -> str:
        """What was done, in lines."""
        seconds = max(self.seconds, 1e-9)
        lines = [
            f"{self.done + self.failed:,} rows in {seconds:,.1f} s"
            + (f", {self.resumed:,} were there already" if self.resumed else "")
            + f": {self.read:,} tokens read"
            + (
                f", {self.made:,} generated ({self.made / seconds:,.1f}"
                if self.made
                else f" ({self.read / seconds:,.1f}"
            )
            + f" a second); {self.failed:,} rows have an error"
        ]
        lines += [f"  {error}" for error in self.errors]
        if self.failed > len(self.errors):
            lines.append(f"  ... and {self.failed - len(self.errors):,} more, in the field `error` of their records")
        return "\n".join(lines)
