"""Training an adapter on expert runs, so that a small base model becomes a policy or a world model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from obsspec.chat import ChatFormat
from obsspec.errors import InputError
from obsspec.models import DEFAULT_MODEL
from obsspec.training.finetune import Recipe, exact_spans, finetune, load_trainable
from obsspec.training.trajectories import ExpertRun, Role, rows

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def warmstart(
    role: Role,
    runs: Sequence[ExpertRun],
    output: Path,
    recipe: Recipe,
    base: str = DEFAULT_MODEL,
    notes: Console | None = None,
) -> None:
    """Trains an adapter that gives the model ``base`` its ``role``, as `finetune` does.

    Raises InputError where the runs teach nothing, or as `finetune` does.
    """
    runs = sorted(runs, key=lambda run: run.task)  # They were collected in whatever order they ended.
    trainable = load_trainable(base, recipe)
    chat_format = ChatFormat(trainable.tokenizer)
    data = [row for run in runs for row in rows(role, run, chat_format)]
    if not data:
        raise InputError("warm start: there is nothing to learn in the expert runs; collect some that solve their task")
    finetune(role, trainable, data, output, recipe, {"role": role, "tasks": _tasks(runs)}, notes)


@dataclass(frozen=True, slots=True)
class Score:
    """How many of the spans that a model is to write it writes exactly."""

    exact: int
    total: int


def evaluate(
    role: Role,
    model: PreTrainedModel | PeftModel,
    runs: Sequence[ExpertRun],
    tokenizer: PreTrainedTokenizerBase,
    finished: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """By family: how many commands (``done`` counted) or observations greedy decoding writes exactly, token for token.

    Each is asked for after the expert's own history. Of the policy, commands that are mistakes are not asked for; of
    the world model, observations longer than it drafts. ``finished`` is called after each run, for progress.
    """
    chat_format = ChatFormat(tokenizer)
    exact: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for run in runs:
        for row in rows(role, run, chat_format):
            right = exact_spans(model, row)
            total[run.family] += len(right)
            exact[run.family] += sum(right)
        finished()
    return {family: Score(exact[family], total[family]) for family in sorted(total)}


def _tasks(runs: Sequence[ExpertRun]) -> dict[str, str]:
    """The seeds of the runs' tasks, for each family and level."""
    seeds: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        seeds[f"{run.family}/{run.level}"].append(run.task.rpartition("/")[2])
    return {name: " ".join(seeds[name]) for name in sorted(seeds)}
