"""How much of a world model's prompts a vLLM server has read before, with `prepare` and without.

    python benchmarks/prefix_cache.py --json prefix_cache.json

A vLLM server on the CPU serves the built-in world model. Experts solve held-out tasks in the sandbox, and their runs
are then predicted turn by turn, one request at a time: `prepare` with the history, as the engine calls it while the
policy writes, and `predict` with the command. With --logs FILE the rollouts are an agent's own (see `obsspec analyze`),
each up to so many steps. The server counts which tokens of every prompt it found in its cache; before each way of
predicting the cache is emptied.

Not found are: the tokens of the command, which nobody can know before the policy has written it; what does not fill a
block of the cache; and, without `prepare`, the latest observation and its command. The table says how many tokens a
prompt has, how many of them are the command's, and what is left to read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from obsspec.analysis.formats import read_log
from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.environments.sandbox import open_sandbox
from obsspec.models import BUILTIN_WORLD_MODEL
from obsspec.policies.http import Server
from obsspec.policies.vllm import VllmPolicy
from obsspec.predictors import LanguageModel, Limits
from obsspec.reports.tables import counting
from obsspec.tasks import parse_instances
from obsspec.training.trajectories import collect, read_runs
from obsspec.types import Draft, Exchange, Query
from real_server import serving, write_model

LONGEST = Limits().context_tokens


@dataclass(frozen=True, slots=True)
class Replay:
    """What an agent did on a task and what it saw."""

    task: str
    instruction: str
    exchanges: tuple[Exchange, ...]

    def queries(self) -> list[Query]:
        return [
            Query(self.task, self.instruction, self.exchanges[:turn], exchange.command)
            for turn, exchange in enumerate(self.exchanges)
        ]


@dataclass(frozen=True, slots=True)
class Read:
    """What the server did for one call of the predictor."""

    turn: int
    tokens: int
    """In the prompt; 0 where there was no request."""
    found: int
    """Of those, in the cache."""
    command_tokens: int
    """Of the command in question, with what the chat template puts around it."""
    seconds: float


async def expert_replays(tasks: str, notes: Console) -> list[Replay]:
    instances = parse_instances(tasks)
    with tempfile.TemporaryDirectory() as directory, counting(notes, "experts", len(instances)) as advance:
        file = Path(directory, "runs.jsonl")
        await collect(instances, file, open_sandbox, concurrency=2, finished=advance)
        return [Replay(run.task, run.instruction, run.exchanges) for run in read_runs(file)]


def logged_replays(files: Sequence[Path], steps: int, most: int) -> list[Replay]:
    """The first ``steps`` of at most ``most`` rollouts of an agent. Logs do not tell the instructions, only tasks."""
    rollouts = read_log(*files).rollouts[:most]
    return [
        Replay(each.task, each.task, tuple(Exchange(step.command, step.observation) for step in each.steps[:steps]))
        for each in rollouts
    ]


async def measure(
    url: str, replays: Iterable[Replay], prepared: bool, chat: WorldModelChat, advance: Callable[[], None]
) -> tuple[list[Read], list[Read]]:
    """What every draft read, and every preparation."""
    drafts, preparations = [], []
    async with Server(url) as server, VllmPolicy.connect(url, max_context=LONGEST) as policy:
        predictor = LanguageModel(policy, chat)

        async def counted(query: Query, call: Any) -> Read:
            names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
            before, began = await server.metrics(*names), time.perf_counter()
            await call
            seconds = time.perf_counter() - began
            tokens, found = (int(now - then) for now, then in zip(await server.metrics(*names), before, strict=True))
            return Read(
                len(query.history), tokens, found, len(chat.ask(query.command)) if query.command else 0, seconds
            )

        await server.ask("POST", "/reset_prefix_cache")
        for replay in replays:
            for query in replay.queries():
                if prepared:
                    reading = Query(query.task, query.instruction, query.history, "")
                    preparations.append(await counted(reading, predictor.prepare(reading)))
                proposed: list[Draft] = []
                drafts.append(await counted(query, predictor.predict(query, proposed.append)))
            advance()
    return drafts, preparations


def row(block: int, what: str, turns: str, reads: Sequence[Read]) -> dict[str, Any]:
    """``reads`` summed up."""
    reads = [each for each in reads if each.tokens]
    tokens, found = sum(each.tokens for each in reads), sum(each.found for each in reads)
    return {
        "block": block,
        "what": what,
        "turns": turns,
        "requests": len(reads),
        "tokens": tokens / len(reads),
        "command_tokens": statistics.mean(each.command_tokens for each in reads),
        "unread_tokens": (tokens - found) / len(reads),
        "hit_rate": found / tokens,
        "known_rate": found / (known := sum(each.tokens - each.command_tokens for each in reads)),
        "most_possible": known / tokens,
        "seconds": statistics.median(each.seconds for each in reads),
    }


def rows(block: int, what: str, reads: Sequence[Read]) -> list[dict[str, Any]]:
    return [
        row(block, what, "first", [each for each in reads if each.turn == 0]),
        row(block, what, "later", [each for each in reads if each.turn > 0]),
    ]


def table(figures: Iterable[dict[str, Any]]) -> Table:
    shown = Table(
        *("block", "what", "turns", "requests", "prompt tokens", "of the command", "left to read", "hit rate"),
        *("all but the command", "of all but that", "median s"),
        title="Tokens of prompts that the server had read before",
    )
    for each in figures:
        shown.add_row(
            f"{each['block']}",
            each["what"],
            each["turns"],
            f"{each['requests']}",
            f"{each['tokens']:.0f}",
            f"{each['command_tokens']:.0f}",
            f"{each['unread_tokens']:.0f}",
            f"{each['hit_rate']:.1%}",
            f"{each['most_possible']:.1%}",
            f"{each['known_rate']:.1%}",
            f"{each['seconds']:.2f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="generated:all/easy,medium/0")
    parser.add_argument("--logs", type=Path, nargs="+", help="of agents, in place of the tasks")
    parser.add_argument("--rollouts", type=int, default=16, help="of the logs, at most")
    parser.add_argument("--steps", type=int, default=12, help="of each rollout of the logs, at most")
    parser.add_argument("--block-size", default="32", help="tokens, one server for each; on CPUs multiples of 32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    server_core, own_core, *_ = (*sorted(os.sched_getaffinity(0)) * 2,)
    os.sched_setaffinity(0, {own_core})
    notes, console = Console(stderr=True), Console(width=160)
    if arguments.logs:
        replays = logged_replays(arguments.logs, arguments.steps, arguments.rollouts)
    else:
        replays = anyio.run(expert_replays, arguments.tasks, notes)
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        chat = WorldModelChat(ChatFormat(write_model(BUILTIN_WORLD_MODEL, Path(directory), notes)))
        for block in map(int, arguments.block_size.split(",")):
            with (
                serving(Path(directory), 4, server_core, notes, block) as url,
                counting(notes, f"rollouts, blocks of {block}", 2 * len(replays)) as advance,
            ):
                drafts, _ = anyio.run(measure, url, replays, False, chat, advance)
                figures += rows(block, "draft, unprepared", drafts)
                drafts, preparations = anyio.run(measure, url, replays, True, chat, advance)
                figures += rows(block, "draft, prepared", drafts) + rows(block, "prepare", preparations)
    console.print(table(figures))
    if arguments.json:
        about = {"tasks": None if arguments.logs else arguments.tasks, "logs": [*map(str, arguments.logs or ())]}
        arguments.json.write_text(json.dumps(about | {"rollouts": len(replays), "rows": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
