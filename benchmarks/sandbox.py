"""What the sandbox costs: starting one, and what a command takes beyond what it does.

    python benchmarks/sandbox.py --json sandbox.json

Targets: a start under 50 ms, a command under 10 ms (medians). A start ends with the first command's observation. Beside
it stands `bash -c true` without a sandbox, so that a slow machine can be told from a slow sandbox.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from obsspec import Task
from obsspec.environments.sandbox import open_sandbox

REPEATS, COMMANDS = 30, 20
OUTPUT_BYTES = 1_000_000_000


async def measure() -> dict[str, list[float]]:
    """Milliseconds."""
    files = {f"file{number}.txt": b"some text\n" * 100 for number in range(10)}
    samples: dict[str, list[float]] = {"bash -c true": [], "start": [], "start, ten files": [], "true": [], "ls": []}
    for _ in range(REPEATS):
        began = time.perf_counter()
        await anyio.run_process(["bash", "-c", "true"], stdin=subprocess.DEVNULL)
        samples["bash -c true"].append(_since(began))
        for name, task in (("start", Task("task", "go")), ("start, ten files", Task("task", "go", files=files))):
            began = time.perf_counter()
            async with open_sandbox(task) as sandbox:
                await sandbox.execute("true")
                samples[name].append(_since(began))
                for command in ("true", "ls"):
                    for _ in range(COMMANDS):
                        began = time.perf_counter()
                        await sandbox.execute(command)
                        samples[command].append(_since(began))
    return samples


async def measure_output() -> float:
    """Seconds for a command that prints a gigabyte."""
    async with open_sandbox(Task("task", "go", time_limit=120)) as sandbox:
        began = time.perf_counter()
        await sandbox.execute(f"head -c {OUTPUT_BYTES} /dev/zero")
        return time.perf_counter() - began


def _since(began: float) -> float:
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    samples = anyio.run(measure)
    gigabyte = anyio.run(measure_output)
    table = Table("what", "median ms", "95 % under ms", title=f"Sandbox ({REPEATS} starts, {os.cpu_count()} cores)")
    rows = []
    for name, values in samples.items():
        median, high = statistics.median(values), statistics.quantiles(values, n=20)[-1]
        rows.append({"what": name, "median_ms": median, "p95_ms": high, "samples": len(values)})
        table.add_row(name, f"{median:.1f}", f"{high:.1f}")
    table.add_row("a command that prints 1 GB", f"{1000 * gigabyte:.0f}", "")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "gigabyte_seconds": gigabyte}, indent=2) + "\n")


if __name__ == "__main__":
    main()
