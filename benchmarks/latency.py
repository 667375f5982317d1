"""What speculation hides on real rollouts, by depth and breadth, with the sandbox here and as if it were remote.

    python benchmarks/latency.py --json latency.json

Rollouts of the built-in policy on generated tasks, one at a time, by every setting in turn. A remote sandbox is this
one with a delay added to every command (`obsspec.environments.latency`). Ratios are to the sequential rollout with the
same delay: less is better.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from obsspec.demo import PLAN, interleaved
from obsspec.reports.comparison import compare
from obsspec.reports.records import TrajectoryLine
from obsspec.reports.summary import summarize

SHAPES = ((0, 1), (1, 1), (1, 2), (2, 2))
"""Depth and breadth."""
LATENCIES = ("0", "0.3", "1")
"""Seconds added to every command."""


def row(latency: str, shape: tuple[int, int], off: list[list[TrajectoryLine]], on: list[list[TrajectoryLine]]) -> Any:
    comparisons = [compare(*pair) for pair in zip(off, on, strict=True)]
    summary = summarize(line for repeat in on for line in repeat)
    return {
        "latency": latency,
        "depth": shape[0],
        "breadth": shape[1],
        "seconds": summary.agent_seconds,
        "tool_seconds": summary.tool_seconds,
        "hidden_seconds": summary.hidden_seconds,
        "hits": summary.hits,
        "tool_calls": summary.tool_calls,
        "ratio": statistics.median(each.second_seconds / each.first_seconds for each in comparisons),
        "identical": sum(each.identical for each in comparisons),
        "compared": sum(each.compared for each in comparisons),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="generated:database,makefile,python_bug/easy/0")
    parser.add_argument("--samples", type=int, default=2, help="rollouts of each task")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="threads of the policy")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    plan = replace(PLAN, tasks=arguments.tasks, samples=arguments.samples)
    plans = {
        (latency, shape): replace(plan, latency=latency, depth=shape[0], breadth=shape[1])
        for latency in LATENCIES
        for shape in SHAPES
    }
    names = {str(key): each for key, each in plans.items()}
    lines = interleaved(names, arguments.repeats, arguments.workers, Console(stderr=True))
    rows = [row(*key, lines[str((key[0], SHAPES[0]))], lines[str(key)]) for key in plans]
    table = Table("delay s", "depth", "breadth", "agent s", "tools s", "hidden s", "hits", "on / off", "identical")
    for each in rows:
        table.add_row(
            each["latency"],
            str(each["depth"]),
            str(each["breadth"]),
            *(f"{each[name]:.1f}" for name in ("seconds", "tool_seconds", "hidden_seconds")),
            f"{each['hits']} of {each['tool_calls']}",
            f"{each['ratio']:.3f}",
            f"{each['identical']} of {each['compared']}",
        )
    Console(width=100).print(table)
    if arguments.json:
        about = {
            "tasks": arguments.tasks,
            "samples": arguments.samples,
            "repeats": arguments.repeats,
            "cores": os.cpu_count(),
        }
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
