"""What the lab says of the named workloads under the named schedules, from an idle server to an overloaded one.

    python benchmarks/lab.py --json lab.json

Latency and makespan are relative to the sequential rollouts at the same load: less is better. A load is the number of
concurrent rollouts as a fraction of the server's capacity; the published workloads, whose server is uncontended, are
also run as they are, against the published figures. Then how much of what could be saved is saved where nobody contends
for the server, and what a simulation itself costs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from obsspec.lab.report import points_table, rows
from obsspec.lab.run import Point, run, simulate
from obsspec.lab.schedules import SCHEDULES
from obsspec.lab.workload import merged, names, read, validated
from obsspec.reports.tables import counting

PUBLISHED = {"paper-8b": 0.093, "paper-32b": 0.142}
"""How much less the agent latency is (arXiv 2610.15246)."""
LOADS = (0.05, 0.5, 0.8, 1.0, 1.2)
SEATS = 16
"""Of every workload's server when it is loaded, so that filling it takes few rollouts."""
BATCHES = 2
"""Rollouts for each place at the highest load."""


def point(name: str, schedule: str, **changes: Any) -> Point:
    workload = validated(merged(read(name), {"schedule": schedule, **changes}), name)
    return Point({"workload": name, "load": workload.load or 0.0}, workload)


def loaded(name: str, schedule: str, load: float) -> Point:
    changes = {"server": {"seats": SEATS}, "turns": 12, "groups": 1}
    most = point(name, schedule, load=LOADS[-1], rollouts=10**6, **changes).workload.active
    return point(name, schedule, load=load, rollouts=BATCHES * most, **changes)


def uncontended(name: str) -> list[Point]:
    """Sequential; as it is; without a gate; and without the world model's delay as well, the most that drafts of this
    accuracy allow. On a server on which nobody waits for anybody."""
    server = {"seats": math.inf, "step_seconds_per_sequence": 0.0, "prefill_tokens_per_second": math.inf}
    changes = {"server": server, "turns": 12, "groups": 1, "rollouts": 128, "concurrency": 8}
    everything = changes | {"gate": "everything"}
    at_once = everything | {"predictor": {"delay_seconds": 0.0}}
    return [
        point(name, "sequential", **changes),
        *(point(name, "obsspec", **each) for each in (changes, everything, at_once)),
    ]


def saved(workloads: Sequence[str], advance: Callable[[], None]) -> dict[str, dict[str, float]]:
    """By workload: the share of that most that is saved."""
    figures = iter(run([each for name in workloads for each in uncontended(name)], advance))
    shares = {}
    for name in workloads:
        sequential, obsspec, without_gate, most = (next(figures).mean_latency for _ in range(4))
        shares[name] = {
            "most": 1 - most / sequential,
            "obsspec": (sequential - obsspec) / (sequential - most),
            "without_gate": (sequential - without_gate) / (sequential - most),
        }
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(names()), help="separated by commas")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    workloads = arguments.workloads.split(",")
    points = [point(name, schedule) for name in workloads if name in PUBLISHED for schedule in SCHEDULES]
    points += [loaded(name, schedule, load) for name in workloads for load in LOADS for schedule in SCHEDULES]
    with counting(Console(stderr=True), "points", len(points) + 4 * len(workloads)) as advance:
        results = rows(points, run(points, advance))
        shares = saved(workloads, advance)
    console = Console(width=120)
    console.print(points_table(results, f"Named workloads; loads are of {SEATS} seats, 0 is the workload as it is"))
    for row in results:
        published = PUBLISHED.get(row["workload"])
        if published and row["schedule"] == "reference" and not row["load"]:
            console.print(f"{row['workload']}: {1 - row['latency_ratio']:.1%} less latency, published {published:.1%}")
    table = Table("workload", "most", "obsspec, of that", "without gate", title="Saved at equal accuracy, uncontended")
    for name, share in shares.items():
        table.add_row(name, *(f"{value:.1%}" for value in share.values()))
    console.print(table)
    size = {"rollouts": 256, "turns": 20}
    cost = {name: asdict(simulate(point("h100-8b", name, **size).workload))["cpu_seconds"] for name in SCHEDULES}
    listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in cost.items())
    console.print(f"CPU seconds for 256 rollouts of 20 turns of h100-8b: {listed}")
    if arguments.json:
        figures = {"rows": results, "published": PUBLISHED, "uncontended": shares, "cpu_seconds_256x20": cost}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
