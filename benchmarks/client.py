"""What a client of a policy server costs: CPU time for each turn and memory for each of many concurrent rollouts.

    python benchmarks/client.py --json client.json

Everything is real but the model and the tools: rollouts, speculation, seats, and the vLLM policy over sockets. The
server is a process of its own that streams what vLLM would, ``SECONDS`` for each generation; a tool sleeps. Prompts
have 1,000 tokens, observations 100, generations 32. CPU time is the client process's alone; memory is how much its
peak grows over what a few rollouts need, their results included. Targets at 1,000 rollouts: under 3 ms of CPU for each
turn and under 200 KB for each rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import re
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import anyio
from rich.console import Console
from rich.table import Table

from obsspec import Draft, Failure, Observation, Query, Sampling, Seats, Settings, Speculator, Task, rollouts
from obsspec.context import Tokens
from obsspec.gate import ExpectedValue, Gate, Threshold
from obsspec.policies.http import Server
from obsspec.policies.vllm import VllmPolicy
from obsspec.testing import ScriptedEnvironment
from obsspec.types import Action, Generation

TURNS, PROMPT, OBSERVATION, GENERATION = 10, 1000, 100, 32
SECONDS, TOOL_SECONDS = 1.0, 0.5
WARM_UP = 8
"""Rollouts that run before anything is measured."""
FIRST, STOP = 1000, 2
"""Token ids: that of the first character, and that which ends a generation."""


@dataclass(frozen=True)
class Case:
    speculation: bool
    seats: float
    events: int = 4
    """In which a generation comes."""
    gate: str = "all"
    """``all``: every draft gets a branch, which is the most that speculation can cost. ``worth``: the usual gate."""


CASES = (
    Case(speculation=False, seats=math.inf),
    Case(speculation=True, seats=math.inf),
    Case(speculation=True, seats=math.inf, gate="worth"),
    Case(speculation=False, seats=256),
    Case(speculation=True, seats=256),
    Case(speculation=False, seats=math.inf, events=GENERATION),
    Case(speculation=True, seats=math.inf, events=GENERATION),
)


@dataclass(frozen=True)
class Figures:
    cpu_ms_per_turn: float
    kilobytes_per_rollout: float
    seconds: float
    hits: float
    """As a fraction of the turns."""


# The server's process.

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every request of one connection, as vLLM would, whose model writes the same whatever it reads."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            body = json.loads(await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1])))
            count, events = body["max_tokens"], int(path.split("/")[1])
            writer.write(HEAD)
            size = GENERATION // events
            for start in range(0, count, size):
                await asyncio.sleep(SECONDS / events)
                tokens = [*range(FIRST + start, FIRST + min(start + size, count))]
                if start + size >= count:
                    tokens[-1] = STOP
                send(writer, json.dumps(event(tokens, body, last=start + size >= count)))
                await writer.drain()
            send(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
    writer.close()


def send(writer: asyncio.StreamWriter, data: str) -> None:
    content = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(content), content))


def event(tokens: list[int], body: dict, last: bool) -> dict:
    """One event of a stream with the fields that vLLM 0.32 gives it."""
    names = [f"token_id:{token}" for token in tokens]
    logprobs = [-1.0 / (3 + token) for token in tokens]
    return {
        "id": "cmpl-5a8a4f1f38f14f3d8e1e1c0d9a7b2c46",
        "object": "text_completion",
        "created": 1750000000,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "text": "word " * len(tokens),
                "logprobs": {
                    "text_offset": [5 * place for place in range(len(tokens))],
                    "token_logprobs": logprobs,
                    "tokens": names,
                    "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
                },
                "finish_reason": "stop" if last else None,
                "stop_reason": STOP if last else None,
                "prompt_token_ids": body["prompt"] if tokens[0] == FIRST else None,
                "token_ids": tokens,
            }
        ],
        "usage": None,
    }


def serve(port: Connection) -> None:
    """Runs the server for ever, and says on which port."""

    async def main() -> None:
        raise_descriptor_limit()
        server = await asyncio.start_server(answer, "127.0.0.1", backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


# The client's process.


class Chat:
    """A token for each character of what is read, of ids that are no small numbers; any generation is a command."""

    stop: Tokens = (STOP,)

    def start(self, instruction: str) -> Tokens:
        return tuple(FIRST + ord(character) for character in instruction)

    def parse(self, generation: Generation) -> Action:
        return Action(f"ls {len(generation.tokens)}")

    def observe(self, generation: Generation, text: str) -> Tokens:
        return self.start(text)


class HalfRight:
    """Proposes one draft for each command, which is right half of the time."""

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        right = Random(f"{query.task} {len(query.history)}").random() < 0.5
        propose(Draft(("x" if right else "y") * OBSERVATION, 0.5, "half"))

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


async def measure(case: Case, count: int, port: int) -> Figures:
    """Of so many concurrent rollouts, all of which start at once."""
    gate: Gate = Threshold(0.0) if case.gate == "all" else ExpectedValue()
    settings = Settings(
        Sampling(max_tokens=GENERATION), depth=int(case.speculation), max_turns=TURNS, max_context=8192, gate=gate
    )
    async with Server(f"http://127.0.0.1:{port}/{case.events}") as server:
        policy = VllmPolicy(server, "model", priority=True)
        speculator = Speculator(policy, Chat(), HalfRight(), settings, Seats(case.seats))

        async def run(names: range) -> list:
            jobs = [(Task(str(name), "i" * PROMPT), name) for name in names]
            environments = ScriptedEnvironment(lambda executed: Observation("x" * OBSERVATION, TOOL_SECONDS))
            return await rollouts(speculator, jobs, environments.open, concurrency=len(jobs))

        await run(range(WARM_UP))
        before, wall, cpu = kilobytes("VmRSS"), time.perf_counter(), time.process_time()
        results = await run(range(WARM_UP, WARM_UP + count))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if failures := [result for result in results if isinstance(result, Failure)]:
        raise RuntimeError(f"{len(failures)} rollouts failed, the first with: {failures[0].error}")
    turns = [turn for result in results for turn in result.turns]
    hits = sum(turn.outcome == "hit" for turn in turns) / len(turns)
    return Figures(1000 * cpu / len(turns), (kilobytes("VmHWM") - before) / count, wall, hits)


def kilobytes(what: str) -> float:
    """``VmRSS``, this process's memory now, or ``VmHWM``, its peak: unlike getrusage's, not its parent's."""
    return float(re.search(rf"{what}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def client(case: Case, count: int, port: int) -> Figures:
    raise_descriptor_limit()
    return anyio.run(measure, case, count, port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000, help="how many run at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="which rows, from 0")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    # A process for every measurement, for the peak of its memory.
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        measured = partial(processes.submit, client, count=arguments.rollouts, port=ours.recv())
        samples = [[measured(CASES[place]) for place in arguments.cases] for _ in range(arguments.repeats)]
        columns = [[future.result() for future in column] for column in zip(*samples, strict=True)]
    server.kill()
    title = f"{arguments.rollouts:,} concurrent rollouts (medians of {arguments.repeats})"
    table = Table("speculation", "gate", "seats", "events", "CPU ms a turn", "KB a rollout", "s", "hits", title=title)
    rows = []
    for place, column in zip(arguments.cases, columns, strict=True):
        case = CASES[place]
        figures = {name: statistics.median(getattr(each, name) for each in column) for name in asdict(column[0])}
        rows.append(asdict(case) | {"seats": None if math.isinf(case.seats) else case.seats} | figures)
        table.add_row(
            *("on" if case.speculation else "off", case.gate if case.speculation else "", f"{case.seats:g}"),
            *(f"{case.events}", f"{figures['cpu_ms_per_turn']:.2f}", f"{figures['kilobytes_per_rollout']:.0f}"),
            *(f"{figures['seconds']:.0f}", f"{figures['hits']:.0%}"),
        )
    Console().print(table)
    if arguments.json:
        settings = {"rollouts": arguments.rollouts, "turns": TURNS, "repeats": arguments.repeats}
        arguments.json.write_text(json.dumps(settings | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
