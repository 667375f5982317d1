"""How much of what commands print is foretold where every task has a group of rollouts, as in reinforcement learning.

    obsspec rollout --depth 0 --tasks generated:all/easy/0 --samples 16 --transitions groups.sqlite --output runs/groups
    python benchmarks/groups.py groups.sqlite --json groups.json

    obsspec world-model train LOG.jsonl.gz --output trained --tokens 100000 --hold-out 0.1
    python benchmarks/groups.py LOG.jsonl.gz --world-model trained --hold-out 0.1

Every step of the store or log is foretold from those before it, in the order in which they came, and then learned from:
by each predictor alone and by all together, the world model as it is. Probabilities are calibrated as the gate does it,
as drafts come true. A step counts as attempted where the likeliest draft has one of at least a half, and as exact where
it is that draft.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.errors import InputError
from obsspec.gate import Calibration
from obsspec.loading import base_and_adapter
from obsspec.policies.local import LocalPolicy
from obsspec.policies.networks import load_network
from obsspec.predictors import SANDBOX, Cascade, LanguageModel, Memory, Rules
from obsspec.predictors.harness import Harness
from obsspec.reports.tables import counting, share
from obsspec.training.transitions import Transitions, is_store
from obsspec.training.world_model import held_out
from obsspec.types import Draft, Exchange, Observation, Predictor, Query
from predictors import executed

LIKELY = 0.5
Step = tuple[Query, Observation]


class Remembering:
    """A predictor that is asked the same only once, for its answer never changes."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._drafts: dict[Query, list[Draft]] = {}

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        if query not in self._drafts:
            drafts: list[Draft] = []
            await self._predictor.predict(query, drafts.append)
            self._drafts[query] = drafts
        for draft in self._drafts[query]:
            propose(draft)

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


@dataclass(slots=True)
class Counts:
    """Of one predictor."""

    steps: int = 0
    attempted: int = 0
    exact: int = 0
    seconds: float = 0.0
    """Of all commands."""
    exact_seconds: float = 0.0
    """Of those that were foretold."""


async def count(predictor: Predictor, steps: Iterable[Step], advance: Callable[[], None]) -> Counts:
    counts, calibration = Counts(), Calibration()

    def likelihood(draft: Draft) -> float:
        return calibration.probability(draft.predictor, draft.probability)

    for query, observation in steps:
        drafts: list[Draft] = []
        await predictor.predict(query, drafts.append)
        best = max(drafts, key=likelihood, default=None)
        attempted = best is not None and likelihood(best) >= LIKELY
        exact = attempted and best is not None and best.text == observation.text
        counts.steps += 1
        counts.attempted += attempted
        counts.exact += exact
        counts.seconds += observation.seconds
        counts.exact_seconds += observation.seconds * exact
        for draft in drafts:
            calibration.learn(draft.predictor, draft.probability, draft.text == observation.text)
        predictor.learn(query, observation)
        advance()
    return counts


def printed_before(steps: Iterable[Step]) -> tuple[int, int]:
    """How many observations had been seen before in the same task: after the same command, and after any."""
    seen: set[tuple[str, ...]] = set()
    same = any_command = 0
    for query, observation in steps:
        task, command, text = query.task, query.command, observation.text
        same += (task, command, text) in seen
        any_command += (task, text) in seen
        seen |= {(task, command, text), (task, text)}
    return same, any_command


def logged(source: Path) -> tuple[list[Step], Harness]:
    """The steps of a log, and what ran its commands."""
    log, steps = executed(source), list[Step]()
    for rollout in log.rollouts:
        history: tuple[Exchange, ...] = ()
        for step in rollout.steps:
            query = Query(rollout.task, "", history, step.command)
            steps.append((query, Observation(step.observation, step.seconds or 0.0)))
            history = (*history, Exchange(step.command, step.observation))
    return steps, replace(SANDBOX, keeps_directory=log.keeps_directory)


def stored(source: Path) -> list[Step]:
    with Transitions.reading(source) as store:
        return [(each.query, each.observation) for each in store.after()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a store of transitions, or a log")
    parser.add_argument("--world-model", default="builtin")
    parser.add_argument("--hold-out", type=float, default=1.0, help="only tasks that training with the same leaves out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    source = arguments.source
    try:
        network, tokenizer = load_network(*base_and_adapter(arguments.world_model, "world_model"))
        if not source.is_file():
            raise InputError(f"{source}: no such file")
        steps, harness = (stored(source), SANDBOX) if is_store(source) else logged(source)
    except InputError as error:
        parser.error(str(error))
    steps = [(query, observation) for query, observation in steps if held_out(query.task, arguments.hold_out)]
    model = Remembering(LanguageModel(LocalPolicy(network), WorldModelChat(ChatFormat(tokenizer))))
    predictors: dict[str, Predictor] = {
        "rules": Rules(harness),
        "memory": Memory(),
        "rules, memory": Cascade({"rules": Rules(harness), "memory": Memory()}),
        "language model": model,
        # No impatience: it would make the outcome depend on the machine.
        "all": Cascade({"rules": Rules(harness), "memory": Memory(), "language_model": model}, patience=60.0),
    }
    results = {}
    with counting(Console(stderr=True), "predictions", len(predictors) * len(steps)) as advance:
        for name, predictor in predictors.items():
            results[name] = anyio.run(count, predictor, steps, advance)
    table = Table("", "attempted", "exact of attempted", "exact of all", "of tool seconds", title=f"{len(steps)} steps")
    for name, each in results.items():
        table.add_row(
            name,
            str(each.attempted),
            share(each.exact, each.attempted),
            share(each.exact, each.steps),
            share(each.exact_seconds, each.seconds),
        )
    console = Console(width=120)
    console.print(table)
    same, any_command = printed_before(steps)
    console.print(f"printed before in the same task by the same command: {share(same, len(steps))}")
    console.print(f"printed before in the same task by any command: {share(any_command, len(steps))}")
    if arguments.json:
        arguments.json.write_text(json.dumps({name: asdict(each) for name, each in results.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
