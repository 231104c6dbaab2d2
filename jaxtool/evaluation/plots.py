"""PNG plots of retrieval results and training losses, drawn by matplotlib's Agg canvas without global state.

Takes scores that exist already; nothing is computed here but means and standard errors. Colours are from the
Okabe-Ito palette, and bars carry hatches too, so that the plot can be read without colour. Names are drawn as
they are: a `$` in them is never taken for mathematics.
"""

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxtool.evaluation.ranking import RankingScores

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
_VARIANTS = (
    ("ndcg", "Standard NDCG"),
    ("official_ndcg", "Official NDCG (ideal: returned gold only)"),
)


@dataclass(frozen=True, kw_only=True)
class SystemResult:
    """Scores of one system on one group of queries.

    Attributes:
        system: what ranked, such as "jaxtool" or "BM25".
        group: which queries, such as "trained tools".
        scores: their scores.
    """

    system: str
    group: str
    scores: RankingScores


def plot_results(
    results: Sequence[SystemResult], *, metrics: Sequence[Mapping[str, Any]] = (), dpi: int = 120
) -> bytes:
    """Draws NDCG bars by system and group, and the training loss where there are metrics; returns a PNG.

    Bars are means in percent, error bars one standard error. A system without a result on a group has no bar.

    Args:
        results: at least one; a system at most once per group; all with the same cut-offs.
        metrics: training records in order. Those that hold both `step` and `loss` make the curve, one line
            for each value of `stage` (absent: a single line); records of other events are not drawn.
        dpi: dots per inch; a panel is about 4.5 inches wide.

    Raises:
        ValueError: no result, a repeated (system, group), or differing cut-offs.
    """
    groups, systems, by_key = _arranged(results)
    losses = _loss_lines(metrics)
    rows = len(_VARIANTS) + (1 if losses else 0)
    width = max(7.5, 4.5 * len(groups))
    figure = Figure(figsize=(width, 3.1 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, len(groups))
    handles: list[Any] = []
    for row, (metric, title) in enumerate(_VARIANTS):
        for column, group in enumerate(groups):
            axes = figure.add_subplot(grid[row, column])
            handles = _draw_bars(axes, metric, group, systems, by_key) or handles
            queries = _query_count([result for result in results if result.group == group])
            heading = f"{title}\n{_wrapped(group, 44)} ({queries})"
            axes.set_title(heading, fontsize=9.5, parse_math=False)
            if column == 0:
                axes.set_ylabel("percent")
    if losses:
        _draw_losses(figure.add_subplot(grid[rows - 1, :]), losses)
    legend = figure.legend(
        handles,
        [_wrapped(system, 60) for system in systems],
        loc="outside upper center",
        ncols=min(3, len(systems)),
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return _png(figure, dpi)


def _arranged(
    results: Sequence[SystemResult],
) -> tuple[list[str], list[str], dict[tuple[str, str], SystemResult]]:
    """Groups and systems in order of first appearance, and the results by (system, group)."""
    if not results:
        raise ValueError("plot_results: there are no results; expected at least one")
    by_key: dict[tuple[str, str], SystemResult] = {}
    for result in results:
        key = (result.system, result.group)
        if key in by_key:
            raise ValueError(f"plot_results: system {key[0]!r} occurs twice in group {key[1]!r}")
        if result.scores.ks != results[0].scores.ks:
            raise ValueError(
                f"plot_results: cut-offs {result.scores.ks} of system {key[0]!r}, group {key[1]!r} differ "
                f"from {results[0].scores.ks} of the first result"
            )
        by_key[key] = result
    groups = list(dict.fromkeys(result.group for result in results))
    systems = list(dict.fromkeys(result.system for result in results))
    return groups, systems, by_key


def _draw_bars(
    axes: Axes,
    metric: str,
    group: str,
    systems: list[str],
    by_key: dict[tuple[str, str], SystemResult],
) -> list[Any]:
    """One cluster of bars per cut-off; returns a legend handle for each system."""
    ks = next(iter(by_key.values())).scores.ks
    bar_width = 0.8 / len(systems)
    handles = []
    for position, system in enumerate(systems):
        colour = _COLOURS[position % len(_COLOURS)]
        # After the last colour the hatches move on by one, so 64 systems stay distinct.
        hatch = _HATCHES[(position + position // len(_COLOURS)) % len(_HATCHES)]
        result = by_key.get((system, group))
        means = [100 * result.scores.mean(f"{metric}@{k}") if result else np.nan for k in ks]
        errors = [100 * result.scores.standard_error(f"{metric}@{k}") if result else np.nan for k in ks]
        x = np.arange(len(ks)) + (position - (len(systems) - 1) / 2) * bar_width
        handles.append(
            axes.bar(x, means, bar_width * 0.94, color=colour, edgecolor="white", hatch=hatch, linewidth=0.5)
        )
        axes.errorbar(x, means, yerr=errors, fmt="none", ecolor="#333333", elinewidth=1.0, capsize=2.5)
        for place, mean, error in zip(x, means, errors, strict=True):
            if np.isfinite(mean):
                top = mean + (error if np.isfinite(error) else 0.0)
                axes.text(place, top + 1.2, f"{mean:.1f}", ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks(np.arange(len(ks)), [f"@{k}" for k in ks])
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return handles


def _loss_lines(metrics: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for record in metrics:
        if "step" in record and "loss" in record:
            steps, values = lines.setdefault(str(record.get("stage", "")), ([], []))
            steps.append(float(record["step"]))
            values.append(float(record["loss"]))
    return lines


def _draw_losses(axes: Axes, lines: Mapping[str, tuple[list[float], list[float]]]) -> None:
    for position, (steps, values) in enumerate(lines.values()):
        dashes = ("-", "--", ":", "-.")[position % 4]
        # From the third colour on: the first ones stand for systems.
        colour = _COLOURS[(position + 2) % len(_COLOURS)]
        marker = "o" if len(steps) == 1 else ""
        axes.plot(steps, values, dashes, color=colour, linewidth=1.3, marker=marker)
    axes.set_title("Training loss", fontsize=9.5)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per supervised token")
    axes.set_ylim(bottom=0)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if any(lines):
        # Labels are given here, not to `plot`, where one that begins with an underscore would be hidden.
        legend = axes.legend(axes.get_lines(), [_wrapped(stage, 60) for stage in lines], frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _query_count(results: Sequence[SystemResult]) -> str:
    counts = sorted({result.scores.queries for result in results})
    if len(counts) == 1:
        return "1 query" if counts[0] == 1 else f"{counts[0]:,} queries"
    return f"{counts[0]:,} to {counts[-1]:,} queries"


def _wrapped(name: str, width: int) -> str:
    return "\n".join(textwrap.wrap(name, width)) or " "


def _png(figure: Figure, dpi: int) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script that the built-in font lacks shows boxes; the tables show it in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": ""})
    return buffer.getvalue()
