"""What the engine costs: CPU time for each turn, with a free policy, a free predictor and a free tool.

    python benchmarks/engine.py --json engine.json

The sequential loop here is the same engine at depth 0. Target: under 1 ms of CPU for each turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from obsspec import Draft, Observation, Query, Settings, Speculator, Task, rollouts
from obsspec.context import Tokens
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode

TURNS, ROLLOUTS, REPEATS = 20, 64, 7


def script(context: Tokens, seed: int) -> str:
    return "done" if decode(context[-300:]).count("ls") >= TURNS - 1 else "ls"


class FreePredictor:
    """Right for every second command."""

    def __init__(self) -> None:
        self.asked = 0

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        self.asked += 1
        propose(Draft("out" if self.asked % 2 else "wrong", 0.9))
        propose(Draft("other", 0.5))

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


def cpu_milliseconds_per_turn(depth: int, breadth: int) -> float:
    speculator = Speculator(
        ScriptedPolicy(script, seconds=0.0),
        ScriptedChat(),
        FreePredictor(),
        Settings(depth=depth, breadth=breadth, max_turns=TURNS),
    )
    environment = ScriptedEnvironment(lambda executed: Observation("out"))
    jobs = [(Task(str(place), "go"), place) for place in range(ROLLOUTS)]
    began = time.process_time()
    results = anyio.run(rollouts, speculator, jobs, environment.open, ROLLOUTS)
    seconds = time.process_time() - began
    return 1000 * seconds / sum(len(result.turns) for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes = [(0, 1), (1, 1), (1, 2), (2, 1), (3, 2)]
    samples: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(REPEATS):
        for shape in shapes:
            samples[shape].append(cpu_milliseconds_per_turn(*shape))
    sequential = statistics.median(samples[0, 1])
    table = Table("depth", "breadth", "CPU ms a turn", "more than sequential", title="Engine overhead (medians)")
    rows = []
    for depth, breadth in shapes:
        median = statistics.median(samples[depth, breadth])
        rows.append({"depth": depth, "breadth": breadth, "ms_per_turn": median, "overhead_ms": median - sequential})
        table.add_row(str(depth), str(breadth), f"{median:.2f}", f"{median - sequential:.2f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"turns": TURNS, "rollouts": ROLLOUTS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
