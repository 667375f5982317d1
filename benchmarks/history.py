"""What a world model should read of long observations: ways of cutting them, compared on a log.

    python benchmarks/history.py LOG.jsonl.gz [--train TOKENS] [--json FILE]

A world model's prompt has room for so many tokens, and starts again with the latest exchanges where it is full. So the
less is kept of a long observation, the more of them there are.

Without a model: an observation counts as known where each of its lines is a line of the prompt and it is as short as a
draft may be. That bounds nothing, but it tells what a way of cutting keeps of what is printed again. Restarts are what
costs a prefix cache. With --train: the default model learns from three quarters of the tasks, anew for each way, by as
many tokens, and is scored on the others: what greedy decoding after the true history writes exactly, and nats a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from obsspec.analysis.formats import LoggedRollout, read_log
from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.context import Tokens
from obsspec.models import DEFAULT_MODEL, load_model
from obsspec.predictors.language_model import Limits, Prompts, abridge
from obsspec.reports.tables import counting, share
from obsspec.training.finetune import Recipe, exact_spans, finetune, load_trainable
from obsspec.training.trajectories import Row, world_model_rows
from obsspec.training.world_model import held_out
from obsspec.types import Exchange, Query

WAYS: dict[str, Callable[[str], str]] = {
    "nothing": lambda text: "",
    "first and last 100 characters": lambda text: abridge(text, 200),
    "first and last 250": lambda text: abridge(text, 500),
    "first and last 1000": lambda text: abridge(text, 2000),
    "first and last 4000": lambda text: abridge(text, 8000),
    "first 2000": lambda text: text[:2000],
    "last 2000": lambda text: text[-2000:],
}
TRAINED = (200, 500, 2000)
"""Characters kept, half of them the first and half the last, where models are trained."""
HELD_OUT = 0.25


@dataclass
class Kept:
    """What a way of cutting keeps."""

    steps: int = 0
    """That print something short enough to be drafted."""
    known: int = 0
    """Of them, those whose every line is in the prompt."""
    prompt_tokens: int = 0
    """Of all prompts together."""
    restarts: int = 0


def measure(rollout: LoggedRollout, form: ChatFormat, cut: Callable[[str], str], kept: Kept) -> None:
    limits, chat = Limits(observation_characters=sys.maxsize), WorldModelChat(form)
    prompts = Prompts(chat, limits)
    history: tuple[Exchange, ...] = ()
    before: Tokens = ()
    for step in rollout.steps:
        prompt = prompts.before(Query(rollout.task, "", history, step.command)).tokens
        kept.restarts += prompt[: len(before)] != before
        kept.prompt_tokens += len(prompt)
        before = prompt
        lines = {line for line in step.observation.splitlines() if line.strip()}
        if lines and len(chat.answer(step.observation)) <= limits.draft_tokens:
            kept.steps += 1
            kept.known += lines <= set(form.decode(prompt).splitlines())
        history = (*history, Exchange(step.command, cut(step.observation)))


@dataclass
class Learned:
    """What a model that was trained on one way of cutting makes of tasks that it was not trained on."""

    observations: int = 0
    """Short enough to be drafted."""
    exact: int = 0
    tokens: int = 0
    nats: float = 0.0


def rows(rollouts: Iterable[LoggedRollout], form: ChatFormat, characters: int) -> list[Row]:
    limits = Limits(observation_characters=characters)
    found: list[Row] = []
    for rollout in rollouts:
        exchanges = [Exchange(step.command, step.observation) for step in rollout.steps]
        found += world_model_rows("", exchanges, [1.0] * len(exchanges), WorldModelChat(form), limits)
    return found


def train(rollouts: Sequence[LoggedRollout], form: ChatFormat, characters: int, tokens: int, notes: Console) -> Learned:
    recipe = Recipe(tokens=tokens, longest=Limits().context_tokens)
    taught = [rollout for rollout in rollouts if not held_out(rollout.task, HELD_OUT)]
    scored = [rollout for rollout in rollouts if held_out(rollout.task, HELD_OUT)]
    trainable = load_trainable(DEFAULT_MODEL, recipe)
    with tempfile.TemporaryDirectory() as scratch:
        what = f"{characters} characters"
        finetune(what, trainable, rows(taught, form, characters), Path(scratch) / "model", recipe, {})
    learned = Learned()
    model = trainable.model.eval()
    asked = rows(scored, form, characters)
    with counting(notes, "scoring", len(asked)) as advance, torch.inference_mode():
        for row in asked:
            exact = exact_spans(model, row)
            ids = torch.tensor([row.tokens])
            logits = model(input_ids=ids).logits[0]
            for span, right in zip(row.spans, exact, strict=True):
                each = functional.cross_entropy(logits[span.start - 1 : span.end - 1], ids[0, span.start : span.end])
                learned.tokens += span.end - span.start
                learned.nats += float(each) * (span.end - span.start)
                learned.observations += 1
                learned.exact += right
            advance()
    return learned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth rollout of the log only")
    parser.add_argument("--train", type=int, metavar="TOKENS", help="train a model for some of the ways")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rollouts = read_log(arguments.log).rollouts[:: arguments.every]
    form = ChatFormat(load_model(DEFAULT_MODEL)[1])
    kept = {name: Kept() for name in WAYS}
    notes = Console(stderr=True)
    with counting(notes, "rollouts", len(rollouts)) as advance:
        for rollout in rollouts:
            for name, cut in WAYS.items():
                measure(rollout, form, cut, kept[name])
            advance()
    steps = sum(len(rollout.steps) for rollout in rollouts)
    table = Table("kept of an observation", "known", "mean prompt, tokens", "restarts a rollout")
    table.title = f"{len(rollouts)} rollouts, {steps:,} steps"
    for name, each in kept.items():
        table.add_row(
            name,
            f"{each.known / each.steps:.1%}",
            f"{each.prompt_tokens / steps:,.0f}",
            f"{each.restarts / len(rollouts):.1f}",
        )
    console = Console(width=120)
    console.print(table)
    figures: dict[str, Any] = {"kept": {name: asdict(each) for name, each in kept.items()}}
    if arguments.train:
        table = Table("characters kept", "exact", "nats a token", title=f"{arguments.train:,} tokens trained on")
        figures["learned"] = {}
        for characters in TRAINED:
            learned = train(rollouts, form, characters, arguments.train, notes)
            figures["learned"][characters] = asdict(learned)
            exact = share(learned.exact, learned.observations)
            table.add_row(f"{characters:,}", exact, f"{learned.nats / learned.tokens:.3f}")
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
