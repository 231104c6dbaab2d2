import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from jaxtool.evaluation.plots import SystemResult, plot_results
from jaxtool.evaluation.ranking import evaluate_rankings
from jaxtool.evaluation.report import (
    Example,
    Report,
    make_report_folder,
    print_results,
    render_html,
    write_report,
)

HOSTILE = "<script>alert('x')</script> & \"q\" [bold red]$\\frac{$ \x1b[31m \ud800 {title}"


def scores(hit_rows, queries=4, ks=(1, 3, 5)):
    """Query i has gold tool 0, which is ranked first in `hit_rows` of the queries and nowhere in the rest."""
    ranked = np.tile(np.arange(1, 6), (queries, 1))
    ranked[:hit_rows, 0] = 0
    return evaluate_rankings(ranked, np.ones(ranked.shape, dtype=bool), [[0]] * queries, ks=ks)


def result(system="jaxtool", group="trained tools", **options):
    return SystemResult(system=system, group=group, scores=scores(3, **options))


def report(**changes):
    content = {
        "title": "Tool retrieval",
        "configuration": "seed: 1\n",
        "notes": ["12 tools"],
        "results": [result(), result("BM25")],
        "examples": [Example(query="a query", gold=["one"], top=[("one", 0.75, True), ("two", 0.25, False)])],
        "environment": {"jax": "0.0.0"},
        "timings": {"training": 61.0},
    }
    return Report(**(content | changes))


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that elements are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_page_shows_everything_and_embeds_the_plot():
    page = render_html(report(), b"PNG bytes")
    reader = read(page)
    text = " ".join(reader.text)
    for part in (
        "Tool retrieval",
        "seed: 1",
        "12 tools",
        "a query",
        "75.0 %",
        "✓ gold",
        "0.0.0",
        "1 min 1 s",
        "75.0 ± 25.0",
    ):
        assert part in text
    assert text.count("✓ gold") == 1
    sources = [value for name, value in reader.attributes if name == "src"]
    assert [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources] == [b"PNG bytes"]


def test_page_loads_nothing_and_runs_nothing():
    page = render_html(report(), b"PNG bytes")
    reader = read(page)
    assert not {"script", "link", "iframe", "object"} & set(reader.tags)
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page


def test_hostile_text_stays_text():
    hostile = report(
        title=HOSTILE,
        configuration=HOSTILE,
        notes=[HOSTILE],
        results=[result(HOSTILE, HOSTILE)],
        examples=[Example(query=HOSTILE, gold=[HOSTILE], top=[(HOSTILE, 0.5, False)])],
        environment={HOSTILE: HOSTILE},
        timings={HOSTILE: 1.0},
    )
    page = render_html(hostile)
    reader = read(page)
    assert "script" not in reader.tags and "\x1b" not in page
    page.encode("utf-8")
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\ud800", "\\ud800")
    assert "".join(reader.text).count(shown) == 12  # the title twice: heading and window


def test_empty_sections_are_left_out():
    page = render_html(Report(title="t", configuration="", notes=[], results=[]))
    assert "<h2>" not in page
    read(page)


def test_terminal_table_reads_no_markup_and_holds_all_numbers():
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=False)
    print_results([result(), result("[red]x[/red]", HOSTILE), result("few", "one query", queries=1)], console)
    printed = output.getvalue()
    assert "[red]" in printed and "\x1b" not in printed
    assert printed.count("75.0") == 2 * 8 and printed.count("±25.0") == 2 * 8 and printed.count("100.0") == 8
    assert max(map(len, printed.splitlines())) <= 100


def test_metric_that_was_not_computed_is_a_dash():
    output = io.StringIO()
    partial = SystemResult(system="s", group="g", scores=scores(2, ks=(1,)))
    print_results([partial], Console(file=output, width=110))
    assert "-" in output.getvalue()
    assert "<td class=number>-</td>" in render_html(report(results=[partial]))


def test_write_report_replaces_whole_files(tmp_path):
    folder = tmp_path / "new" / "run"
    first = write_report(report(title="first run"), folder)
    second = write_report(report(title="second run"), folder)
    assert first == second == folder / "report.html"
    page = second.read_text(encoding="utf-8")
    assert "second run" in page and "first run" not in page
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "results.png"]
    embedded = re.search(r"base64,([^\"]+)", page).group(1)
    assert base64.b64decode(embedded) == (folder / "results.png").read_bytes()


def test_failed_write_leaves_the_old_report(tmp_path):
    write_report(report(title="old"), tmp_path)
    with pytest.raises(ValueError, match="occurs twice"):
        write_report(report(title="new", results=[result(), result()]), tmp_path)
    assert "old" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(list(tmp_path.iterdir())) == 2


def test_plot_is_a_png_that_grows_with_its_content():
    plain = plot_results([result()])
    curves = plot_results([result()], metrics=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"event": "saved"}])
    two_groups = plot_results([result(), result(group="new tools")])
    shapes = [imread(io.BytesIO(png)).shape for png in (plain, curves, two_groups)]
    assert shapes[1][0] > shapes[0][0] and shapes[1][1] == shapes[0][1]
    assert shapes[2][1] > shapes[0][1] and shapes[2][0] == shapes[0][0]


def test_plot_takes_any_names_and_missing_combinations():
    metrics = [{"step": 1, "loss": float("nan"), "stage": "$_{"}, {"step": 1, "loss": 1.0, "stage": "_b"}]
    results = [
        result("$x_{$", "日本 $"),
        result("other", "一組"),
        result("one", "一組", queries=1),
        result("", ""),
    ]
    assert plot_results(results, metrics=metrics).startswith(b"\x89PNG")


def test_plot_is_the_same_every_time():
    assert plot_results([result(), result("BM25")]) == plot_results([result(), result("BM25")])


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "no results"),
        ([result(), result()], "'jaxtool' occurs twice in group 'trained tools'"),
        ([result(), SystemResult(system="s", group="g", scores=scores(1, ks=(1,)))], "cut-offs"),
    ],
)
def test_results_that_cannot_be_drawn_are_named(results, message):
    with pytest.raises(ValueError, match=message):
        plot_results(results)


def test_a_folder_that_can_not_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file/inside"):
        with pytest.raises(ValueError, match="expected a folder for the report that can be written"):
            make_report_folder(place)
    assert make_report_folder(tmp_path / "a/b") == tmp_path / "a/b" and not list((tmp_path / "a/b").iterdir())
