"""What an analysis found, as figures, as tables and as a page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from html import escape
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import pyarrow
import pyarrow.parquet
from plotly.graph_objects import Bar, Figure, Waterfall
from rich.console import ConsoleRenderable
from rich.table import Table

from obsspec.analysis.formats import Log
from obsspec.analysis.prediction import Prediction
from obsspec.analysis.savings import Losses, Savings, Times, advice
from obsspec.errors import InputError, writing
from obsspec.shell import kind_of

_MOST_KINDS = 12
_ALL = "rules + memory"


@dataclass(frozen=True, slots=True)
class Analysis:
    """All that was found out about a log."""

    log: Log
    times: list[list[Times]]
    source: str
    """The workload that times were drawn from where the log has none."""
    predictions: dict[str, list[Prediction]]
    """By predictor; the last one is all of them together."""
    savings: Savings

    @property
    def flat_times(self) -> list[Times]:
        return [own for row in self.times for own in row]

    def without(self, part: str) -> int:
        """How many steps the log does not tell the ``seconds`` or ``generation_seconds`` of."""
        steps = (step for rollout in self.log.rollouts for step in rollout.steps)
        return sum(getattr(step, part) is None for step in steps)


@dataclass(slots=True)
class Kind:
    """What was counted of all steps, or of those with one kind of command."""

    steps: int = 0
    attempted: int = 0
    """Steps whose best draft had a probability of at least one half."""
    exact: int = 0
    """Of those."""
    tool_seconds: float = 0.0
    hideable_seconds: float = 0.0
    """Under the next generation, if all were predicted."""
    predicted_seconds: float = 0.0
    """Of those, in steps that were exact."""

    def count(self, prediction: Prediction, own: Times) -> None:
        self.steps += 1
        self.attempted += prediction.attempted
        self.exact += prediction.exact
        self.tool_seconds += own.tool
        self.hideable_seconds += own.hideable
        self.predicted_seconds += own.hideable if prediction.exact else 0.0


@dataclass(slots=True)
class Counted:
    """By predictor, and by kind of command for all predictors together."""

    predictors: dict[str, Kind] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)


def counted(analysis: Analysis) -> Counted:
    counts = Counted()
    for name, predictions in analysis.predictions.items():
        own = counts.predictors[name] = Kind()
        for prediction, times in zip(predictions, analysis.flat_times, strict=True):
            own.count(prediction, times)
    kinds: dict[str, Kind] = defaultdict(Kind)
    commands = (step.command for rollout in analysis.log.rollouts for step in rollout.steps)
    for command, prediction, times in zip(commands, analysis.predictions[_ALL], analysis.flat_times, strict=True):
        kinds[kind_of(command)].count(prediction, times)
    largest = sorted(kinds, key=lambda kind: kinds[kind].steps, reverse=True)
    counts.kinds = {kind: kinds[kind] for kind in largest}
    return counts


def _shown(kinds: dict[str, Kind]) -> Iterator[tuple[str, Kind]]:
    """The most frequent ones, and the others together."""
    names = list(kinds)
    yield from ((name, kinds[name]) for name in names[:_MOST_KINDS])
    if rest := names[_MOST_KINDS:]:
        together = Kind(*(sum(getattr(kinds[name], part.name) for name in rest) for part in fields(Kind)))
        yield f"{len(rest)} others", together


def figures(analysis: Analysis) -> dict[str, Any]:
    """All of it as JSON."""
    counts, savings = counted(analysis), analysis.savings
    return {
        "rollouts": len(analysis.log.rollouts),
        "tasks": len({rollout.task for rollout in analysis.log.rollouts}),
        "steps": analysis.log.steps,
        "formats": dict(analysis.log.formats),
        "skipped": analysis.log.skipped,
        "incomplete": analysis.log.incomplete,
        "steps_without_tool_time": analysis.without("seconds"),
        "steps_without_generation_time": analysis.without("generation_seconds"),
        "times_from": analysis.source,
        "predictors": {name: asdict(own) for name, own in counts.predictors.items()},
        "kinds": {name: asdict(own) for name, own in counts.kinds.items()},
        "median_draft_seconds": _draft_seconds(analysis),
        "schedules": {name: asdict(own) | {"saved": savings.saved(name)} for name, own in savings.schedules.items()},
        "tool_seconds": asdict(savings.losses),
        "advice": list(advice(savings)),
    }


def _draft_seconds(analysis: Analysis) -> float:
    return median(each.seconds for each in analysis.predictions[_ALL])


def head(analysis: Analysis) -> Iterator[str]:
    """What was read, in sentences."""
    log = analysis.log
    tasks = len({rollout.task for rollout in log.rollouts})
    formats = ", ".join(f"{count} in {name}" for name, count in log.formats.items())
    yield f"Steps: {log.steps}, rollouts: {len(log.rollouts)} ({formats}), tasks: {tasks}."
    yield from log.left_out()
    for part, what in (("seconds", "tool"), ("generation_seconds", "generation")):
        if missing := analysis.without(part):
            yield (
                f"The log does not tell the {what} time of {missing} steps: drawn from the workload {analysis.source}, "
                "whatever the command, so seconds say what such times would give."
            )


_PARTS = {
    "hidden": "hidden",
    "late_or_held_back": "right, but late or held back",
    "wrong": "wrongly predicted",
    "nothing_drafted": "not predicted",
    "beyond_the_generation": "longer than the next generation",
}
assert list(_PARTS) == [part.name for part in fields(Losses)]


def tables(analysis: Analysis) -> Iterator[ConsoleRenderable | str]:
    counts, savings = counted(analysis), analysis.savings
    yield from head(analysis)
    for title, rows in (
        ("How predictable the observations are", counts.predictors.items()),
        (f"By kind of command, {_ALL}", _shown(counts.kinds)),
    ):
        yield _counts_table(title, rows)
    table = Table("schedule", "latency s", "saved", "hits", "hidden s", title="In the lab, on an idle server", **_LEFT)
    for name, own in savings.schedules.items():
        shown = f"{own.mean_latency:.1f}", f"{savings.saved(name):.1%}", f"{own.hits}", _seconds(own.hidden_seconds)
        table.add_row(name, *shown)
    yield table
    whole = savings.schedules["sequential"].tool_seconds
    table = Table("tool time at depth 1", "s", "of all", title="Where the tools' time goes", **_LEFT)
    for part, seconds in asdict(savings.losses).items():
        table.add_row(_PARTS[part], _seconds(seconds), _share(seconds, whole))
    yield table
    yield f"A draft takes {1000 * _draft_seconds(analysis):.2f} ms (median)."
    yield from advice(savings)


_LEFT: dict[str, Any] = {"title_justify": "left"}


def _counts_table(title: str, rows: Iterable[tuple[str, Kind]]) -> Table:
    table = Table(title=title, **_LEFT)
    table.add_column("")
    for name in ("steps", "attempted", "exact", "of all", "of attempted", "tool s", "can hide s", "predicted s"):
        table.add_column(name, justify="right")
    for name, own in rows:
        table.add_row(
            name if len(name) <= 30 else f"{name[:29]}…",
            *(f"{count}" for count in (own.steps, own.attempted, own.exact)),
            _share(own.exact, own.steps),
            _share(own.exact, own.attempted),
            *map(_seconds, (own.tool_seconds, own.hideable_seconds, own.predicted_seconds)),
        )
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


_FILES = _JSON, _HTML, _PARQUET = "analysis.json", "analysis.html", "steps.parquet"


def check_writable(directory: Path) -> None:
    """Makes the directory, and raises InputError where `write` would not be able to write there."""
    with writing(f"--output {directory}", "directory"):
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()
    for file in (directory / name for name in _FILES):
        with writing(f"--output {directory}: {file.name}", "directory"):
            if file.exists() and not file.is_file():
                raise InputError(f"--output {directory}: {file.name}: no file to write to; choose another directory")
            if file.exists() or file.is_symlink():  # Which may point to where nothing can be written.
                file.open("ab").close()


def write(analysis: Analysis, directory: Path) -> None:
    """Writes ``analysis.html``, ``analysis.json`` and ``steps.parquet``. Raises InputError where it cannot."""
    with writing(f"--output {directory}", "directory"):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _JSON).write_text(json.dumps(figures(analysis), indent=1) + "\n")
        (directory / _HTML).write_text(_page(analysis))
        pyarrow.parquet.write_table(pyarrow.table(_steps(analysis)), directory / _PARQUET)


def _steps(analysis: Analysis) -> dict[str, list[Any]]:
    """A column for each thing that is known of a step."""
    rows = []
    predictions, times = iter(analysis.predictions[_ALL]), iter(analysis.flat_times)
    for number, rollout in enumerate(analysis.log.rollouts):
        for place, step in enumerate(rollout.steps):
            prediction, own = next(predictions), next(times)
            best = prediction.guesses[0] if prediction.guesses else None
            rows.append(
                {
                    "rollout": number,
                    "task": rollout.task,
                    "step": place,
                    "command": step.command,
                    "kind": kind_of(step.command),
                    "seconds": own.tool,
                    "generation_seconds": own.generation,
                    "predictor": best.predictor if best else None,
                    "probability": best.probability if best else None,
                    "attempted": prediction.attempted,
                    "exact": prediction.exact,
                }
            )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _page(analysis: Analysis) -> str:
    """The sentences and three plots. The page needs no network."""
    counts, savings = counted(analysis), analysis.savings
    kinds = list(_shown(counts.kinds))
    losses = asdict(savings.losses)
    plots = [
        _bars(
            "Saved of the agents' latency, on an idle server",
            "%",
            {name: 100 * savings.saved(name) for name in savings.schedules if name != "sequential"},
        ),
        Figure(
            Waterfall(
                x=[*map(_PARTS.__getitem__, losses), "all"],
                y=[*losses.values(), 0],
                measure=["relative"] * len(losses) + ["total"],
            )
        ).update_layout(title_text="Where the tools' time goes at depth 1", yaxis_title_text="s"),
        Figure(
            [
                Bar(name="exact", x=[name for name, _ in kinds], y=[own.exact for _, own in kinds]),
                Bar(name="wrong", x=[name for name, _ in kinds], y=[own.attempted - own.exact for _, own in kinds]),
                Bar(
                    name="not attempted",
                    x=[name for name, _ in kinds],
                    y=[own.steps - own.attempted for _, own in kinds],
                ),
            ]
        ).update_layout(title_text=f"Steps by kind of command, {_ALL}", barmode="stack", yaxis_title_text="steps"),
    ]
    parts = [
        plot.to_html(full_html=False, include_plotlyjs=place == 0, default_height="450px")
        for place, plot in enumerate(plots)
    ]
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in (*head(analysis), *advice(savings)))
    return _PAGE.format(text=text, plots="".join(parts))


_PAGE = """<!doctype html>
<html>
<head>
<meta charset="utf-8">
<title>ObsSpec: analysis</title>
<style>body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto }}</style>
</head>
<body>
<h1>What ObsSpec would save</h1>
{text}
{plots}
</body>
</html>
"""


def _bars(title: str, unit: str, values: dict[str, float]) -> Figure:
    bar = Bar(x=list(values), y=list(values.values()), text=[f"{value:.1f} {unit}" for value in values.values()])
    return Figure(bar).update_layout(title_text=title, yaxis_title_text=unit)
