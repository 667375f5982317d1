"""Random schedules and faults against the sequential loop: the property tests' checks, many more times.

python benchmarks/schedules.py --examples 100000 --json schedules.json
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from scenarios import Scenario, check


def scenario(seed: int) -> Scenario:
    random = Random(seed)
    alone = random.random() < 0.5
    return Scenario(
        seed=seed,
        depth=random.randint(0, 3),
        breadth=random.randint(1, 3),
        max_turns=random.randint(1, 10),
        max_tokens=random.randint(1, 8),
        max_context=random.randint(5, 300),
        accuracy=random.random(),
        predictor_faults=random.choice((0.0, 0.3)),
        policy_faults=random.choice((0.0, 0.2, 0.6)),
        tool_fault_after=random.choice((None, None, random.randint(0, 5))),
        cancel_after=random.choice((None, None, random.uniform(0, 20))),
        seats=math.inf if alone else random.choice((1, 2, 3)),
        rollouts=1 if alone else random.randint(1, 3),
        suspensions=random.choice((0.0, 0.0, 0.5, 5.0)),
        least=random.choice((None, 0.0, 0.3)),
        spares=random.random() < 0.5,
    )


def outcomes_of(seed: int) -> dict[str, int]:
    counts: dict[str, int] = {"rollouts": 0}
    for rollout in check(scenario(seed)):
        counts["rollouts"] += 1
        for turn in rollout.turns:
            counts[turn.outcome] = counts.get(turn.outcome, 0) + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    totals: dict[str, int] = {}
    with multiprocessing.Pool(arguments.processes) as pool:
        results = pool.imap_unordered(outcomes_of, range(arguments.examples), chunksize=50)
        for counts in track(results, total=arguments.examples, console=Console(stderr=True)):
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
    figures = {"examples": arguments.examples, **totals, "violations": 0, "seconds": time.perf_counter() - began}
    table = Table(
        "what", "count", title="Random schedules: each equal to its sequential rollout, or this would have failed"
    )
    for name, value in figures.items():
        table.add_row(name, f"{value:,.0f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
