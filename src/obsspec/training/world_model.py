"""Training a world model on what rollouts did, and scoring it on that."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

from obsspec.analysis.formats import read_log
from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.errors import InputError
from obsspec.predictors.language_model import Limits
from obsspec.reports.tables import share
from obsspec.shell import kind_of
from obsspec.training.finetune import Recipe, Trainable, exact_spans, finetune
from obsspec.training.trajectories import Row, is_expert_runs, read_runs, world_model_rows
from obsspec.training.transitions import StoredRollout, Transitions, is_store
from obsspec.types import Exchange

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Weighting = Literal["uniform", "seconds"]
"""Whether every observation counts alike, or by the seconds that predicting it can hide."""

_MOST_HIDDEN = 2.0
"""Seconds: no more of a tool's time can be hidden than a generation takes."""
_LEAST_WEIGHT = 0.05
"""Of what was printed at once: it is part of later prompts, so it is worth knowing."""


def read_rollouts(paths: Sequence[Path], notes: Console | None = None) -> list[StoredRollout]:
    """What stores of transitions hold, the latest rollouts first, or the expert runs that `obsspec warmstart` kept, or
    logs that `obsspec analyze` reads, both in their order.

    A log's rollouts have no instruction, and an expert's no seconds. What of a log is left out is said in ``notes``.
    Raises InputError for what is none of these, or empty.
    """
    rollouts: list[StoredRollout] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or directory; give a store of transitions, or logs")
        if path.is_file() and is_store(path):
            with Transitions.reading(path) as transitions:
                rollouts += transitions.for_training()
        elif path.is_file() and is_expert_runs(path):
            for run in read_runs(path):
                count = len(run.exchanges)
                rollouts.append(
                    StoredRollout(run.task, run.instruction, run.exchanges, (0.0,) * count, (True,) * count)
                )
        else:
            log = read_log(path)
            if notes is not None:
                for sentence in log.left_out():
                    notes.print(f"{path}: {sentence}", soft_wrap=True)
            for logged in log.rollouts:
                exchanges = tuple(Exchange(step.command, step.observation) for step in logged.steps)
                seconds = tuple(step.seconds or 0.0 for step in logged.steps)
                rollouts.append(StoredRollout(logged.task, "", exchanges, seconds, (True,) * len(exchanges)))
    if not rollouts:
        raise InputError(f"{', '.join(map(str, paths))}: no transition; give one that rollouts have written to")
    return rollouts


def held_out(task: str, share: float) -> bool:
    """Whether a task is among the ``share`` of all tasks that are left out of training: a function of its name."""
    digest = hashlib.blake2b(task.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def rows_of(rollout: StoredRollout, chat: WorldModelChat, weighting: Weighting, first: int = 0) -> list[Row]:
    """What a rollout teaches from its step ``first`` on: what it printed that no later transition equals."""
    weights = [
        _weight(seconds, weighting) if fresh and place >= first else 0.0
        for place, (seconds, fresh) in enumerate(zip(rollout.seconds, rollout.fresh, strict=True))
    ]
    return world_model_rows(rollout.instruction, rollout.exchanges, weights, chat, Limits())


def _weight(seconds: float, weighting: Weighting) -> float:
    return 1.0 if weighting == "uniform" else max(_LEAST_WEIGHT, min(seconds, _MOST_HIDDEN) / _MOST_HIDDEN)


def train(
    rollouts: Iterable[StoredRollout],
    trainable: Trainable,
    output: Path,
    recipe: Recipe,
    weighting: Weighting,
    notes: Console | None = None,
) -> None:
    """Trains a world model on the rollouts, as `finetune` does."""
    chat = WorldModelChat(ChatFormat(trainable.tokenizer))
    rows = [row for rollout in rollouts for row in rows_of(rollout, chat, weighting)]
    if not rows:
        raise InputError("world model: nothing to learn: every observation is too long to be drafted")
    finetune("world model", trainable, rows, output, recipe, {"role": "world_model", "weighting": weighting}, notes)


@dataclass(slots=True)
class Tally:
    """Of some commands, how much of what they printed a world model foretells exactly."""

    steps: int = 0
    exact: int = 0
    seconds: float = 0.0
    """That the commands took."""
    exact_seconds: float = 0.0
    """That those took which are foretold."""

    def add(self, exact: bool, seconds: float) -> None:
        self.steps += 1
        self.exact += exact
        self.seconds += seconds
        self.exact_seconds += seconds * exact


def evaluate(
    rollouts: Iterable[StoredRollout],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    finished: Callable[[], None] = lambda: None,
) -> dict[str, Tally]:
    """By kind of command, the most frequent first: what greedy decoding after the true history foretells exactly.

    What is longer than a draft may be counts as not foretold. ``finished`` is called after each rollout.
    """
    chat = WorldModelChat(ChatFormat(tokenizer))
    tallies: dict[str, Tally] = defaultdict(Tally)
    for rollout in rollouts:
        exact = foretold(model, rollout, chat)
        for place, (exchange, seconds) in enumerate(zip(rollout.exchanges, rollout.seconds, strict=True)):
            tallies[kind_of(exchange.command)].add(place in exact, seconds)
        finished()
    return dict(sorted(tallies.items(), key=lambda item: -item[1].steps))


def foretold(
    model: PreTrainedModel | PeftModel, rollout: StoredRollout, chat: WorldModelChat, first: int = 0
) -> set[int]:
    """The places, from ``first`` on, whose observation greedy decoding after the true history writes exactly."""
    weights = [1.0 if place >= first else 0.0 for place in range(len(rollout.exchanges))]
    rows = world_model_rows(rollout.instruction, rollout.exchanges, weights, chat, Limits())
    exact = (
        (span.place, right) for row in rows for span, right in zip(row.spans, exact_spans(model, row), strict=True)
    )
    return {place for place, right in exact if right}


def together(tallies: Iterable[Tally]) -> Tally:
    """Their sum."""
    total = Tally()
    for tally in tallies:
        total.steps += tally.steps
        total.exact += tally.exact
        total.seconds += tally.seconds
        total.exact_seconds += tally.exact_seconds
    return total


def tallies_table(tallies: Mapping[str, Tally], title: str, most: int = 15) -> Table:
    """For people: a row for each of the most frequent kinds of command, one for the others, and one for all."""
    rows = list(tallies.items())
    table = Table("", "steps", "exact", "of tool seconds", title=title, title_justify="left")
    if len(rows) > most + 1:
        rest = together(tally for _, tally in rows[most:])
        rows = [*rows[:most], (f"{len(rows) - most} others", rest)]
    for name, tally in (*rows, ("all", together(tallies.values()))):
        table.add_row(
            name, str(tally.steps), share(tally.exact, tally.steps), share(tally.exact_seconds, tally.seconds)
        )
    return table
