"""How often the built-in world model predicts exactly what a command prints, on tasks that it was not trained on.

    python benchmarks/world_model.py --json world_model.json

Experts solve held-out tasks in the sandbox; every observation is then predicted from the exchanges before it, by rules
and memory (which learn from each exchange in turn, and with --learned FILE start from the expert runs that
`obsspec warmstart` kept there) and by the world model. A predictor is exact where its likeliest draft is, and where it
has no draft it is not. Seconds are those of a draft, on one thread, against those of the command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.environments.sandbox import open_sandbox
from obsspec.errors import InputError
from obsspec.models import BUILTIN_WORLD_MODEL, DEFAULT_MODEL, adapter_base
from obsspec.policies.local import LocalPolicy
from obsspec.policies.networks import load_network
from obsspec.predictors import Cascade, LanguageModel, Memory, Rules
from obsspec.reports.tables import counting
from obsspec.tasks import Instance, parse_instances
from obsspec.training.trajectories import read_runs
from obsspec.types import Draft, Exchange, Observation, Predictor, Query

PREDICTORS = ("rules_and_memory", "world_model", "either")


@dataclass(frozen=True, slots=True)
class Step:
    """A command of an expert, what was known before it, and what it printed."""

    family: str
    query: Query
    observation: Observation


@dataclass(slots=True)
class Prediction:
    """Of one step by one predictor."""

    exact: bool
    drafted: bool
    seconds: float


async def play(instances: Iterable[Instance]) -> list[Step]:
    """One at a time, so that nothing but the commands takes their time."""
    steps = []
    for instance in instances:
        history: tuple[Exchange, ...] = ()
        async with open_sandbox(instance.task) as sandbox:
            for expert in instance.expert:
                observation = await sandbox.execute(expert.command)
                query = Query(instance.task.id, instance.task.instruction, history, expert.command)
                steps.append(Step(instance.task.family, query, observation))
                history = (*history, Exchange(expert.command, observation.text))
    return steps


async def predict(predictor: Predictor, steps: Iterable[Step], advance: Any) -> list[Prediction]:
    predictions = []
    for step in steps:
        drafts: list[Draft] = []
        began = time.perf_counter()
        await predictor.predict(step.query, drafts.append)
        seconds = time.perf_counter() - began
        best = max(drafts, key=lambda draft: draft.probability, default=None)
        predictions.append(Prediction(best is not None and best.text == step.observation.text, bool(drafts), seconds))
        predictor.learn(step.query, step.observation)
        advance()
    return predictions


def learn(predictor: Predictor, file: Path) -> None:
    for run in read_runs(file):
        for turn, exchange in enumerate(run.exchanges):
            query = Query(run.task, run.instruction, run.exchanges[:turn], exchange.command)
            predictor.learn(query, Observation(exchange.observation))


def figures(steps: list[Step], tables: list[Prediction], model: list[Prediction]) -> list[dict[str, Any]]:
    """A row for each family, then one for all."""
    by_family: dict[str, list[int]] = defaultdict(list)
    for place, step in enumerate(steps):
        by_family[step.family].append(place)
    groups = [*sorted(by_family.items()), ("all", list(range(len(steps))))]
    return [
        {
            "family": family,
            "steps": len(places),
            "rules_and_memory": sum(tables[place].exact for place in places),
            "world_model": sum(model[place].exact for place in places),
            "drafted": sum(model[place].drafted for place in places),
            "either": sum(tables[place].exact or model[place].exact for place in places),
            "draft_seconds": statistics.median(model[place].seconds for place in places),
            "slow_steps": len(slow := [place for place in places if steps[place].observation.seconds >= 0.5]),
            "slow_world_model": sum(model[place].exact for place in slow),
            "slow_draft_seconds": sum(model[place].seconds for place in slow),
            "slow_tool_seconds": sum(steps[place].observation.seconds for place in slow),
        }
        for family, places in groups
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="generated:all/easy,medium/0-2")
    parser.add_argument(
        "--learned",
        type=Path,
        metavar="FILE",
        help="expert runs that rules and memory start from, as `obsspec warmstart --runs` writes them",
    )
    parser.add_argument("--adapter", default=BUILTIN_WORLD_MODEL)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tables = Cascade({"rules": Rules(), "memory": Memory()})
    if arguments.learned:
        try:
            learn(tables, arguments.learned)
        except InputError as error:
            parser.error(str(error))
    base = DEFAULT_MODEL if arguments.adapter == BUILTIN_WORLD_MODEL else adapter_base(Path(arguments.adapter))
    network, tokenizer = load_network(base, arguments.adapter)
    model = LanguageModel(LocalPolicy(network), WorldModelChat(ChatFormat(tokenizer)))

    steps = anyio.run(play, parse_instances(arguments.tasks))
    with counting(Console(stderr=True), "predictions", 2 * len(steps)) as advance:
        results = [anyio.run(predict, each, steps, advance) for each in (tables, model)]
    rows = figures(steps, *results)
    table = Table(title=f"Exact predictions, {arguments.tasks}")
    for heading in (
        "family",
        "steps",
        "rules + memory",
        "world model",
        "either",
        "draft s",
        "from 0.5 s",
        "draft / tool",
    ):
        table.add_column(heading)
    for row in rows:
        exact = (f"{row[name]} ({row[name] / row['steps']:.0%})" for name in PREDICTORS)
        slow = f"{row['slow_world_model']} of {row['slow_steps']}"
        ratio = row["slow_draft_seconds"] / row["slow_tool_seconds"] if row["slow_steps"] else None
        shown = "" if ratio is None else f"{ratio:.2f}"
        table.add_row(row["family"], str(row["steps"]), *exact, f"{row['draft_seconds']:.2f}", slow, shown)
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"tasks": arguments.tasks, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
