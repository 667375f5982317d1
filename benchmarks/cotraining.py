"""Whether a world model that is trained beside the rollouts keeps up with a policy whose tasks change midway.

    python benchmarks/cotraining.py --json cotraining.json

Experts solve generated tasks in the sandbox: of half of the families first, then of the other half, every task once.
What they do goes into a store of transitions, some rollouts a round, and a world model that has learned nothing yet is
co-trained on it: each observation is foretold before it is trained on. Beside it: the same model frozen, the version
that was published at the time, and a model trained afterwards, by as many tokens, on everything but the last part,
which is what it is scored on. All are scored alike: what greedy decoding after the true history writes exactly.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import anyio
import torch
from rich.console import Console
from rich.table import Table

from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.environments.sandbox import open_sandbox
from obsspec.models import DEFAULT_MODEL, load_model
from obsspec.reports.tables import counting
from obsspec.tasks import Instance, parse_instances
from obsspec.training.cotraining import CoTraining, Pace, Scored
from obsspec.training.finetune import Recipe, load_trainable
from obsspec.training.transitions import StoredRollout, Transitions
from obsspec.training.world_model import foretold, train
from obsspec.types import Exchange, Observation, Query

PARTS = ("before, first half", "before, second half", "after, first half", "after, second half")


@dataclass(frozen=True, slots=True)
class Played:
    """What an expert did, and what it saw."""

    task: str
    instruction: str
    commands: tuple[str, ...]
    observations: tuple[Observation, ...]

    def stored(self) -> StoredRollout:
        exchanges = tuple(
            Exchange(command, seen.text) for command, seen in zip(self.commands, self.observations, strict=True)
        )
        seconds = tuple(seen.seconds for seen in self.observations)
        return StoredRollout(self.task, self.instruction, exchanges, seconds, (True,) * len(exchanges))


async def play(instances: Sequence[Instance], advance: Any) -> list[Played]:
    played = []
    for instance in instances:
        async with open_sandbox(instance.task) as sandbox:
            commands = tuple(step.command for step in instance.expert)
            observations = tuple([await sandbox.execute(command) for command in commands])
        played.append(Played(instance.task.id, instance.task.instruction, commands, observations))
        advance()
    return played


def store(transitions: Transitions, rollout: Played) -> None:
    history: tuple[Exchange, ...] = ()
    for command, observation in zip(rollout.commands, rollout.observations, strict=True):
        transitions.add(rollout.task, Query(rollout.task, rollout.instruction, history, command), observation)
        history = (*history, Exchange(command, observation.text))


def cotrain(
    played: Sequence[Played], directory: Path, recipe: Recipe, pace: Pace, every: int, advance: Any
) -> tuple[list[list[Scored]], int]:
    """What was scored of each rollout, and how many tokens were trained on. A version is published every so many."""
    scored: list[list[Scored]] = []
    with Transitions.open(directory / "store.sqlite") as transitions:
        training = CoTraining(
            transitions, directory / "model", load_trainable(DEFAULT_MODEL, recipe), recipe, replace(pace, scored=1)
        )
        for number, rollout in enumerate(played, start=1):
            store(transitions, rollout)
            before = len(training.scored)
            while training.turn():  # Its pace decides how long.
                pass
            scored.append(list(training.scored)[before:])
            if number % every == 0:
                training.publish()
            advance(f", foretold {sum(each.exact for each in list(training.scored)[-100:])} of the last 100")
        return scored, training.figures.tokens


def rates(parts: Sequence[Sequence[tuple[bool, float]]]) -> list[dict[str, float]]:
    """For each part, the share of its observations that are foretold, and of the tools' seconds."""
    return [
        {
            "observations": len(part),
            "exact": sum(exact for exact, _ in part) / len(part),
            "exact_of_seconds": sum(seconds for exact, seconds in part if exact) / sum(seconds for _, seconds in part),
        }
        for part in parts
    ]


def score(rollouts: Sequence[StoredRollout], adapter: Path, advance: Any) -> list[list[tuple[bool, float]]]:
    """Of each rollout's observations, whether the model foretells them, and the seconds of their commands."""
    model, tokenizer = load_model(DEFAULT_MODEL, adapter)
    chat = WorldModelChat(ChatFormat(tokenizer))
    results = []
    for rollout in rollouts:
        exact = foretold(model, rollout, chat)
        results.append([(place in exact, seconds) for place, seconds in enumerate(rollout.seconds)])
        advance()
    return results


def parts(by_rollout: Sequence[Sequence[tuple[bool, float]]]) -> list[list[tuple[bool, float]]]:
    size = len(by_rollout) // len(PARTS)
    return [
        [each for rollout in by_rollout[number * size : (number + 1) * size] for each in rollout]
        for number in range(len(PARTS))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="archive,checksum,database,git_history,logs,permissions,replace,service")
    parser.add_argument(
        "--after", default="c_program,csv_table,file_tree,json_records,makefile,python_bug,schedule,text"
    )
    parser.add_argument("--tasks", default="easy/0-7", help="levels and seeds of both")
    parser.add_argument("--passes", type=float, default=4.0)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--rows-per-step", type=int, default=2)
    parser.add_argument("--publish", type=int, default=8, metavar="ROLLOUTS", help="between two versions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    notes = Console(stderr=True)
    recipe = Recipe(learning_rate=arguments.learning_rate, rows_per_step=arguments.rows_per_step)
    pace = Pace(passes=arguments.passes, window=1_000_000)

    instances: list[Instance] = []
    for families in (arguments.before, arguments.after):
        phase = list(parse_instances(f"generated:{families}/{arguments.tasks}"))
        Random(0).shuffle(phase)
        instances += phase
    with counting(notes, "experts", len(instances)) as advance:
        played = anyio.run(play, instances, advance)
    rollouts = [each.stored() for each in played]
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        with counting(notes, "co-training", len(played)) as advance:
            scored, tokens = cotrain(played, Path(scratch), recipe, pace, arguments.publish, advance)
        seconds = time.monotonic() - began
        last = len(rollouts) - len(rollouts) // len(PARTS)
        recipe = replace(recipe, tokens=tokens)
        afterwards = Path(scratch) / "afterwards"
        train(rollouts[:last], load_trainable(DEFAULT_MODEL, recipe), afterwards, recipe, "uniform", notes)
        with counting(notes, "scoring", len(rollouts) - last) as advance:
            trained = score(rollouts[last:], afterwards, advance)
    figures = {
        "frozen": rates(parts([[(each.frozen, each.seconds) for each in rollout] for rollout in scored])),
        "co-trained": rates(parts([[(each.exact, each.seconds) for each in rollout] for rollout in scored])),
        "co-trained, as published": rates(
            parts([[(each.published, each.seconds) for each in rollout] for rollout in scored])
        ),
        "trained afterwards": [*[None] * (len(PARTS) - 1), *rates([[each for rollout in trained for each in rollout]])],
    }
    table = Table("exact", *PARTS, title=f"{len(rollouts)} rollouts, {tokens:,} tokens trained on in {seconds:.0f} s")
    for name, row in figures.items():
        table.add_row(name, *("" if part is None else f"{part['exact']:.1%}" for part in row))
    table.add_section()
    for name, row in figures.items():
        table.add_row(
            f"{name}, of seconds", *("" if part is None else f"{part['exact_of_seconds']:.1%}" for part in row)
        )
    Console(width=140).print(table)
    if arguments.json:
        result = {"parts": PARTS, "rollouts": len(rollouts), "tokens": tokens, "seconds": seconds, "models": figures}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
