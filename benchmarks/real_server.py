"""Speculation on a real vLLM server: does it save what the lab says, and do real requests wait for it?

    python benchmarks/real_server.py --json real_server.json

A vLLM server on the CPU serves the built-in policy in float32; generated tasks run in the real sandbox, and every
observation is held back for a while as by a remote one. An oracle is told what a command printed when the sandbox is
through with it, and then proposes that with a given probability. All of the server's processes have one core, and the
rollouts with their sandboxes another. It needs the environment that `scripts/vllm_environment.sh .venv-vllm` makes.

Agreement. The same rollouts with speculation off and on, taking turns. A saving is the part of the mean agent latency
that speculation takes away. An oracle that says it is never right gets no branch, so its row shows the noise. The lab
knows a short calibration of the server and the rollouts with speculation off, no more. It says what it expects three
times: of a replay of these very rollouts, on a server whose step time is linear in the number of running requests; of
the same with the step times as they were measured; and of a workload that has the distributions of these rollouts but
not their order, by ``obsspec.lab`` as it is.

Waiting. More rollouts than seats. A wait is from when a committed branch asks for a seat until its first token has
come; it counts where the branch was real from its start and was so with speculation off and on. The lab's replay says
how much longer waits have to be on an ideal server: rollouts that spend less time in tools queue more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import trio
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar
from trio.testing import MockClock

from obsspec.budget import Claimant, Seats
from obsspec.chat import ChatFormat, TerminalChat
from obsspec.context import Context, Tokens
from obsspec.environments.sandbox import open_sandbox
from obsspec.lab.run import simulate
from obsspec.lab.schedules import GATES
from obsspec.lab.server import Costs, SimulatedPolicyServer
from obsspec.lab.server import serving as simulated
from obsspec.lab.workload import GateName, validated
from obsspec.models import BUILTIN_POLICY, DEFAULT_MODEL, load_model
from obsspec.policies.http import Server
from obsspec.policies.vllm import VllmPolicy
from obsspec.reports.tables import counting
from obsspec.rollout import rollouts
from obsspec.speculation import Settings, Speculator
from obsspec.tasks import parse_tasks
from obsspec.types import (
    Chat,
    Chunk,
    Draft,
    Environment,
    Finish,
    Generation,
    Observation,
    OpenEnvironment,
    Policy,
    Query,
    Request,
    Sampling,
    Step,
    Task,
    Trajectory,
)

PYTHON = Path(__file__).parents[1] / ".venv-vllm/bin/python"
TASKS = "generated:archive,git_history,logs,permissions,schedule,service,text/easy/0-4"
"""Their commands take milliseconds."""
SAMPLING = Sampling(temperature=0, max_tokens=128)
"""Greedy: numerics that depend on the batch then seldom show."""
MAX_TURNS, MAX_CONTEXT = 4, 4096
MOST_SEATS, FEW_SEATS = 32, 4
DELAYS = (0.3, 1.0)
"""Seconds."""
WAITING_DELAY, WAITING_CONCURRENCY, WAITING_ROLLOUTS = 1.0, 8, 16
BLOCK = 32
"""Tokens: the server finds what it has read before in whole blocks of so many; it can do no smaller ones on CPUs."""


@dataclass(frozen=True, slots=True)
class Way:
    """How rollouts are run."""

    name: str
    accuracy: float | None = None
    """Chance that the oracle's draft is exact; None is without speculation."""
    stated: float = 0.0
    """What the oracle says that this chance is."""
    gate: GateName = "expected_value"

    def settings(self) -> Settings:
        depth = 0 if self.accuracy is None else 1
        return Settings(SAMPLING, depth=depth, gate=GATES[self.gate](), max_turns=MAX_TURNS, max_context=MAX_CONTEXT)


OFF = Way("off")
AGREEMENT = (
    OFF,
    Way("p = 0", 0.0, 0.0),
    Way("p = 0, said to be 0.66", 0.0, 0.66),
    Way("p = 0.66", 0.66, 0.66),
    Way("p = 1", 1.0, 1.0),
)
WAITING = (OFF, Way("p = 0.66", 0.66, 0.66), Way("p = 0.66, all admitted", 0.66, 0.66, "everything"))


# The same around real and replayed rollouts: the delay, the oracle, and when requests get their first token.


class Oracle:
    """A ``types.Predictor`` that is told each observation while it is still held back. One rollout of each task.

    Whether it then proposes the truth is a pure function of the task and the command's place in its rollout.
    """

    def __init__(self, way: Way) -> None:
        self._accuracy = way.accuracy or 0.0
        self._stated = way.stated
        self._told: dict[tuple[str, int], str] = {}
        self._waiting: dict[tuple[str, int], anyio.Event] = {}

    def tell(self, task: str, place: int, text: str) -> None:
        self._told[task, place] = text
        if (task, place) in self._waiting:
            self._waiting.pop((task, place)).set()

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        key = (query.task, len(query.history))
        if key not in self._told:
            await self._waiting.setdefault(key, anyio.Event()).wait()
        exact = Random(repr(key)).random() < self._accuracy
        propose(Draft(self._told[key] if exact else f"not {self._told[key]}", self._stated, "oracle"))

    async def prepare(self, query: Query) -> None:
        """Nothing: it is told."""

    def learn(self, query: Query, observation: Observation) -> None:
        """Nothing: it is told."""


@dataclass
class HeldBack:
    """A ``types.Environment`` whose observations the oracle has ``delay`` seconds before the policy."""

    environment: Environment
    oracle: Oracle
    task: str
    delay: float
    commands: int = 0

    async def execute(self, command: str) -> Observation:
        observation = await self.environment.execute(command)
        self.oracle.tell(self.task, self.commands, observation.text)
        self.commands += 1
        await anyio.sleep(self.delay)
        return replace(observation, seconds=observation.seconds + self.delay)

    async def score(self) -> float:
        return await self.environment.score()


@dataclass(frozen=True, slots=True)
class Wait:
    """Of one request that was real from its start. Seconds."""

    seat: float
    """Until the client gave it a seat."""
    first_token: float
    """From then on."""

    @property
    def seconds(self) -> float:
        return self.seat + self.first_token


_asked: ContextVar[tuple[float, float, bool]] = ContextVar("asked")
"""When this task asked for its seat, when it got it, and whether it was real when it asked."""


class TimedSeats(Seats):
    """Seats that note when they are asked for."""

    @asynccontextmanager
    async def seat(self, claimant: Claimant) -> AsyncIterator[None]:
        asked, real = anyio.current_time(), claimant.rank[0] == 0
        async with super().seat(claimant):
            _asked.set((asked, anyio.current_time(), real))
            yield


class TimedPolicy:
    """A ``types.Policy`` that notes when first tokens come."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.waits: dict[tuple[str, int], Wait] = {}
        """By rollout and turn, of requests that were real from their start."""

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        asked, granted, real = _asked.get()
        key = (request.rollout, request.turn)

        def take(chunk: Chunk) -> None:
            if real and not request.resume.tokens and key not in self.waits:
                self.waits[key] = Wait(granted - asked, anyio.current_time() - granted)
            emit(chunk)

        return await self._policy.generate(request, take)


@dataclass(frozen=True, slots=True)
class Run:
    """What came out of running all rollouts once."""

    trajectories: list[Trajectory]
    waits: dict[tuple[str, int], Wait]

    @property
    def latency(self) -> float:
        """Mean agent latency of a rollout, in seconds."""
        return statistics.mean(trajectory.seconds for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same with speculation off and on."""

    tasks: tuple[Task, ...]
    concurrency: int
    delay: float
    seats: int


async def run(way: Way, setting: Setting, policy: Policy, chat: Chat, open_environment: OpenEnvironment) -> Run:
    oracle = Oracle(way)
    timed = TimedPolicy(policy)
    speculator = Speculator(timed, chat, oracle, way.settings(), TimedSeats(setting.seats))

    @asynccontextmanager
    async def held_back(task: Task) -> AsyncIterator[Environment]:
        async with open_environment(task) as environment:
            yield HeldBack(environment, oracle, task.id, setting.delay)

    results = await rollouts(speculator, [(task, 0) for task in setting.tasks], held_back, setting.concurrency)
    for result in results:
        if not isinstance(result, Trajectory):
            raise RuntimeError(f"{result.task}: {result.error}")
    return Run(results, timed.waits)


async def run_real(way: Way, setting: Setting, server: Server, policy: Policy, chat: Chat) -> Run:
    """On the server, in sandboxes that were set up before, so that setting up keeps no rollout waiting."""
    await server.ask("POST", "/reset_prefix_cache")
    async with AsyncExitStack() as stack:
        opened = {task.id: await stack.enter_async_context(open_sandbox(task)) for task in setting.tasks}

        @asynccontextmanager
        async def open_environment(task: Task) -> AsyncIterator[Environment]:
            yield Unscored(opened[task.id])

        return await run(way, setting, policy, chat, open_environment)


@dataclass(frozen=True, slots=True)
class Unscored:
    """A ``types.Environment`` without a score, which would take its time from the other rollouts."""

    environment: Environment

    async def execute(self, command: str) -> Observation:
        return await self.environment.execute(command)

    async def score(self) -> float:
        return 0.0


# The lab: recorded rollouts on a simulated server.


@dataclass(frozen=True, slots=True)
class MeasuredCosts(Costs):
    """Costs whose step times are those measured, linear between them."""

    steps: tuple[tuple[int, float], ...] = ()
    """(Running requests, seconds), in rising order."""

    def step(self, running: int) -> float:
        for (few, shorter), (many, longer) in pairwise(self.steps):
            if running <= many:
                return shorter + (longer - shorter) * (running - few) / (many - few)
        return self.steps[-1][1]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a server takes for its work, measured on it."""

    steps: tuple[tuple[int, float], ...]
    """(Running requests, seconds of a decode step), in rising order."""
    prefill_tokens_per_second: float
    request_seconds: float
    """What a request takes apart from its tokens."""

    def linear(self) -> Costs:
        return Costs(*self._line(), self.prefill_tokens_per_second, stream_interval=1)

    def measured(self) -> Costs:
        rate = self.prefill_tokens_per_second
        return MeasuredCosts(self.steps[0][1], 0.0, rate, stream_interval=1, steps=self.steps)

    @property
    def deviation(self) -> float:
        """The largest difference of a measured step time from the line, as a fraction of it."""
        line = self.linear()
        return max(abs(seconds / line.step(running) - 1) for running, seconds in self.steps)

    @property
    def unseen_tokens(self) -> int:
        """What each request takes beyond the tokens that are new to the server, expressed in such tokens: its own
        time, the last token it sampled, whose cache it never wrote, and half a block."""
        return round(self.request_seconds * self.prefill_tokens_per_second + 1 + (BLOCK - 1) / 2)

    def _line(self) -> tuple[float, float]:
        slope, constant = statistics.linear_regression(*zip(*self.steps, strict=True))
        return constant, slope


@dataclass(frozen=True, slots=True)
class ReplayedChat:
    """A ``types.Chat`` as the server reads it: less what all prompts begin with, more what every request costs."""

    chat: TerminalChat
    shared: int
    """Tokens that every prompt begins with."""
    unseen: int
    """Tokens."""

    @property
    def stop(self) -> Tokens:
        return self.chat.stop

    def start(self, instruction: str) -> Tokens:
        return self.chat.start(instruction)[self.shared :] + (0,) * self.unseen

    def parse(self, generation: Generation) -> Step:
        return self.chat.parse(generation)

    def observe(self, generation: Generation, text: str) -> Tokens:
        return self.chat.observe(generation, text) + (0,) * self.unseen


class ReplayedPolicy:
    """A ``types.Policy`` that samples what was recorded, at a simulated server's pace.

    After an observation that was not recorded it samples some other generation that was.
    """

    def __init__(self, costs: Costs, recorded: Sequence[Trajectory], chat: Chat) -> None:
        # Which token it says is the last one does not matter: what was recorded takes its place.
        self.server = SimulatedPolicyServer(costs, lambda request: (len(self._tokens(request)), 0), "priority")
        self._turns = {f"{each.task}#{each.seed}": each.turns for each in recorded}
        self._any = [turn.generation.tokens for each in recorded for turn in each.turns]
        self._chat = chat

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        left = iter(self._tokens(request)[len(request.resume.tokens) :])

        def take(chunk: Chunk) -> None:
            emit(Chunk(tuple(next(left) for _ in chunk.tokens), chunk.logprobs))

        return await self.server.generate(request, take)

    def _tokens(self, request: Request) -> Tokens:
        turns = self._turns[request.rollout]
        if request.turn:
            before = turns[request.turn - 1]
            assert before.observation is not None
            if request.context.segment.tokens != self._chat.observe(before.generation, before.observation.text):
                return Random(f"{request.rollout}/{request.turn}").choice(self._any)
        return turns[request.turn].generation.tokens


@dataclass
class ReplayedTools:
    """A ``types.Environment`` that answers as was recorded, and takes as long."""

    observations: Iterator[Observation]
    delay: float
    """Seconds of the recorded ones that are not the tools' own."""

    async def execute(self, command: str) -> Observation:
        observation = next(self.observations)
        seconds = max(0.0, observation.seconds - self.delay)
        await anyio.sleep(seconds)
        return replace(observation, seconds=seconds)

    async def score(self) -> float:
        return 0.0


def replay(
    way: Way, setting: Setting, recorded: Sequence[Trajectory], chat: TerminalChat, costs: Costs, extra: int
) -> Run:
    """Recorded rollouts another way, in virtual time. ``extra``: tokens that each request takes besides its own."""
    prompts = [chat.start(task.instruction) for task in setting.tasks]
    alike = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
    replayed_chat = ReplayedChat(chat, alike // BLOCK * BLOCK, extra)
    by_task = {each.task: each for each in recorded}

    @asynccontextmanager
    async def open_environment(task: Task) -> AsyncIterator[Environment]:
        turns = by_task[task.id].turns
        executed = (turn.observation for turn in turns if turn.executing and turn.observation)
        yield ReplayedTools(executed, setting.delay)

    async def simulation() -> Run:
        policy = ReplayedPolicy(replace(costs, seats=setting.seats), recorded, replayed_chat)
        async with simulated(policy.server):
            return await run(way, setting, policy, replayed_chat, open_environment)

    return trio.run(simulation, clock=MockClock(autojump_threshold=0))


def distributions(
    way: Way, setting: Setting, recorded: Sequence[Trajectory], chat: TerminalChat, calibration: Calibration
) -> float:
    """The saving that ``obsspec.lab`` expects of a workload with the same distributions.

    Its generations are as many as the rollouts', the last included, and each has a tool. The last tool is neither
    speculated on nor in the rollouts, so its time is taken off both latencies.
    """
    turns = [turn for each in recorded for turn in each.turns]
    tools = [turn.observation.seconds for turn in turns if turn.executing and turn.observation]
    texts = [(turn.generation, turn.observation.text) for turn in turns if turn.observation]
    extra, costs = calibration.unseen_tokens, calibration.linear()
    workload = {
        "turns": max(1, round(len(turns) / len(recorded))),
        "rollouts": len(recorded),
        "concurrency": setting.concurrency,
        "tool": {"seconds": {"recorded": tools}},
        "generation": {"tokens": {"recorded": [len(turn.generation.tokens) for turn in turns]}},
        "predictor": {
            "accuracy": way.stated,
            "delay_seconds": max(0.0, statistics.mean(tools) - setting.delay),
        },
        "server": {
            "step_seconds": costs.step_seconds,
            "step_seconds_per_sequence": costs.step_seconds_per_sequence,
            "prefill_tokens_per_second": costs.prefill_tokens_per_second,
            "seats": setting.seats,
            "stream_interval": 1,
        },
        "lengths": {
            "prompt": round(statistics.mean(len(chat.start(task.instruction)) for task in setting.tasks)) + extra,
            "observation": {"recorded": [len(chat.observe(*text)) + extra for text in texts]},
        },
    }
    schedule = "harmful" if way.accuracy == 0 < way.stated else "obsspec"
    off, on = (
        simulate(validated({**workload, "schedule": name, "depth": 1}, "the rollouts")).mean_latency
        for name in ("sequential", schedule)
    )
    return (off - on) / (off - statistics.mean(tools))


# The server.


def write_model(adapter: Path, directory: Path, notes: Console) -> Any:
    """Writes the default model with ``adapter`` as one that vLLM serves; returns its tokenizer."""
    with notes.status("loading the model"):
        disable_progress_bar()
        model, tokenizer = load_model(DEFAULT_MODEL, adapter)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return tokenizer


@contextmanager
def serving(
    model: Path, seats: int, core: int, notes: Console, block: int = BLOCK, options: Sequence[str] = ()
) -> Iterator[str]:
    """The URL of a vLLM server on one core, which ends with the block.

    ``block``: tokens in one of its cache's. ``options``: more of its command's.
    """
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is missing: run scripts/vllm_environment.sh {PYTHON.parents[1]}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *("taskset", "--cpu-list", str(core), PYTHON, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", str(seats), "--block-size", str(block)),
        *("--scheduling-policy", "priority", "--logprobs-mode", "processed_logprobs"),
        # vLLM 0.32 on the CPU breaks on the first part of a seeded request that it reads in parts.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(4 * MAX_CONTEXT)),
        *options,
    ]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for half a minute
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            with notes.status(f"starting vLLM with {seats} seats, a minute or more"):
                while not _healthy(url):
                    if process.poll() is not None:
                        log.seek(0)
                        errors = [line for line in log.read().decode(errors="replace").splitlines() if "Error" in line]
                        sys.exit("\n".join(("vLLM did not start:", *errors)))
                    time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                # Its children, where it did not end them itself.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


async def calibrate(policy: Policy, most: int) -> Calibration:
    """Up to ``most`` requests at once."""
    numbers = iter(range(10**6))
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= most]

    def prompt(length: int) -> Context:
        """Nothing that was read before."""
        random = Random(next(numbers))
        return Context.of(tuple(random.randrange(100, 40_000) for _ in range(length)))

    async def moments(context: Context, tokens: int) -> list[float]:
        """When it began, and when each token came."""
        came = [anyio.current_time()]
        request = Request(context, SAMPLING, tokens, (), seed=0, turn=0)
        await policy.generate(request, lambda chunk: came.extend([anyio.current_time()] * len(chunk.tokens)))
        return came

    async def step(running: int, tokens: int = 16) -> float:
        """Seconds of a step, while all of so many are running."""
        context, all_moments = prompt(200), []

        async def one() -> None:
            all_moments.append(await moments(context, tokens))

        await moments(context, 1)
        async with anyio.create_task_group() as tasks:
            for _ in range(running):
                tasks.start_soon(one)
        start, end = max(came[1] for came in all_moments), min(came[-1] for came in all_moments)
        return (end - start) / statistics.mean(sum(start < moment <= end for moment in came) for came in all_moments)

    async def first_token(length: int) -> float:
        taken = []
        for _ in range(5):
            came = await moments(prompt(length), 1)
            taken.append(came[1] - came[0])
        return statistics.median(taken)

    await moments(prompt(200), 10)
    steps = []
    for count in counts:
        steps.append((count, statistics.median([await step(count) for _ in range(3)])))
    short, long = 32, 256
    first, second = await first_token(short), await first_token(long)
    rate = (long - short) / (second - first)
    return Calibration(tuple(steps), rate, max(0.0, first - short / rate - steps[0][1]))


# Both questions.


async def interleaved(
    url: str, chat: TerminalChat, settings: Sequence[Setting], ways: Sequence[Way], repeats: int, notes: Console
) -> tuple[Calibration, dict[tuple[int, str], list[Run]]]:
    """Each setting's rollouts by every way, ways taking turns at going first. By the setting's place and the way."""
    runs: dict[tuple[int, str], list[Run]] = defaultdict(list)
    async with Server(url) as server, VllmPolicy.connect(url, max_context=MAX_CONTEXT) as policy:
        with notes.status("calibrating"):
            calibration = await calibrate(policy, settings[0].seats)
        with counting(notes, "runs", len(settings) * len(ways) * repeats) as advance:
            for repeat in range(repeats):
                for place, setting in enumerate(settings):
                    shift = (repeat + place) % len(ways)
                    for way in (*ways[shift:], *ways[:shift]):
                        runs[place, way.name].append(await run_real(way, setting, server, policy, chat))
                        advance()
    return calibration, runs


def saving(off: Run, on: Run) -> float:
    return 1 - on.latency / off.latency


def identical(off: Iterable[Run], on: Iterable[Run]) -> str:
    """How many rollouts have the same tokens: where they do not, they may be longer or shorter."""
    pairs = [
        pair for runs in zip(off, on, strict=True) for pair in zip(*(run.trajectories for run in runs), strict=True)
    ]
    return f"{sum(one.context.tokens == other.context.tokens for one, other in pairs)} of {len(pairs)}"


def outcomes(runs: Iterable[Run]) -> dict[str, int]:
    """How speculation ended on the tool calls."""
    counts: dict[str, int] = defaultdict(int)
    for each in runs:
        for trajectory in each.trajectories:
            for turn in trajectory.turns:
                if turn.executing:
                    counts[turn.outcome] += 1
    return dict(counts)


def agreement(
    chat: TerminalChat,
    settings: Sequence[Setting],
    calibration: Calibration,
    runs: dict[tuple[int, str], list[Run]],
    notes: Console,
) -> list[dict[str, Any]]:
    """A row for each setting and way, with what the lab expects of each repeat's rollouts with speculation off."""
    rows = []
    extra = calibration.unseen_tokens
    with counting(notes, "expectations", len(settings) * (len(AGREEMENT) - 1)) as advance:
        for place, setting in enumerate(settings):
            off = runs[place, OFF.name]
            for way in AGREEMENT[1:]:
                on = runs[place, way.name]
                expected: dict[str, list[float]] = defaultdict(list)
                for base in off:
                    recorded = base.trajectories
                    for name, costs in (("linear", calibration.linear()), ("measured", calibration.measured())):
                        without, with_ = (replay(each, setting, recorded, chat, costs, extra) for each in (OFF, way))
                        expected[name].append(saving(without, with_))
                        expected[f"{name}_off_seconds"].append(without.latency)
                    expected["distributions"].append(distributions(way, setting, recorded, chat, calibration))
                savings = [saving(*pair) for pair in zip(off, on, strict=True)]
                real = statistics.median(savings)
                lab = {name: statistics.median(values) for name, values in expected.items()}
                rows.append(
                    {
                        "concurrency": setting.concurrency,
                        "rollouts": len(setting.tasks),
                        "delay": setting.delay,
                        "way": way.name,
                        "off_seconds": statistics.median(each.latency for each in off),
                        "on_seconds": statistics.median(each.latency for each in on),
                        "savings": savings,
                        "saving": real,
                        "expected": lab,
                        "difference": lab["linear"] - real,
                        "outcomes": outcomes(on),
                        "identical": identical(off, on),
                    }
                )
                advance()
    return rows


def agreement_table(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table(
        *("concurrent", "delay s", "oracle", "off s", "lab off s", "saving", "lab", "apart", "of the saving"),
        *("measured steps", "distributions", "hits", "identical"),
        title="Agreement: part of the agent latency that speculation saves, and what the lab expects",
    )
    for row in rows:
        expected, real, calls = row["expected"], row["saving"], sum(row["outcomes"].values())
        table.add_row(
            f"{row['concurrency']}",
            f"{row['delay']:g}",
            row["way"],
            f"{row['off_seconds']:.2f}",
            f"{expected['linear_off_seconds']:.2f}",
            f"{real:.1%}",
            f"{expected['linear']:.1%}",
            f"{100 * row['difference']:+.1f} points",
            f"{abs(row['difference'] / real):.0%}" if real > 0 else "-",
            f"{expected['measured']:.1%}",
            f"{expected['distributions']:.1%}",
            f"{row['outcomes'].get('hit', 0)} of {calls}",
            row["identical"],
        )
    return table


def waiting(
    chat: TerminalChat, setting: Setting, calibration: Calibration, runs: dict[tuple[int, str], list[Run]]
) -> list[dict[str, Any]]:
    """A row for each way: the waits of the requests that were real from their start with speculation off and on."""
    off = runs[0, OFF.name]
    extra, costs = calibration.unseen_tokens, calibration.measured()
    rows = []
    for way in WAITING[1:]:
        on = runs[0, way.name]
        ideal = []
        for base in off:
            pair = [replay(each, setting, base.trajectories, chat, costs, extra) for each in (OFF, way)]
            ideal.append(ratio(*pair))
        pairs = [pair for two in zip(off, on, strict=True) for pair in paired(*two)]
        rows.append(
            {
                "way": way.name,
                "requests": len(pairs),
                "all_requests": sum(len(each.waits) for each in off),
                **{
                    f"{name}_{part}": statistics.mean(getattr(pair[place], part) for pair in pairs)
                    for place, name in enumerate(("off", "on"))
                    for part in ("seat", "first_token", "seconds")
                },
                "ratios": [ratio(*two) for two in zip(off, on, strict=True)],
                "ratio": statistics.median(ratio(*two) for two in zip(off, on, strict=True)),
                "ideal_ratio": statistics.median(ideal),
                "saving": statistics.median(saving(*two) for two in zip(off, on, strict=True)),
                "outcomes": outcomes(on),
                "identical": identical(off, on),
            }
        )
    return rows


def paired(off: Run, on: Run) -> list[tuple[Wait, Wait]]:
    return [(off.waits[key], on.waits[key]) for key in off.waits if key in on.waits]


def ratio(off: Run, on: Run) -> float:
    """Of mean waits, with speculation to without."""
    pairs = paired(off, on)
    return sum(pair[1].seconds for pair in pairs) / sum(pair[0].seconds for pair in pairs)


def waiting_table(rows: Iterable[dict[str, Any]], setting: Setting) -> Table:
    table = Table(
        *("oracle", "requests", "seat off s", "seat on s", "token off s", "token on s", "on / off", "ideal on / off"),
        *("saving", "hits", "identical"),
        title=f"Waiting: {setting.concurrency} rollouts on {setting.seats} seats, {setting.delay:g} s a command; "
        "until a seat, and from there to the first token",
    )
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['requests']} of {row['all_requests']}",
            *(f"{row[f'{name}_{part}']:.2f}" for part in ("seat", "first_token") for name in ("off", "on")),
            f"{row['ratio']:.3f}",
            f"{row['ideal_ratio']:.3f}",
            f"{row['saving']:.1%}",
            f"{row['outcomes'].get('hit', 0)} of {sum(row['outcomes'].values())}",
            row["identical"],
        )
    return table


def calibration_line(calibration: Calibration) -> str:
    steps = ", ".join(f"{running}: {1000 * seconds:.0f}" for running, seconds in calibration.steps)
    line = calibration.linear()
    return (
        f"milliseconds of a step, by running requests: {steps}; line: {1000 * line.step_seconds:.0f} + "
        f"{1000 * line.step_seconds_per_sequence:.1f} each, at most {calibration.deviation:.0%} off; prefill "
        f"{calibration.prefill_tokens_per_second:.0f} tokens/s, {1000 * calibration.request_seconds:.0f} ms a request"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="8,32", help="of the agreement, up to 32; '' skips it")
    parser.add_argument("--repeats", type=int, default=2, help="of the agreement")
    parser.add_argument("--waiting-repeats", type=int, default=2, help="0 skips waiting")
    parser.add_argument("--tasks", default=TASKS, help="the first so many of them are run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tasks = tuple(parse_tasks(arguments.tasks))
    counts = [int(count) for count in arguments.concurrency.split(",") if count]
    server_core, own_core, *_ = (*sorted(os.sched_getaffinity(0)) * 2,)
    os.sched_setaffinity(0, {own_core})
    notes, console = Console(stderr=True), Console(width=160)
    figures: dict[str, Any] = {"tasks": arguments.tasks, "repeats": arguments.repeats, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as directory:
        chat = TerminalChat(ChatFormat(write_model(BUILTIN_POLICY, Path(directory), notes)))
        if counts:
            settings = [
                Setting(tasks[: max(8, min(2 * count, MOST_SEATS))], count, delay, MOST_SEATS)
                for count in counts
                for delay in DELAYS
            ]
            with serving(Path(directory), MOST_SEATS, server_core, notes) as url:
                calibration, runs = anyio.run(interleaved, url, chat, settings, AGREEMENT, arguments.repeats, notes)
            rows = agreement(chat, settings, calibration, runs, notes)
            console.print(agreement_table(rows))
            console.print(calibration_line(calibration), highlight=False, soft_wrap=True)
            figures["agreement"] = {"calibration": asdict(calibration), "rows": rows}
        if arguments.waiting_repeats:
            setting = Setting(tasks[:WAITING_ROLLOUTS], WAITING_CONCURRENCY, WAITING_DELAY, FEW_SEATS)
            with serving(Path(directory), FEW_SEATS, server_core, notes) as url:
                calibration, runs = anyio.run(
                    interleaved, url, chat, [setting], WAITING, arguments.waiting_repeats, notes
                )
            rows = waiting(chat, setting, calibration, runs)
            console.print(waiting_table(rows, setting))
            console.print(calibration_line(calibration), highlight=False, soft_wrap=True)
            figures["waiting"] = {"calibration": asdict(calibration), "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
