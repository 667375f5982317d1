"""Rollouts on Ray against rollouts in one process: 1,024 at once, with a free policy, a free predictor and a free tool.

    python benchmarks/actors.py --json actors.json

The same rollouts in one process, and in four actors with a quarter of them each; ratios are of one repeat, interleaved.
CPU is that of the process with the rollouts, or of all actors and the process that hands the tasks out. What Ray's own
processes use counts in the seconds alone, which begin when all actors are there. Target: no rollout lost, and at most
1.5 times the CPU for each turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
from rich.console import Console
from rich.table import Table

from engine import TURNS, FreePredictor, script
from obsspec import Observation, Settings, Speculator, Task, rollout
from obsspec.actors import connected, spread
from obsspec.reports.records import TrajectoryLine, line_of
from obsspec.rollout import Failure, for_each
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode

ROLLOUTS, AT_ONCE, ACTORS = 2048, 1024, 4
RunOne = Callable[[Task, int], Awaitable[TrajectoryLine]]


@asynccontextmanager
async def worker(directory: Path, workers: int) -> AsyncIterator[RunOne]:
    """Begins when all are there, and says in ``directory`` when that was, and what CPU time it took from then on."""
    policy, chat, settings = ScriptedPolicy(script, seconds=0.0), ScriptedChat(), Settings(max_turns=TURNS)
    speculator = Speculator(policy, chat, FreePredictor(), settings)
    environment = ScriptedEnvironment(lambda executed: Observation("out"))
    began: list[float] = []
    name = uuid4().hex
    (directory / f"there {name}").touch()

    def all_there() -> bool:
        return len(list(directory.glob("there *"))) == workers

    async def run(task: Task, seed: int) -> TrajectoryLine:
        while not began:
            if all_there():
                began[:] = [time.process_time(), time.time()]
            else:
                await anyio.sleep(0.05)
        trajectory = await rollout(speculator, task, environment.open, seed)
        return line_of(trajectory, task.instruction, lambda generation: decode(generation.tokens))

    yield run
    (directory / f"took {name}").write_text(json.dumps([time.process_time() - began[0], began[1], time.time()]))


def measured(actors: int) -> dict[str, float]:
    """CPU milliseconds a turn and turns a second."""
    jobs = [(Task(str(place // 16), "go"), place % 16) for place in range(ROLLOUTS)]
    lines: list[TrajectoryLine] = []

    def finished(result: TrajectoryLine | Failure) -> None:
        assert isinstance(result, TrajectoryLine), result
        lines.append(result)

    async def here(open_worker: Callable[[], Any]) -> None:
        async with open_worker() as run:

            async def run_one(job: tuple[Task, int]) -> None:
                finished(await run(*job))

            await for_each(jobs, run_one, AT_ONCE)

    with tempfile.TemporaryDirectory() as directory:
        open_worker = partial(worker, Path(directory), actors or 1)
        before = time.process_time()
        if actors:
            anyio.run(spread, open_worker, jobs, actors, AT_ONCE // actors, finished)
        else:
            anyio.run(here, open_worker)
        driver = time.process_time() - before if actors else 0.0
        took = [json.loads(file.read_text()) for file in Path(directory).glob("took *")]
    assert len({(line.task, line.seed) for line in lines}) == len(lines) == ROLLOUTS
    assert len(took) == (actors or 1)
    turns = sum(len(line.turns) for line in lines)
    cpu, began, ended = zip(*took, strict=True)
    return {
        "cpu_ms_per_turn": 1000 * (sum(cpu) + driver) / turns,
        "turns_per_second": turns / (max(ended) - min(began)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    samples: dict[str, list[dict[str, float]]] = {"one process": [], f"{ACTORS} actors": []}
    with connected("local", ACTORS):
        for _ in range(arguments.repeats):
            for name, actors in zip(samples, (0, ACTORS), strict=True):
                samples[name].append(measured(actors))
    table = Table("", "CPU ms a turn", "ratio", "turns a second", title=f"{AT_ONCE:,} rollouts at once (medians)")
    alone = samples["one process"]
    for name, each in samples.items():
        ratios = [here["cpu_ms_per_turn"] / there["cpu_ms_per_turn"] for here, there in zip(each, alone, strict=True)]
        cpu, speed = (statistics.median(one[key] for one in each) for key in ("cpu_ms_per_turn", "turns_per_second"))
        table.add_row(name, f"{cpu:.2f}", f"{statistics.median(ratios):.2f}", f"{speed:,.0f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(samples, indent=1) + "\n")


if __name__ == "__main__":
    main()
