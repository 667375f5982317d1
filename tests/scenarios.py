"""Random rollouts with random faults, in virtual time, each against a plain sequential loop.

Shared by the property tests and by `benchmarks/schedules.py`, which runs many more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import trio
import trio.testing

from obsspec.budget import Seats
from obsspec.context import Context, Tokens
from obsspec.gate import ExpectedValue, Threshold
from obsspec.predictors import Cascade
from obsspec.speculation import Rollout, Settings, Speculator
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy
from obsspec.types import (
    Action,
    Chunk,
    Done,
    Draft,
    Finish,
    Generation,
    Malformed,
    Observation,
    PolicyError,
    Predictor,
    Query,
    Request,
    Sampling,
    Task,
)

NONSENSE: tuple[Any, ...] = (
    Draft("\ud800", 0.9),
    Draft("x" * 10_000_000, 0.9),
    Draft(b"bytes", 0.9),  # type: ignore[arg-type]
    Draft("text", math.nan),
    Draft("text", -1.0),
    Draft("text", "likely"),  # type: ignore[arg-type]
    None,
    object(),
)


@dataclass(frozen=True)
class Scenario:
    """Everything that varies. The numbers seed pure functions, so that a scenario always means the same."""

    seed: int
    depth: int = 1
    breadth: int = 1
    max_turns: int = 8
    max_tokens: int = 6
    max_context: int = 200
    accuracy: float = 0.7
    """How often the predictor's first draft is the truth."""
    predictor_faults: float = 0.0
    """How often the predictor raises, hangs or proposes nonsense."""
    policy_faults: float = 0.0
    """How often a request breaks at some token."""
    tool_fault_after: int | None = None
    """The environment raises at this command."""
    cancel_after: float | None = None
    """The rollout is cancelled after so many seconds."""
    seats: float = math.inf
    rollouts: int = 1
    suspensions: float = 0.0
    """How often in a virtual second somebody suspends a branch, committed ones included."""
    least: float | None = 0.0
    """The gate's threshold; None for the expected value."""
    spares: bool = False
    """Whether the predictor is asked only where an expected value says that it is worth it."""

    def random(self, *key: object) -> Random:
        return Random(f"{self.seed}/{key}")

    def settings(self) -> Settings:
        return Settings(
            Sampling(max_tokens=self.max_tokens),
            depth=self.depth,
            breadth=self.breadth,
            gate=ExpectedValue() if self.least is None else Threshold(self.least),
            max_turns=self.max_turns,
            max_context=self.max_context,
            backoff=0.01,
            retries=1000,
        )

    def write(self, context: Tokens, seed: int) -> str:
        random = self.random("write", context, seed)
        kind = random.random()
        if kind < 0.08:
            return "done"
        prefix = "?" if kind < 0.16 else ""
        return prefix + "".join(random.choices("abc", k=random.randint(1, 6)))

    def token_seconds(self, context: Tokens, position: int) -> float:
        return self.random("token", context, position).choice((0.0, 0.01, 0.1, 0.5))

    def execute(self, commands: tuple[str, ...]) -> Observation:
        if self.tool_fault_after is not None and len(commands) > self.tool_fault_after:
            raise OSError("the sandbox is gone")
        random = self.random("execute", commands)
        if random.random() < 0.1:
            return Observation("timed out", 5.0, None, timed_out=True)
        text = random.choice(("", "x", "yy", "a longer output\nof two lines", "é"))
        return Observation(text, random.choice((0.0, 0.01, 0.3, 2.0, 5.0)), random.choice((0, 1)))


@dataclass
class FaultyPolicy:
    """Breaks requests now and then, at any token; each time another one."""

    scenario: Scenario
    policy: ScriptedPolicy
    requests: int = 0

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        self.requests += 1
        random = self.scenario.random("policy", self.requests)
        lasts = random.randint(0, 4) if random.random() < self.scenario.policy_faults else None
        emitted = 0

        def count(chunk: Chunk) -> None:
            nonlocal emitted
            if emitted == lasts:
                raise PolicyError("the connection broke")
            emitted += 1
            emit(chunk)

        if lasts == 0:
            raise PolicyError("connection refused")
        return await self.policy.generate(request, count)


@dataclass
class ScenarioPredictor:
    """Knows the truth where its query is true, and tells it with the scenario's accuracy, amid faults."""

    scenario: Scenario
    running: int = 0
    learned: list[tuple[Query, Observation]] = field(default_factory=list)

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        random = self.scenario.random("predict", query)
        self.running += 1
        try:
            if random.random() < self.scenario.predictor_faults:
                fault = random.choice(("raise", "hang", *NONSENSE))
                if fault == "hang":
                    await anyio.sleep_forever()
                if fault == "raise":
                    raise RuntimeError("the world model is gone")
                propose(fault)
            truth = self.scenario.execute((*(exchange.command for exchange in query.history), query.command)).text
            for _ in range(random.randint(0, 4)):
                await anyio.sleep(random.choice((0.0, 0.01, 0.2, 1.0)))
                exact = random.random() < self.scenario.accuracy
                propose(Draft(truth if exact else random.choice(("x", "yy", "wrong")), random.random()))
        finally:
            self.running -= 1

    async def prepare(self, query: Query) -> None:
        random = self.scenario.random("prepare", query)
        self.running += 1
        try:
            await anyio.sleep(random.choice((0.0, 0.1, math.inf)))
            if random.random() < self.scenario.predictor_faults:
                raise RuntimeError("the world model cannot read")
        finally:
            self.running -= 1

    def learn(self, query: Query, observation: Observation) -> None:
        self.learned.append((query, observation))
        if self.scenario.random("learn", query).random() < self.scenario.predictor_faults:
            raise RuntimeError("the world model cannot learn")


@dataclass
class Reference:
    """What a sequential rollout gives, and the time that it takes."""

    context: Context
    generations: list[Generation]
    executed: tuple[str, ...]
    end: str
    tool_seconds: float
    generation_seconds: float


async def sequential(scenario: Scenario, seed: int) -> Reference:
    """The plain loop, written without the engine. Stops short where the tool raises: ``end`` is then ``broken``."""
    policy, chat, settings = ScriptedPolicy(scenario.write, scenario.token_seconds), ScriptedChat(), scenario.settings()
    environment = ScriptedEnvironment(scenario.execute)
    context = Context.of(chat.start("go"))
    result = Reference(context, [], (), "turns", 0.0, 0.0)
    for turn in range(settings.max_turns):
        budget = min(settings.sampling.max_tokens, settings.max_context - context.length)
        if budget < 1:
            result.end = "length"
            break
        chunks: list[Chunk] = []
        began = anyio.current_time()
        request = Request(context, settings.sampling, budget, chat.stop, seed, turn)
        finish = await policy.generate(request, chunks.append)
        result.generation_seconds += anyio.current_time() - began
        generation = Generation(
            tuple(token for chunk in chunks for token in chunk.tokens),
            tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
            (0,) * len(chunks),
            finish,
        )
        result.generations.append(generation)
        result.context = context.sampled(generation.tokens, generation.logprobs)
        match chat.parse(generation):
            case Done():
                result.end = "done"
                break
            case Malformed(reply):
                text = reply
            case Action(command):
                began = anyio.current_time()
                try:
                    text = (await environment.execute(command)).text
                except OSError:
                    result.end = "broken"
                    break
                finally:
                    result.tool_seconds += anyio.current_time() - began
        context = result.context.given(chat.observe(generation, text))
    result.executed = environment.executed
    return result


def check(scenario: Scenario) -> list[Rollout]:
    """Runs a scenario with speculation, and asserts all that must hold. Returns the rollouts, for further questions."""
    return trio.run(_check, scenario, clock=trio.testing.MockClock(autojump_threshold=0))


async def _check(scenario: Scenario) -> list[Rollout]:
    references = [await sequential(scenario, seed) for seed in range(scenario.rollouts)]
    scripted = ScriptedPolicy(scenario.write, scenario.token_seconds)
    policy = FaultyPolicy(scenario, scripted)
    predictor = ScenarioPredictor(scenario)
    settings = scenario.settings()
    asked: Predictor = predictor
    if scenario.spares:
        gate = settings.gate if isinstance(settings.gate, ExpectedValue) else ExpectedValue()
        asked = Cascade({"scenario": predictor}, worth_asking=gate.worth_asking)
    speculator = Speculator(policy, ScriptedChat(), asked, settings, Seats(scenario.seats))
    runs: dict[int, Rollout] = {}
    environments = [ScriptedEnvironment(scenario.execute) for _ in references]
    seconds: dict[int, float] = {}
    broken: list[int] = []

    async def run(seed: int) -> None:
        began = anyio.current_time()
        try:
            async with speculator.rollout("go", seed=seed) as rollout:
                runs[seed] = rollout
                while action := await rollout.act():
                    rollout.observe(await environments[seed].execute(action.command))
                seconds[seed] = anyio.current_time() - began
        except OSError:
            broken.append(seed)

    async def suspend_at_random() -> None:
        random = scenario.random("suspend")
        while True:
            await anyio.sleep(random.expovariate(scenario.suspensions))
            holders = sorted(speculator.seats._holding, key=lambda holder: holder.rank)
            if holders:
                random.choice(holders).suspend()

    with anyio.move_on_after(math.inf if scenario.cancel_after is None else scenario.cancel_after) as scope:
        async with anyio.create_task_group() as chaos:
            if scenario.suspensions:
                chaos.start_soon(suspend_at_random)
            async with anyio.create_task_group() as group:
                for seed in range(scenario.rollouts):
                    group.start_soon(run, seed)
            chaos.cancel_scope.cancel()

    assert scripted.running == 0, "a request is still running"
    assert predictor.running == 0, "a prediction is still running"
    assert not speculator.seats._holding, "a seat is still held"
    assert not speculator.seats._waiting, "somebody still waits for a seat"
    for seed, reference in enumerate(references):
        executed = environments[seed].executed
        assert executed == reference.executed[: len(executed)], "something was executed that should not have been"
        rollout = runs.get(seed)
        if rollout is None or rollout.end is None:
            assert scope.cancelled_caught or seed in broken, "the rollout did not end"
            assert not (seed in broken and reference.end != "broken"), "the rollout broke where the sequential did not"
            if rollout is not None:  # What it has so far is a prefix of the sequential trajectory.
                so_far = rollout.context.tokens
                assert so_far[: reference.context.length] == reference.context.tokens[: len(so_far)]
            continue
        assert rollout.end == reference.end
        assert executed == reference.executed
        assert [turn.generation for turn in rollout.turns] == reference.generations
        assert rollout.context.tokens == reference.context.tokens
        assert rollout.context.mask == reference.context.mask
        assert rollout.context.logprobs == reference.context.logprobs
        least = max(reference.tool_seconds, reference.generation_seconds)
        most = reference.tool_seconds + reference.generation_seconds
        assert seconds[seed] > least - 1e-6, "faster than is possible"
        if math.isinf(scenario.seats) and not scenario.policy_faults and not scenario.suspensions:
            assert seconds[seed] < most + 1e-6, "slower than sequential"
            hidden = sum(turn.hidden_seconds for turn in rollout.turns)
            assert abs(most - seconds[seed] - hidden) < 1e-6, "the hidden seconds are not the seconds saved"
        if rollout.end is not None:
            commands = [turn.step.command for turn in rollout.turns if isinstance(turn.step, Action)]
            assert tuple(commands) == executed
    return list(runs.values())


def task(identifier: str = "task") -> Task:
    return Task(identifier, "go")
