"""The simulated parts around the engine: what is said, what the tools do, and what the world model guesses.

All are pure functions of the workload's seed, the rollout and the turn, so every schedule meets the same rollouts.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from zlib import crc32

import anyio

from obsspec.context import Tokens
from obsspec.lab.server import SimulatedPolicyServer
from obsspec.lab.workload import Workload, normal_score
from obsspec.types import Action, Done, Draft, Generation, Observation, Query, Request, Step, Task


@dataclass(frozen=True, slots=True)
class World:
    """What happens in a workload, whatever the schedule."""

    workload: Workload

    def jobs(self) -> list[tuple[Task, int]]:
        """A task of its own for each rollout, named by its group and its place in it; groups follow one another."""
        groups = self.workload.groups
        size = math.ceil(self.workload.rollouts / groups)
        return [(Task(f"{number // size}.{number % size}", "work"), number) for number in range(self.workload.rollouts)]

    def tool_seconds(self, task: str, turn: int) -> float:
        tool = self.workload.tool
        factor = 1.0
        if tool.group_sigma:
            group = task.partition(".")[0]
            factor = math.exp(tool.group_sigma * self._random("group", group).gauss() - tool.group_sigma**2 / 2)
        return factor * tool.seconds.sample(self._random("tool", task, turn).random()) + tool.overhead

    def kind(self, task: str, turn: int) -> int:
        """Of the turn's command, the slowest kind last. Normal scores of the kind and of the call's time correlate."""
        tool = self.workload.tool
        if tool.kinds == 1:
            return 0
        time = normal_score(self._random("tool", task, turn).random())
        noise = self._random("kind", task, turn).gauss()
        score = tool.predictability * time + math.sqrt(1 - tool.predictability**2) * noise
        return min(tool.kinds - 1, int(tool.kinds * NormalDist().cdf(score)))

    @property
    def stop(self) -> Tokens:
        """The tokens that end a generation: one for each step that it may be."""
        return tuple(range(-self.workload.tool.kinds, 0))

    def step(self, place: int) -> Step:
        """What a generation says that ends with the token at ``place`` of ``stop``: a command of that kind."""
        return Action(f"work{place}")

    def observation(self, task: str, turn: int) -> str:
        return f"{task}/{turn}"

    def observation_tokens(self, text: str) -> int:
        return max(1, round(self.workload.lengths.observation.sample(self._random("length", text).random())))

    def generation(self, request: Request) -> tuple[int, int]:
        """How many tokens it has, and its last one, which stands for the kind of its command.

        Depends on the context through what was observed last: its first token stands for its text.
        """
        generation, observed = self.workload.generation, request.context.segment.tokens[0]
        uniform = self._random("generation", request.seed, request.turn, observed).random()
        if generation.tokens is not None:
            tokens = generation.tokens.sample(uniform)
        else:
            assert generation.seconds is not None
            tokens = generation.seconds.sample(uniform) / self.workload.server.costs.step(1)
        return max(1, round(tokens)), self.stop[self.kind(_task(request), request.turn)]

    def drafts(self, task: str, turn: int) -> tuple[tuple[float, bool], ...]:
        """The chance of each, and whether it is exact: at most one is."""
        predictor = self.workload.predictor
        uniform = self._random("drafts", task, turn).random()
        mean = first = predictor.chance(self.tool_seconds(task, turn))
        if 0 < mean < 1 and not math.isinf(predictor.concentration):
            weight = predictor.concentration
            first = self._random("chance", task, turn).betavariate(mean * weight, (1 - mean) * weight)
        rest = (1 - first) / (1 - mean) if mean < 1 else 0.0
        drafts, below = [], 0.0
        for chance in (first, *(further * rest for further in predictor.further)):
            drafts.append((chance, below <= uniform < below + chance))
            below += chance
        return tuple(drafts)

    def _random(self, *key: object) -> Random:
        return Random(f"{self.workload.seed}/{key}")


def _task(request: Request) -> str:
    return request.rollout.rpartition("#")[0]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn of a rollout that was recorded: a generation, and the command that it asks for."""

    kind: int
    """Of its command, a place in ``RecordedWorld.commands``; one beyond them in a rollout's last turn, which has no
    command and ends it."""
    generation_seconds: float
    """On an idle server."""
    tool_seconds: float
    drafts: tuple[tuple[float, bool], ...] = ()
    """The chance that the predictor gave each, and whether it was exact."""


@dataclass(frozen=True, slots=True)
class RecordedWorld(World):
    """A world in which the rollouts, and what was predicted for them, are recorded ones.

    After a wrong draft the policy would have written something else; its length is that of some other generation. A
    predictor whose accuracy is 1 proposes the truth. Every rollout ends with a turn that has no command.
    """

    rollouts: tuple[tuple[RecordedTurn, ...], ...] = ()
    commands: tuple[str, ...] = ()
    """One of each kind, for the gate, which learns how long kinds of commands take."""

    def jobs(self) -> list[tuple[Task, int]]:
        return [(Task(str(number), "work"), number) for number in range(len(self.rollouts))]

    def tool_seconds(self, task: str, turn: int) -> float:
        return self.rollouts[int(task)][turn].tool_seconds

    @property
    def stop(self) -> Tokens:
        return tuple(range(-1 - len(self.commands), 0))

    def step(self, place: int) -> Step:
        """The last one says that the rollout is over."""
        return Action(self.commands[place]) if place < len(self.commands) else Done()

    def generation(self, request: Request) -> tuple[int, int]:
        task, turn = _task(request), request.turn
        recorded, observed = self.rollouts[int(task)][turn], request.context.segment.tokens[0]
        if turn and observed != _stand_in(self.observation(task, turn - 1)):
            random = self._random("generation", request.seed, turn, observed)
            recorded = random.choice(random.choice(self.rollouts))
        tokens = recorded.generation_seconds / self.workload.server.costs.step(1)
        return max(1, round(tokens)), self.stop[recorded.kind]

    def drafts(self, task: str, turn: int) -> tuple[tuple[float, bool], ...]:
        if self.workload.predictor.accuracy == 1:
            return ((1.0, True),)
        return self.rollouts[int(task)][turn].drafts


def _stand_in(text: str) -> int:
    """The token that stands for a text."""
    return crc32(text.encode())


@dataclass(frozen=True, slots=True)
class SimulatedChat:
    """A ``types.Chat``: what a generation's last token stands for is what it says; an observation is as long as the
    world says."""

    world: World

    @property
    def stop(self) -> Tokens:
        return self.world.stop

    def start(self, instruction: str) -> Tokens:
        return (1,) * self.world.workload.lengths.prompt

    def parse(self, generation: Generation) -> Step:
        return self.world.step(self.stop.index(generation.tokens[-1]))

    def observe(self, generation: Generation, text: str) -> Tokens:
        return (_stand_in(text), *(1,) * (self.world.observation_tokens(text) - 1))


@dataclass(slots=True)
class SimulatedTools:
    """A ``types.Environment``."""

    world: World
    task: str
    turn: int = 0

    async def execute(self, command: str) -> Observation:
        turn, self.turn = self.turn, self.turn + 1
        seconds = self.world.tool_seconds(self.task, turn)
        await anyio.sleep(seconds)
        return Observation(self.world.observation(self.task, turn), seconds, 0)

    async def score(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Opening:
    """Opens a world's tools, for `obsspec.rollouts`."""

    world: World

    @asynccontextmanager
    async def __call__(self, task: Task) -> AsyncIterator[SimulatedTools]:
        yield SimulatedTools(self.world, task.id)


class SimulatedWorldModel:
    """A ``types.Predictor`` that is right as often as the workload says, and says so of every draft.

    Its drafts come from a server of its own, or from the policy's, at the policy's pace.
    """

    def __init__(self, world: World, policy_server: SimulatedPolicyServer, always_wrong: bool = False) -> None:
        """``always_wrong``: whatever it says of them, no draft is exact."""
        workload = world.workload
        self._world = world
        self._always_wrong = always_wrong
        self._seconds = workload.predictor_seconds
        self._seats = anyio.CapacityLimiter(workload.predictor.seats)
        self._shared = policy_server if workload.predictor.server == "shared" else None
        self._steps = math.ceil(self._seconds / workload.server.costs.step(1))

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        turn = len(query.history)
        if self._shared is not None and self._steps:
            await self._shared.work(self._steps, priority=1)
        elif self._seconds:
            async with self._seats:
                await anyio.sleep(self._seconds)
        truth = self._world.observation(query.task, turn)
        for place, (chance, exact) in enumerate(self._world.drafts(query.task, turn)):
            exact = exact and not self._always_wrong
            propose(Draft(truth if exact else f"{truth} but {place}", chance, "simulated"))

    async def prepare(self, query: Query) -> None:
        """Nothing: its delay counts from the question."""

    def learn(self, query: Query, observation: Observation) -> None:
        """Nothing: it is as good as the workload says."""
