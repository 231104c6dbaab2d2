"""Reports of a retrieval run: a table for the terminal and one self-contained HTML page.

Everything shown was collected by the caller; metrics come from `ranking.py`, the picture from `plots.py`.
Names, queries and model output are untrusted text: escaped in HTML, never read as markup in the terminal.
The page loads nothing from anywhere, which its content security policy also forbids.
"""

import base64
import html
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtool.evaluation.plots import SystemResult, plot_results

# (metric, column heading), in the order of the columns
_COLUMNS = (
    ("ndcg@1", "NDCG@1"),
    ("ndcg@3", "NDCG@3"),
    ("ndcg@5", "NDCG@5"),
    ("recall@5", "Recall@5"),
    ("comp@5", "COMP@5"),
    ("official_ndcg@1", "Official NDCG@1"),
    ("official_ndcg@3", "Official NDCG@3"),
    ("official_ndcg@5", "Official NDCG@5"),
)

METRIC_NOTE = (
    "Values are percent, means over the queries ± one standard error. NDCG@k compares with the best possible "
    "list; Recall@5 is the share of the gold tools among the first five; COMP@5 is the share of queries with "
    "all gold tools there. Official NDCG is the kinder metric of the ToolGen paper: a gold tool that was not "
    "returned costs nothing."
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One query with its answer.

    Attributes:
        query: the text that was asked.
        gold: names of the gold tools.
        top: (tool name, probability in [0, 1], whether it is gold), best first.
    """

    query: str
    gold: Sequence[str]
    top: Sequence[tuple[str, float, bool]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report shows, all of it text or numbers.

    Attributes:
        title: heading of the page.
        configuration: the resolved configuration, as YAML text.
        notes: statements about the data: counts, what was merged or skipped and why.
        results: rows of the table, in order.
        examples: queries with their answers.
        environment: name -> value: versions, devices.
        timings: name -> seconds.
        metrics: training records for the loss curve, see `plot_results`.
    """

    title: str
    configuration: str
    notes: Sequence[str]
    results: Sequence[SystemResult]
    examples: Sequence[Example] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()


def results_table(results: Sequence[SystemResult], *, title: str = "Tool retrieval") -> Table:
    """The results as a rich table, one row per system and group; `-` where a metric was not computed."""
    table = Table(title=Text(title), caption=Text("percent ± one standard error"))
    table.add_column("System, queries", overflow="fold")
    table.add_column("n", justify="right")
    for _, heading in _COLUMNS:
        # Short lines, so that the table fits 100 columns.
        table.add_column(heading.replace(" ", "\n").replace("@", "\n@"), justify="right", overflow="fold")
    for result in results:
        cells = [_cell(result, metric) for metric, _ in _COLUMNS]
        table.add_row(
            Text(printable(f"{result.system}, {result.group}")),
            Text(f"{result.scores.queries:,}"),
            *(Text(cell.replace(" ± ", "\n±")) for cell in cells),
            end_section=True,
        )
    return table


def print_results(results: Sequence[SystemResult], console: Console | None = None) -> None:
    """Prints the table. Without a console: to stdout, where a file or a pipe gets 110 columns."""
    if console is None:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console = Console(width=110)
    console.print(results_table(results))


def render_html(report: Report, png: bytes | None = None) -> str:
    """The page as text; `png` is embedded. Without it there is no picture."""
    sections = [
        f"<h1>{_escaped(report.title)}</h1>",
        _section("Results", _results_html(report.results)),
        _section("Plot", _image_html(png)) if png is not None else "",
        _section("Data", _list_html(report.notes)),
        _section("Example queries", "".join(_example_html(example) for example in report.examples)),
        _section("Configuration", f"<pre>{_escaped(report.configuration)}</pre>" if report.configuration else ""),
        _section("Environment", _pairs_html(report.environment)),
        _section("Time", _pairs_html({name: _duration(value) for name, value in report.timings.items()})),
    ]
    return _PAGE.format(title=_escaped(report.title), style=_STYLE, body="\n".join(filter(None, sections)))


def make_report_folder(folder: str | Path) -> Path:
    """Makes the folder where it is absent.

    Raises:
        ValueError: it can't be made or written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder}: expected a folder for the report that can be written ({error})") from error
    return folder


def write_report(report: Report, folder: str | Path) -> Path:
    """Writes `report.html` and `results.png` into a folder (made if absent) and returns the path of the page.

    Each file appears whole or not at all: an older one stays until the new one is complete.

    Raises:
        ValueError: results that `plot_results` refuses, or a folder that can't be written.
    """
    folder = make_report_folder(folder)
    png = plot_results(report.results, metrics=report.metrics)
    page = folder / "report.html"
    _write_atomically(folder / "results.png", png)
    _write_atomically(page, render_html(report, png).encode("utf-8"))
    return page


def _cell(result: SystemResult, metric: str) -> str:
    if metric not in result.scores.per_query:
        return "-"
    error = result.scores.standard_error(metric)
    mean = f"{100 * result.scores.mean(metric):.1f}"
    return f"{mean} ± {100 * error:.1f}" if math.isfinite(error) else mean


def _results_html(results: Sequence[SystemResult]) -> str:
    if not results:
        return ""
    head = "<th>System</th><th>Queries</th><th class=number>n</th>" + "".join(
        f"<th class=number>{heading}</th>" for _, heading in _COLUMNS
    )
    rows = []
    for result in results:
        names = f"<td>{_escaped(result.system)}</td><td>{_escaped(result.group)}</td>"
        numbers = [f"{result.scores.queries:,}", *(_cell(result, metric) for metric, _ in _COLUMNS)]
        rows.append(f"<tr>{names}{''.join(f'<td class=number>{number}</td>' for number in numbers)}</tr>")
    returned = ", ".join(str(n) for n in sorted({result.scores.returned for result in results}))
    note = f"{METRIC_NOTE} Returned tools counted there: {returned}."
    table = f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    return f"{table}<p class=note>{_escaped(note)}</p>"


def _image_html(png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="NDCG by system and query group, and training loss" src="data:image/png;base64,{data}">'


def _example_html(example: Example) -> str:
    rows = []
    for rank, (name, probability, hit) in enumerate(example.top, start=1):
        mark = "✓ gold" if hit else ""
        row_class = " class=hit" if hit else ""
        rows.append(
            f"<tr{row_class}><td class=number>{rank}</td><td>{_escaped(name)}</td>"
            f"<td class=number>{100 * probability:.1f} %</td><td class=mark>{mark}</td></tr>"
        )
    gold = ", ".join(f"<code>{_escaped(name)}</code>" for name in example.gold)
    head = "<th class=number>Rank</th><th>Tool</th><th class=number>Probability</th><th></th>"
    return (
        f"<article><blockquote>{_escaped(example.query)}</blockquote><p>Gold: {gold}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></article>"
    )


def _list_html(notes: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_escaped(note)}</li>' for note in notes)}</ul>" if notes else ""


def _pairs_html(pairs: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><th scope=row>{_escaped(key)}</th><td>{_escaped(value)}</td></tr>" for key, value in pairs.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{heading}</h2>{body}</section>" if body else ""


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def _escaped(text: object) -> str:
    return html.escape(printable(str(text)), quote=True)


# Control characters (escape sequences in a terminal) and lone surrogates (no UTF-8 form).
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with each control character (but tab and line break) shown as its escape, such as \\x1b."""
    return _UNPRINTABLE.sub(lambda match: repr(match.group())[1:-1], text)


def _write_atomically(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp's 0600 would hide the report from a web server
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.7rem }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4 }
td, blockquote, pre, li, code { overflow-wrap: anywhere }
thead th { background: #f3f5f7 }
.number { text-align: right; font-variant-numeric: tabular-nums }
td.number, .mark { white-space: nowrap; overflow-wrap: normal }
.scroll { overflow-x: auto }
.scroll td:first-child, .scroll td:nth-child(2) { min-width: 7rem }
.note { color: #555; font-size: .85rem }
img { max-width: 100%; height: auto }
pre { background: #f3f5f7; padding: .8rem; white-space: pre-wrap }
article { margin: 1.2rem 0 }
article p { margin: .2rem 0 }
blockquote { margin: 0 0 .4rem; padding-left: .8rem; border-left: 4px solid #0072b2; white-space: pre-wrap }
tr.hit td { background: #e3f2ea; font-weight: 600 }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
