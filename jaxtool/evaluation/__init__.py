"""Evaluation: rankings scored, the BM25 baseline, reports and plots."""

from jaxtool.evaluation.bm25 import BM25Ranker, tokenize, tool_text
from jaxtool.evaluation.plots import SystemResult, plot_results
from jaxtool.evaluation.ranking import RankingScores, evaluate_rankings
from jaxtool.evaluation.report import (
    METRIC_NOTE,
    Example,
    Report,
    make_report_folder,
    print_results,
    printable,
    render_html,
    results_table,
    write_report,
)

__all__ = [
    "METRIC_NOTE",
    "BM25Ranker",
    "Example",
    "RankingScores",
    "Report",
    "SystemResult",
    "evaluate_rankings",
    "make_report_folder",
    "plot_results",
    "print_results",
    "printable",
    "render_html",
    "results_table",
    "tokenize",
    "tool_text",
    "write_report",
]
