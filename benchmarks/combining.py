"""Observation speculation on a vLLM that is sped up below as well: by its prefix cache and by n-gram drafts of tokens.

    python benchmarks/combining.py --json combining.json

A vLLM server on the CPU serves the built-in policy in float32, four times: with prefix cache and n-gram drafts off or
on. On each the same rollouts are run with observation speculation off and on, taking turns; every command takes a while
longer, as in a remote sandbox. Sampling is greedy: drafts of tokens keep the distribution that samples are drawn from,
but not the samples. The server has one core, the rollouts with their sandboxes another. It needs the environment that
`scripts/vllm_environment.sh .venv-vllm` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from obsspec.models import BUILTIN_POLICY
from obsspec.policies.http import Server
from obsspec.reports.comparison import compare
from obsspec.reports.records import TrajectoryLine, read_trajectories
from obsspec.reports.summary import summarize
from obsspec.runs import Means, Plan, run
from real_server import serving, write_model

SEATS = 8
NO_CACHE = ("--no-enable-prefix-caching",)
NGRAM = ("--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}))
SERVERS = {
    "neither": NO_CACHE,
    "prefix cache": (),
    "n-gram drafts": (*NO_CACHE, *NGRAM),
    "both": NGRAM,
}
COUNTED = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)


async def counts(url: str) -> dict[str, float]:
    """What the server has counted."""
    async with Server(url) as server:
        return dict(zip(COUNTED, await server.metrics(*(f"vllm:{name}_total" for name in COUNTED)), strict=True))


def measured(server: str, url: str, plan: Plan, repeats: int, notes: Console) -> dict[str, list[list[TrajectoryLine]]]:
    """The rollouts of each repeat, with observation speculation off and on."""
    lines: dict[str, list[list[TrajectoryLine]]] = {"off": [], "on": []}
    ways = {"off": replace(plan, policy=url, depth=0), "on": replace(plan, policy=url)}
    for repeat in range(repeats):
        for name in ("off", "on") if repeat % 2 == 0 else ("on", "off"):
            notes.print(f"{server}: observation speculation {name}, repeat {repeat + 1} of {repeats}")
            with tempfile.TemporaryDirectory() as output:
                failures = run(ways[name], Path(output), True, Means(SEATS, SEATS), notes)
                if failures:
                    raise RuntimeError(f"{failures[0].task}: {failures[0].error}")
                lines[name].append(list(read_trajectories(Path(output))))
    return lines


def row(
    server: str,
    lines: dict[str, list[list[TrajectoryLine]]],
    neither: list[list[TrajectoryLine]],
    done: dict[str, float],
) -> dict[str, Any]:
    """``neither``: the rollouts without any speculation on a server that has neither."""
    on_off = [compare(*pair) for pair in zip(lines["off"], lines["on"], strict=True)]
    below = [compare(*pair) for pair in zip(neither, lines["off"], strict=True)]
    all_of_it = [compare(*pair) for pair in zip(neither, lines["on"], strict=True)]
    on = summarize(line for repeat in lines["on"] for line in repeat)

    def ratio(comparisons: list[Any]) -> float:
        return statistics.median(each.second_seconds / each.first_seconds for each in comparisons)

    def share(part: str, whole: str) -> float:
        return done[part] / done[whole] if done[whole] else 0.0

    return {
        "server": server,
        "off_seconds": sum(each.first_seconds for each in on_off),
        "on_seconds": sum(each.second_seconds for each in on_off),
        "ratio": ratio(on_off),
        "ratio_below": ratio(below),
        "ratio_all": ratio(all_of_it),
        "hits": on.hits,
        "tool_calls": on.tool_calls,
        "cached": share("prefix_cache_hits", "prefix_cache_queries"),
        "accepted": share("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"),
        "identical": sum(each.identical for each in on_off),
        "identical_below": sum(each.identical for each in below),
        "compared": sum(each.compared for each in on_off),
        "compared_below": sum(each.compared for each in below),
    }


def table(rows: Iterable[dict[str, Any]]) -> Table:
    shown = Table(
        *("server has", "off s", "on s", "on / off", "off / neither", "on / neither", "hits", "read before"),
        *("drafts accepted", "on = off", "off = neither"),
        title="Agent latency with observation speculation off and on",
    )
    for each in rows:
        shown.add_row(
            each["server"],
            *(f"{each[name]:.1f}" for name in ("off_seconds", "on_seconds")),
            *(f"{each[name]:.3f}" for name in ("ratio", "ratio_below", "ratio_all")),
            f"{each['hits']} of {each['tool_calls']}",
            *(f"{each[name]:.1%}" for name in ("cached", "accepted")),
            f"{each['identical']} of {each['compared']}",
            f"{each['identical_below']} of {each['compared_below']}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="generated:database,logs,permissions/easy/0")
    parser.add_argument("--samples", type=int, default=2, help="rollouts of each task")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--latency", default="0.3", help="seconds added to every command")
    parser.add_argument("--servers", default=",".join(SERVERS), help="which, in order; the first is compared with")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.servers.split(",")
    if unknown := [name for name in names if name not in SERVERS]:
        parser.error(f"--servers {unknown[0]}: choose from {', '.join(SERVERS)}")
    server_core, own_core, *_ = (*sorted(os.sched_getaffinity(0)) * 2,)
    os.sched_setaffinity(0, {own_core})
    notes, console = Console(stderr=True), Console(width=170)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(BUILTIN_POLICY, Path(directory), notes)
        plan = Plan(
            arguments.tasks,
            tokenizer=directory,
            depth=2,
            breadth=2,
            samples=arguments.samples,
            temperature=0.0,
            latency=arguments.latency,
        )
        neither: list[list[TrajectoryLine]] | None = None
        for name in names:
            with serving(Path(directory), SEATS, server_core, notes, options=SERVERS[name]) as url:
                run_before = anyio.run(counts, url)
                lines = measured(name, url, plan, arguments.repeats, notes)
                done = {each: count - run_before[each] for each, count in anyio.run(counts, url).items()}
            neither = neither or lines["off"]
            rows.append(row(name, lines, neither, done))
            console.print(table(rows[-1:]))
    console.print(table(rows))
    if arguments.json:
        about = {name: getattr(arguments, name) for name in ("tasks", "samples", "repeats", "latency")}
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
