"""When speculation pays: one grid of simulations and one plot for each question of docs/regimes.md.

    python benchmarks/regimes.py --plots docs/regimes --json regimes.json

All is in the lab (`obsspec.lab`): a policy server with 16 seats that takes h100-8b's time (an 8B policy on one H100;
its file has the arithmetic), rollouts of 12 turns, and tools and world models as each question has them. What is
plotted is relative to the sequential rollouts of the same setting: below 1 it pays. Finished points are kept in
build/regimes, so that an interrupted run goes on; remove it to start over.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.console import Console

from obsspec.lab.report import Row, rows
from obsspec.lab.run import Point, points_of, recorded, run
from obsspec.lab.workload import merged, read, validated
from obsspec.reports.tables import counting

BASE = merged(
    read("h100-8b"),
    {
        "server": {"seats": 16},
        "turns": 12,
        "groups": 1,
        "rollouts": 160,
        "tool": {"seconds": {"mean": 2.0, "sigma": 1.5}, "overhead": 0.0},
    },
)
"""A generation of 150 tokens takes 0.79 s alone and 1.58 s in a full batch."""
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1)
"""Concurrent rollouts, as a fraction of how many fill the server's seats."""
KEPT = Path("build/regimes")


def points(changes: dict[str, Any], **axes: Sequence[Any]) -> list[Point]:
    """The product of the axes, whose names have __ for a dot, on BASE with changes, each sequential and speculating."""
    listed = {name.replace("__", "."): list(values) for name, values in axes.items()}
    grid = {"schedule": ["sequential", "obsspec"], **listed}
    return points_of(merged(BASE, {**changes, "grid": grid}), "benchmarks/regimes.py")


def where() -> list[Point]:
    means, accuracies, loads = (0.25, 0.8, 2.5, 8.0), (0.3, 0.5, 0.7, 0.9), (0.1, 0.5, 0.9)
    return points({}, tool__seconds__mean=means, predictor__accuracy=accuracies, load=loads)


def speed() -> list[Point]:
    fractions = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)
    return points({"load": 0.2}, predictor__delay_fraction=fractions, tool__seconds__sigma=(0.3, 1.0, 2.0))


def depth() -> list[Point]:
    even = {"load": 0.1, "tool": {"seconds": {"mean": 0.8}}, "predictor": {"delay_seconds": 0.0}}
    sigmas, accuracies = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5), (0.664, 0.95)
    return points(even, tool__seconds__sigma=sigmas, predictor__accuracy=accuracies, depth=(1, 2, 4))


def breadth() -> list[Point]:
    further = {"predictor": {"accuracy": 0.5, "further": (0.2, 0.1, 0.05)}}
    return points(further, load=LOADS, breadth=(1, 2, 4))


def sureness() -> list[Point]:
    return points({}, load=LOADS, predictor__concentration=(float("inf"), 3.0, 1.0, 0.3))


def order() -> list[Point]:
    orders, gates = ("fcfs", "priority"), ("everything", "expected_value")
    return points({}, load=(0.3, 0.6, 0.9, 1.2), server__scheduling=orders, gate=gates, budget=(False, True))


def hardware() -> list[Point]:
    """One GPU or two, with a world model on its own, beside the policy, or none."""
    one = read("h100-8b")["server"]
    # Tensor parallelism at its best: both read half of the weights and the cache. 80 GB more hold as many contexts more
    # as 1.18 GB each.
    two = one | {"step_seconds": 0.00245, "step_seconds_per_sequence": 0.000175, "seats": 116}
    two["prefill_tokens_per_second"] = 48000
    ways = {
        "1 GPU, sequential": ("sequential", one, "own"),
        "1 GPU, both models on it": ("obsspec", one, "shared"),
        "2 GPUs, one for the world model": ("obsspec", one, "own"),
        "2 GPUs for the policy, sequential": ("sequential", two, "own"),
        "2 GPUs, both models on both": ("obsspec", two, "shared"),
    }
    found = []
    for concurrency in (8, 32, 64, 128, 192):
        for way, (schedule, server, place) in ways.items():
            changes = {"schedule": schedule, "server": server, "predictor": {"server": place}}
            rollouts = {"concurrency": concurrency, "rollouts": 2 * concurrency}
            keys = {"way": way, "concurrency": concurrency}
            found.append(Point(keys, validated(merged(merged(BASE, changes), rollouts), "benchmarks/regimes.py")))
    return found


def batch() -> list[Point]:
    """Synchronous batches, of which the slowest rollout decides: all begin at once."""
    found = []
    for load in (0.3, 0.6, 1.2, 2.0):
        rollouts = round(load * 36)  # 36 rollouts fill the seats.
        together = {"rollouts": rollouts, "concurrency": rollouts, "groups": min(8, rollouts)}
        first = (False, True)
        for each in points(together, stragglers_first=first, tool__group_sigma=(0.0, 1.0), seed=range(5)):
            found.append(Point({**each.keys, "load": load}, each.workload))
    return found


@dataclass(frozen=True)
class Regime:
    """A question, and how its points are plotted."""

    points: Callable[[], list[Point]]
    title: str
    x: str
    """The key along the horizontal axis."""
    line: Callable[[Row], str]
    """Names the line that a row belongs to."""
    panel: Callable[[Row], str] = lambda row: ""
    """Names the plot that a row belongs to, of those side by side."""
    y: str = "latency_ratio"
    logarithmic: bool = False
    """Whether the horizontal axis is."""


AXES = {
    "load": "rollouts at once, of how many fill the server",
    "concurrency": "rollouts at once",
    "predictor.accuracy": "chance that a draft is exact",
    "predictor.delay_fraction": "world model's delay, of the mean tool time",
    "tool.seconds.sigma": "how tool times vary (lognormal sigma)",
}

REGIMES = {
    "where": Regime(
        where,
        "Where speculation pays",
        x="predictor.accuracy",
        line=lambda row: f"tools take {row['tool.seconds.mean'] / 0.8:.1f} generations",
        panel=lambda row: f"load {row['load']}",
    ),
    "speed": Regime(
        speed,
        "How fast the world model must be",
        x="predictor.delay_fraction",
        line=lambda row: f"tools' sigma {row['tool.seconds.sigma']:g}",
    ),
    "depth": Regime(
        depth,
        "What depth adds as tool times vary",
        x="tool.seconds.sigma",
        line=lambda row: f"depth {row['depth']}",
        panel=lambda row: f"{row['predictor.accuracy']:.1%} exact",
    ),
    "breadth": Regime(breadth, "Breadth and load", x="load", line=lambda row: f"breadth {row['breadth']}"),
    "sureness": Regime(
        sureness,
        "A world model that knows when it is right",
        x="load",
        line=lambda row: f"concentration {row['predictor.concentration']:g}",
    ),
    "order": Regime(
        order,
        "First come first served, priority, and the budget",
        x="load",
        line=lambda row: f"{row['server.scheduling']}{', budget' if row['budget'] else ''}",
        panel=lambda row: {"everything": "no gate", "expected_value": "with the gate"}[row["gate"]],
    ),
    "hardware": Regime(
        hardware,
        "One GPU or two: agent latency relative to one GPU without speculation",
        x="concurrency",
        line=lambda row: row["way"],
        y="cost_ratio",
        logarithmic=True,
    ),
    "batch": Regime(
        batch,
        "Makespan of a batch whose rollouts begin together",
        x="load",
        line=lambda row: "stragglers first" if row["stragglers_first"] else "first come first served",
        panel=lambda row: "tasks alike" if not row["tool.group_sigma"] else "some tasks slower",
        y="makespan_ratio",
    ),
}


def against_one(results: list[Row]) -> None:
    """Latency relative to the first way of its concurrency, as more hardware is a setting of its own."""
    for row in results:
        same = (each for each in results if "way" in each and each["concurrency"] == row.get("concurrency"))
        row["cost_ratio"] = row["mean_latency"] / next(same, row)["mean_latency"]


def curves(results: Sequence[Row], regime: Regime) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By panel and line: what is plotted, each point the mean over the seeds of its place."""
    shown = [row for row in results if row["schedule"] != "sequential" or "way" in row]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in shown:
        panels.setdefault(regime.panel(row), {}).setdefault(regime.line(row), []).append((row[regime.x], row[regime.y]))
    for lines in panels.values():
        for name, places in lines.items():
            by_x = groupby(sorted(places), key=lambda place: place[0])
            lines[name] = [(x, statistics.fmean(y for _, y in same)) for x, same in by_x]
    return panels


def plot(results: Sequence[Row], regime: Regime, file: Path) -> None:
    panels = curves(results, regime)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(2.5 + 3 * len(panels), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (panel, lines) in zip(axes[0], panels.items(), strict=True):
        _draw(axis, panel, lines, regime)
    axes[0][0].set_ylabel({"makespan_ratio": "makespan / sequential"}.get(regime.y, "agent latency / sequential"))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(regime.title, fontsize=11)
    # Without a date, the same figures give the same file.
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _draw(axis: Axes, panel: str, lines: dict[str, list[tuple[float, float]]], regime: Regime) -> None:
    for name, places in lines.items():
        axis.plot(*zip(*places, strict=True), marker="o", markersize=3, linewidth=1.3, label=name)
    axis.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axis.set_title(panel, fontsize=9)
    axis.set_xlabel(AXES.get(regime.x, regime.x))
    if regime.logarithmic:
        axis.set_xscale("log", base=2)
    axis.spines[["top", "right"]].set_visible(False)


def warming() -> list[float]:
    """The most that reading drafts ahead, without generating on them, could save: sequential latency when observations
    cost nothing to read, relative to as it is; by load."""
    ratios = []
    for load in (0.1, 0.5, 0.9):
        changes = {"load": load, "schedule": "sequential"}
        pair = [
            Point({}, validated(merged(BASE, {**changes, **lengths}), "benchmarks/regimes.py"))
            for lengths in ({}, {"lengths": {"observation": 1}})
        ]
        as_is, free = run(pair, lambda: None)
        ratios.append(free.mean_latency / as_is.mean_latency)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(REGIMES), help="questions, separated by commas")
    parser.add_argument("--plots", type=Path, default=KEPT, help="directory for a plot of each question")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chosen = {name: REGIMES[name] for name in arguments.only.split(",")}
    grids = {name: regime.points() for name, regime in chosen.items()}
    everything = [point for grid in grids.values() for point in grid]
    pyplot.rcParams |= {"svg.hashsalt": "obsspec", "svg.fonttype": "none"}
    with recorded(KEPT) as (known, keep), counting(Console(stderr=True), "points", len(everything)) as advance:
        figures = iter(run(everything, advance, known=known, keep=keep))
    console, written = Console(width=120), {}
    arguments.plots.mkdir(parents=True, exist_ok=True)
    for name, regime in chosen.items():
        results = rows(grids[name], [next(figures) for _ in grids[name]])
        against_one(results)
        plot(results, regime, arguments.plots / f"{name}.svg")
        written[name] = results
        console.print(f"\n{regime.title}: {regime.y} by {regime.x}", style="bold")
        for panel, lines in curves(results, regime).items():
            for line, places in lines.items():
                console.print(f"  {panel:16} {line:34}", *(f"{x:g}: {y:.3f} " for x, y in places), highlight=False)
    ratios = warming()
    console.print("\nObservations that cost nothing to read, by load:", *(f"{ratio:.4f}" for ratio in ratios))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": written, "warming": ratios}, indent=2) + "\n")


if __name__ == "__main__":
    main()
