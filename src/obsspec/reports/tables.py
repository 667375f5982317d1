"""Summaries and comparisons for people to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, ConsoleRenderable, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from obsspec.reports.comparison import Comparison
from obsspec.reports.summary import Summary

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def counting(console: Console, what: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """Shows how far something is: a bar, or a line now and then where the console is no terminal.

    Yields a function to call after each of ``total``, with a remark where there is one.
    """
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as bar:
            counter = bar.add_task(what, total=total, completed=done)
            yield lambda remark="": bar.update(counter, advance=1, description=f"{what}{remark}")
        return
    shown = time.monotonic()

    def advance(remark: str = "") -> None:
        nonlocal done, shown
        done += 1
        if time.monotonic() - shown > _SECONDS_BETWEEN_LINES or done == total:
            shown = time.monotonic()
            console.print(f"{what}{remark}: {done} of {total}")

    yield advance


def share(part: float, whole: float) -> str:
    return f"{part:.0f} of {whole:.0f} ({part / whole:.1%})" if whole else "0 of 0"


def summary_table(summary: Summary, title: str) -> ConsoleRenderable:
    table = Table(show_header=False, title=title, title_justify="left")
    for name, value in _summary_rows(summary):
        table.add_row(name, value)
    if not summary.predictors:
        return table
    headings = ("predictor", "drafted", "exact", "draft s", "hits", "hidden s")
    predictors = Table(*headings, title="Predictors", title_justify="left")
    for name, own in summary.predictors.items():
        predictors.add_row(
            name or "(none)",
            f"{own.drafted}",
            f"{own.exact} of {own.drafts}",
            f"{own.draft_seconds:.2f}",
            f"{own.hits} ({own.share_of_hits:.1%})",
            f"{own.hidden_seconds:.1f} ({own.share_of_hidden:.1%})",
        )
    return Group(table, predictors)


def families_table(summaries: Mapping[str, Summary]) -> ConsoleRenderable:
    """How many rollouts of each family were solved, a column for each of ``summaries``."""
    table = Table("family", *summaries, title="Solved", title_justify="left")
    families = sorted({family for summary in summaries.values() for family in summary.solved_by_family})
    for family in families:
        counts = (summary.solved_by_family.get(family, (0, 0)) for summary in summaries.values())
        table.add_row(family or "(none)", *(share(*count) for count in counts))
    return table


def _summary_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "rollouts", f"{summary.rollouts} of {summary.tasks} tasks"
    yield "solved", share(summary.solved, summary.rollouts)
    yield "agent latency", f"{summary.agent_seconds:.1f} s"
    yield "  generating", f"{summary.generation_seconds:.1f} s"
    yield "  tools", f"{summary.tool_seconds:.1f} s in {summary.tool_calls} calls"
    yield "  waiting", f"{summary.waiting_seconds:.1f} s for a seat or for other rollouts here"
    if summary.attempted:
        yield (
            "  hidden",
            f"{summary.hidden_seconds:.1f} s ({_ratio(summary.hidden_seconds, summary.tool_seconds)} of tools)",
        )
        yield "hits of all calls", share(summary.hits, summary.tool_calls)
        yield "hits of attempted", share(summary.hits, summary.attempted)
        yield "hits of drafted in time", share(summary.hits, summary.drafted)
        yield "outcomes of calls", ", ".join(f"{name} {count}" for name, count in sorted(summary.outcomes.items()))
        yield "wasted tokens", f"{summary.wasted_tokens} beside {summary.kept_tokens} kept"


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"


def comparison_table(comparison: Comparison, first: str, second: str) -> ConsoleRenderable:
    table = Table(show_header=False, title=f"{first} against {second}", title_justify="left")
    table.add_row("agent latency", f"{comparison.first_seconds:.1f} s against {comparison.second_seconds:.1f} s")
    if comparison.first_seconds:
        table.add_row("ratio", f"{comparison.second_seconds / comparison.first_seconds:.3f}")
    table.add_row("largest difference of log-probabilities", f"{comparison.largest_logprob_difference:.2g}")
    for difference in (*comparison.different, *comparison.environment):
        table.add_row(f"{difference.task} seed {difference.seed}", f"turn {difference.turn}: {difference.what}")
    for name, only in ((first, comparison.only_in_first), (second, comparison.only_in_second)):
        if only:
            table.add_row(f"only in {name}", ", ".join(f"{task} seed {seed}" for task, seed in only))
    return table
