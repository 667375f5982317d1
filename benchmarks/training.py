"""What came of a training: success, reward and match rates over its steps, as a table, JSON and a figure.

    obsspec train benchmarks/training.toml --output runs/training
    python benchmarks/training.py runs/training --json training.json --figure training.svg

The match rates of the world model are the co-training's own, read after each step: of the last 200 observations that it
scored before it trained on them, by the weights in training and by those with which it began.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from obsspec.errors import InputError
from obsspec.reports.training import read_records

PARTS = 4
"""Rows of the table."""


def figures(run: Path) -> dict[str, Any]:
    steps, evaluations = (read_records(run / f"{name}.jsonl") for name in ("steps", "evaluations"))
    if not steps:
        raise InputError(f"{run}: has no steps; give the --output of `obsspec train`")
    curve: dict[str, list[Any]] = defaultdict(list)
    for step in steps:
        rollouts, about = step["rollouts"], step["world_model"] or {}
        curve["step"].append(step["step"])
        curve["reward"].append(rollouts["reward"])
        curve["solved"].append(rollouts["solved"] / rollouts["rollouts"])
        curve["hits_of_calls"].append(rollouts["hits"] / max(1, rollouts["tool_calls"]))
        curve["hidden_of_tool_seconds"].append(rollouts["hidden_seconds"] / (rollouts["tool_seconds"] or 1.0))
        curve["world_model"].append(about.get("exact_rate"))
        curve["world_model_frozen"].append(about.get("exact_rate_frozen"))
        curve["seconds"].append(step["seconds"])
        curve["rollout_seconds"].append(rollouts["seconds"])
        curve["rollout_seconds_without"].append(rollouts["seconds_without"])
        curve["update_seconds"].append(step["update_seconds"])
    held_out = [[each["step"], each["rollouts"]["solved"], each["rollouts"]["rollouts"]] for each in evaluations]
    return {"held_out": held_out, **curve}


def plot(curve: dict[str, Any], file: Path) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    left.plot(curve["step"], curve["solved"], color="C0", alpha=0.5, label="training tasks")
    steps, solved, rollouts = zip(*curve["held_out"], strict=True)
    left.plot(steps, [a / b for a, b in zip(solved, rollouts, strict=True)], "o-", color="C1", label="held-out tasks")
    left.set(xlabel="step", ylabel="solved", ylim=(0, 1))
    for name, label in (
        ("world_model", "world model, co-trained"),
        ("world_model_frozen", "world model, frozen"),
        ("hits_of_calls", "hits of all calls (rules, memory)"),
    ):
        points = [(x, y) for x, y in zip(curve["step"], curve[name], strict=True) if y is not None]
        if points:
            right.plot(*zip(*points, strict=True), label=label)
    right.set(xlabel="step", ylabel="foretold exactly", ylim=(0, 1))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    try:
        curve = figures(arguments.run)
    except InputError as error:
        parser.error(str(error))
    count = len(curve["step"])
    bounds = [count * part // PARTS for part in range(PARTS + 1)]
    parts = [slice(*pair) for pair in pairwise(bounds) if pair[0] < pair[1]]
    table = Table("", *(f"steps {each.start + 1} to {each.stop}" for each in parts), title=f"{count} steps")

    def add(name: str, key: str, shown: Callable[[float], str]) -> None:
        def mean(values: Sequence[float | None]) -> str:
            known = [value for value in values if value is not None]
            return shown(statistics.mean(known)) if known else ""

        table.add_row(name, *(mean(curve[key][each]) for each in parts))

    add("solved", "solved", "{:.1%}".format)
    add("world model, co-trained", "world_model", "{:.1%}".format)
    add("world model, frozen", "world_model_frozen", "{:.1%}".format)
    add("hits of all calls", "hits_of_calls", "{:.1%}".format)
    add("hidden of tools' seconds", "hidden_of_tool_seconds", "{:.1%}".format)
    add("step, s", "seconds", "{:.0f}".format)
    add("rollouts, s", "rollout_seconds", "{:.0f}".format)
    add("without speculation, estimated, s", "rollout_seconds_without", "{:.0f}".format)
    add("update, s", "update_seconds", "{:.0f}".format)
    console = Console(width=120)
    console.print(table)
    for step, solved, rollouts in curve["held_out"]:
        console.print(f"held out, after step {step}: {solved} of {rollouts} ({solved / rollouts:.1%})")
    if arguments.json:
        arguments.json.write_text(json.dumps(curve, indent=1) + "\n")
    if arguments.figure:
        plot(curve, arguments.figure)


if __name__ == "__main__":
    main()
