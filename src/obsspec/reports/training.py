"""What a training does, step by step: for people while it runs, and as a line of JSON for each step."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from obsspec.errors import writing
from obsspec.lines import append_durably
from obsspec.reports.records import TrajectoryLine
from obsspec.reports.summary import summarize
from obsspec.reports.tables import share

if TYPE_CHECKING:
    from obsspec.training.settings import TrainingSettings

_SHOWN = 12
"""Steps in the live table."""
_HEADINGS = (
    "step",
    "reward",
    "solved",
    "hits of calls",
    "hidden s",
    "rollouts s",
    "update s",
    "step s",
    "without speculation s",
    "world model",
)


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """Of the rollouts of one step, or of one evaluation."""

    rollouts: int
    solved: int
    """With reward 1 (or more)."""
    reward: float
    """Mean."""
    broken: int
    """Rollouts that broke in every attempt; in none of the other figures."""
    seconds: float
    """All of them together took."""
    seconds_without: float
    """That they would have taken without speculation, estimated: each longer by what was hidden of its tools, and again
    so many at a time."""
    tool_calls: int
    attempted: int
    hits: int
    hidden_seconds: float
    tool_seconds: float
    agent_seconds: float
    kept_tokens: int
    wasted_tokens: int


def rollout_figures(lines: Sequence[TrajectoryLine], broken: int, seconds: float, concurrency: int) -> RolloutFigures:
    summary = summarize(lines)
    took = [line.seconds for line in lines]
    hidden = [sum(turn.hidden_seconds for turn in line.turns) for line in lines]
    longer = [each + more for each, more in zip(took, hidden, strict=True)]
    ratio = makespan(longer, concurrency) / makespan(took, concurrency) if any(took) else 1.0
    return RolloutFigures(
        rollouts=len(lines),
        solved=summary.solved,
        reward=sum(line.reward or 0.0 for line in lines) / len(lines) if lines else 0.0,
        broken=broken,
        seconds=seconds,
        seconds_without=seconds * ratio,
        tool_calls=summary.tool_calls,
        attempted=summary.attempted,
        hits=summary.hits,
        hidden_seconds=summary.hidden_seconds,
        tool_seconds=summary.tool_seconds,
        agent_seconds=summary.agent_seconds,
        kept_tokens=summary.kept_tokens,
        wasted_tokens=summary.wasted_tokens,
    )


def makespan(seconds: Sequence[float], concurrency: int) -> float:
    """How long it takes to do all, in order, each begun as soon as fewer than ``concurrency`` are under way."""
    ends = [0.0] * concurrency
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A line of ``steps.jsonl``."""

    step: int
    """From 1."""
    seconds: float
    waiting_seconds: float
    """For rollouts: all that they took, unless they were begun ahead."""
    update_seconds: float
    """Of the optimizer, the passes included."""
    publish_seconds: float
    """Until the new weights could be sampled from."""
    rollouts: RolloutFigures
    skipped: bool
    """Whether the weights stayed, because gradients were no numbers."""
    world_model: dict[str, Any] | None
    """What is known of its current version where it is co-trained."""
    trl: dict[str, float | None]
    """What TRL logs."""


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """A line of ``evaluations.jsonl``."""

    step: int
    """Steps trained before."""
    rollouts: RolloutFigures


class Journal:
    """The two files of records in a run's directory, cut back to where a resumed run goes on."""

    def __init__(self, directory: Path, step: int) -> None:
        """``step``: the last one that is kept. Raises InputError where they cannot be written."""
        self._steps = directory / "steps.jsonl"
        self._evaluations = directory / "evaluations.jsonl"
        self.evaluated: set[int] = set()
        with writing(directory, "directory"):
            for file in (self._steps, self._evaluations):
                kept = [line for line in read_records(file) if line["step"] <= step]
                new = file.with_suffix(".new")
                new.write_text("".join(json.dumps(line) + "\n" for line in kept))
                new.replace(file)
                if file == self._evaluations:
                    self.evaluated = {line["step"] for line in kept}

    def write(self, record: StepRecord | EvaluationRecord) -> None:
        """Durably. Raises InputError where there is no room."""
        file = self._steps if isinstance(record, StepRecord) else self._evaluations
        with writing(file, "directory"), file.open("ab", buffering=0) as stream:
            append_durably(stream, json.dumps(asdict(record)).encode() + b"\n")


def read_records(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of records; none where there is no file."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # A kill may have cut the last one short.


class Display:
    """A table of the latest steps and a bar for what is under way; where there is no terminal, a line for each step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._rows: list[tuple[str, ...]] = []
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(TextColumn("{task.description}"), *columns, console=console)
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the block runs."""
        if not self._console.is_terminal:
            yield
            return
        with Live(self, console=self._console, refresh_per_second=4) as self._live:
            yield
        self._live = None

    @contextmanager
    def phase(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Yields a function to call after each of ``total``."""
        bar: TaskID = self._bar.add_task(what, total=total)
        try:
            yield lambda: self._bar.advance(bar)
        finally:
            self._bar.remove_task(bar)

    def step(self, record: StepRecord) -> None:
        rollouts = record.rollouts
        row = (
            f"{record.step} of {self._steps}",
            f"{rollouts.reward:.2f}",
            f"{rollouts.solved} of {rollouts.rollouts}",
            f"{rollouts.hits} of {rollouts.tool_calls}",
            f"{rollouts.hidden_seconds:.1f} of {rollouts.tool_seconds:.1f}",
            f"{rollouts.seconds:.0f}",
            f"{record.update_seconds:.0f}",
            f"{record.seconds:.0f}",
            # Rollouts that were begun ahead were hidden as well, and how much of that is left is not known.
            f"{record.seconds + rollouts.seconds_without - rollouts.seconds:.0f}"
            if record.waiting_seconds >= rollouts.seconds
            else "",
            _world_model(record.world_model),
        )
        self._rows = [*self._rows, row][-_SHOWN:]
        if self._live is None:
            named = zip(_HEADINGS[1:], row[1:], strict=True)
            said = ", ".join(f"{name} {value}" for name, value in named if value)
            self._console.print(f"step {row[0]}: {said}", soft_wrap=True)

    def evaluation(self, record: EvaluationRecord) -> None:
        rollouts = record.rollouts
        said = f"held out after step {record.step}: {share(rollouts.solved, rollouts.rollouts)} solved"
        self._console.print(said, soft_wrap=True)

    def __rich__(self) -> Group:
        table = Table(*_HEADINGS)
        for row in self._rows:
            table.add_row(*row)
        return Group(table, self._bar)


def _world_model(about: dict[str, Any] | None) -> str:
    if about is None:
        return ""
    rate, frozen = about.get("exact_rate"), about.get("exact_rate_frozen")
    said = f"v{about.get('version')}" + (f", {rate:.0%} exact" if rate is not None else "")
    return said + (f" (frozen {frozen:.0%})" if frozen is not None else "")


def training_table(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Table:
    """What came of a training, from its records: the first and the second half of its steps, and evaluations."""
    table = Table("", "first half", "second half", title=f"{len(steps)} steps", title_justify="left")
    halves = [half for half in (steps[: len(steps) // 2], steps[len(steps) // 2 :]) if half]
    if len(halves) == 1:
        table = Table("", "all", title="1 step", title_justify="left")

    def total(half: Sequence[dict[str, Any]], name: str) -> float:
        return sum(float(each["rollouts"][name]) for each in half)

    def add(name: str, value: Callable[[Sequence[dict[str, Any]]], str]) -> None:
        table.add_row(name, *map(value, halves))

    add("solved", lambda half: share(total(half, "solved"), total(half, "rollouts")))
    add("hits of calls", lambda half: share(total(half, "hits"), total(half, "tool_calls")))
    add("hidden seconds of tools", lambda half: share(total(half, "hidden_seconds"), total(half, "tool_seconds")))
    add("rollouts, s a step", lambda half: f"{total(half, 'seconds') / len(half):.1f}")
    add("  without speculation, estimated", lambda half: f"{total(half, 'seconds_without') / len(half):.1f}")
    add("update, s a step", lambda half: f"{sum(each['update_seconds'] for each in half) / len(half):.1f}")
    for each in evaluations:
        rollouts = each["rollouts"]
        table.add_row(f"held out, after step {each['step']}", share(rollouts["solved"], rollouts["rollouts"]))
    return table


def outlook(settings: TrainingSettings, tasks: int, held_out: int) -> dict[str, str]:
    """What a training is going to do, before it does it, in words."""
    optimization, rollouts, speculation = settings.optimization, settings.rollouts, settings.speculation
    steps, each = optimization.steps, settings.rollouts_per_step
    evaluations = len(evaluation_steps(steps, optimization.evaluate_every)) if held_out else 0
    samples = held_out * optimization.evaluation_samples
    world_model = f"{speculation.world_model}, {'co-trained' if speculation.cotrain else 'frozen'}"
    if speculation.depth == 0 or "language_model" not in speculation.predictor.split(","):
        world_model = f"{world_model} for later: no predictor uses it" if speculation.cotrain else "none"
    needs = ["trl", "datasets", *optimization.report_to]
    missing = [name for name in needs if find_spec(name) is None]
    return {
        "policy": f"{settings.policy.policy}, {'all weights' if settings.policy.full else 'an adapter'}",
        "sampled from": settings.policy.server or f"this process, in {settings.policy.precision}",
        "learns on": f"{tasks} tasks: {settings.tasks.tasks}",
        "steps": f"{steps}, of {rollouts.tasks_per_step} tasks and {rollouts.group} rollouts each",
        "passes over the tasks": f"{steps * rollouts.tasks_per_step / tasks:.2f}",
        "rollouts": f"{steps * each:,} of at most {rollouts.max_turns} turns and {rollouts.max_context:,} tokens, "
        f"{rollouts.concurrency} at a time",
        "tokens read in learning": f"at most {steps * each * rollouts.max_context:,}",
        "evaluations": f"{evaluations} of {samples} rollouts, not speculated on, on {held_out} tasks: "
        f"{settings.tasks.held_out}"
        if evaluations
        else "none",
        "speculation": f"{speculation.predictor}, depth {speculation.depth}, breadth {speculation.breadth}"
        if speculation.depth
        else "none",
        "world model": world_model,
        "checkpoints": f"every {optimization.checkpoint_every} steps, the last {optimization.keep} kept",
        "needs": ", ".join(needs) + (f"; missing: {', '.join(missing)}" if missing else "; all there"),
    }


def evaluation_steps(steps: int, every: int) -> list[int]:
    """After which steps a training is evaluated: before the first, each so many, and after the last."""
    return sorted({*range(0, steps, every), steps}) if every else []
