"""What the memory takes, and how long it takes to answer, while it learns a million transitions.

    python benchmarks/memory.py LOG... --json memory.json

The steps of real logs, over and over: each time round the tasks have other names and the observations another last
line, so that nothing is the same but the commands. Resident memory is that of the process, less what it had with the
log read and nothing learned. Times are medians over the last thousand steps before each mark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from obsspec.analysis.formats import Log, read_log
from obsspec.errors import InputError
from obsspec.predictors import Memory
from obsspec.reports.tables import counting
from obsspec.types import Draft, Exchange, Observation, Query

MARKS = (1_000, 10_000, 100_000, 300_000, 1_000_000)


def steps(log: Log) -> Iterator[tuple[Query, Observation]]:
    for again in count():
        for rollout in log.rollouts:
            history: tuple[Exchange, ...] = ()
            for step in rollout.steps:
                text = f"{step.observation}\n{again}"
                yield Query(f"{rollout.task} {again}", "", history, step.command), Observation(text)
                history = (*history[-99:], Exchange(step.command, text))


def resident() -> int:
    """Bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--most", type=int, default=MARKS[-1], help="transitions to learn")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        log = read_log(*arguments.logs)
    except InputError as error:
        parser.error(str(error))
    rows = anyio.run(measure, log, [mark for mark in MARKS if mark <= arguments.most])
    table = Table("transitions", "entries", "resident MB", "draft ms", "learn ms")
    for row in rows:
        table.add_row(
            f"{row['transitions']:,}",
            f"{row['entries']:,}",
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['draft_ms']:.2f}",
            f"{row['learn_ms']:.2f}",
        )
    Console(width=100).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


async def measure(log: Log, marks: list[int]) -> list[dict[str, float]]:
    memory = Memory()
    before = resident()
    rows: list[dict[str, float]] = []
    drafting: list[float] = []
    learning: list[float] = []
    drafts: list[Draft] = []
    with counting(Console(stderr=True), "thousands of transitions", marks[-1] // 1000) as advance:
        for number, (query, observation) in enumerate(islice(steps(log), marks[-1]), start=1):
            began = time.process_time()
            await memory.predict(query, drafts.append)
            asked = time.process_time()
            memory.learn(query, observation)
            drafting.append(asked - began)
            learning.append(time.process_time() - asked)
            drafts.clear()
            if number % 1000 == 0:
                advance()
                if number in marks:
                    rows.append(
                        {
                            "transitions": number,
                            "entries": len(memory),
                            "bytes": resident() - before,
                            "draft_ms": 1000 * statistics.median(drafting),
                            "learn_ms": 1000 * statistics.median(learning),
                        }
                    )
                drafting.clear()
                learning.clear()
    return rows


if __name__ == "__main__":
    main()
