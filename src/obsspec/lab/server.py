"""A simulated policy server with continuous batching, whose events are arrivals and departures, not tokens.

All running sequences decode together: one step gives each of them one token and takes

    seconds of a step = step_seconds + step_seconds_per_sequence * running

A request takes a seat at the first step boundary at which one is free. What it has to read that no earlier request of
its rollout had is prefilled then, while decoding stands still; an engine that prefills in chunks spreads the same
seconds over its steps. Between two changes all steps are alike, so the server only computes how many there were.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Literal

import anyio

from obsspec.context import Context, Tokens
from obsspec.types import Chunk, Finish, Request

WORD = 1
"""Every token of a generation but its last one, as nobody reads them."""

Scheduling = Literal["fcfs", "priority"]
"""First come first served; or by ``Request.priority``, lower first, as in vLLM. Neither takes a seat away."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a server's work takes."""

    step_seconds: float
    """Of a step, however few run: reading the weights."""
    step_seconds_per_sequence: float = 0.0
    """More of a step for each running sequence: reading its cache."""
    prefill_tokens_per_second: float = math.inf
    seats: float = math.inf
    """Most sequences that run at once."""
    stream_interval: int = 8
    """Steps between two moments at which tokens are streamed; a request's first one is at once. A suspended request
    loses what was not."""

    def step(self, running: int) -> float:
        return self.step_seconds + self.step_seconds_per_sequence * running


@dataclass(slots=True)
class _Prefix:
    """A context that the server has read, and how many tokens it wrote after it."""

    written: int = 0
    after: dict[Tokens, _Prefix] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request, from its arrival to its end."""

    length: int
    """Tokens to generate, those that an earlier request emitted included."""
    emitted: int = 0
    last: int = WORD
    """The last of them: a stop token, unless the generation is cut."""
    emit: Callable[[Chunk], None] = lambda chunk: None
    request: Request | None = None
    free: bool = False
    """It takes no seat and slows nobody down."""
    first: int = 0
    """The server's count of steps when its first token was not yet sampled."""
    prefix: _Prefix | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)


class SimulatedPolicyServer:
    """A ``types.Policy``. To be used within `serving`, which does its work.

    ``generation`` says how many tokens a request's generation has, at least 1, and which stop token is the last of
    them. It must be a pure function of the request's context, seed and turn.
    """

    def __init__(
        self,
        costs: Costs,
        generation: Callable[[Request], tuple[int, int]],
        scheduling: Scheduling = "fcfs",
        free_speculation: bool = False,
    ) -> None:
        """``free_speculation``: speculative requests take no seat and slow nobody down, for bounds."""
        self._costs = costs
        self._generation = generation
        self._by_priority = scheduling == "priority"
        self._free_speculation = free_speculation
        self._arrivals = count()
        self._waiting: list[tuple[int, int, _Sequence]] = []
        """A heap, in the order in which they are to be seated."""
        self._running: dict[_Sequence, None] = {}
        self._new: list[_Sequence] = []
        """Those of which no step was taken yet: a first token is streamed at once."""
        self._ending: list[tuple[int, int, _Sequence]] = []
        """A heap, by the step that samples their last token; aborted ones stay until then."""
        self._seated = 0
        self._steps = 0
        self._changed = anyio.Event()
        """Set where the next step boundary has something to do."""
        self._prefixes: dict[tuple[str, Context | None], _Prefix] = {}
        """By rollout and context; contexts that are equal share theirs."""
        self.busy_seconds = 0.0
        """In which it prefilled or decoded."""
        self.tokens = 0
        """Sampled, those of aborted requests included."""

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        length, stop = self._generation(request)
        free = self._free_speculation and request.priority > 0
        tokens = min(length, request.max_tokens)
        last = stop if tokens == length else WORD
        await self._serve(_Sequence(tokens, len(request.resume.tokens), last, emit, request, free), request.priority)
        return "stop" if tokens == length else "length"

    async def work(self, tokens: int, priority: int) -> None:
        """Samples ``tokens`` tokens of something else that the server hosts, such as a world model's draft."""
        await self._serve(_Sequence(tokens), priority)

    async def _serve(self, sequence: _Sequence, priority: int) -> None:
        place = (priority if self._by_priority else 0, next(self._arrivals), sequence)
        heappush(self._waiting, place)
        if self._has_seat(self._waiting[0][2]):
            self._changed.set()
        try:
            await sequence.ended.wait()
        finally:
            if sequence in self._running:  # It was aborted: the next step is without it.
                self._leave(sequence)
                self._changed.set()
            sequence.ended.set()  # Where it still waits, it is to be passed over.

    def _has_seat(self, sequence: _Sequence) -> bool:
        return sequence.free or self._seated < self._costs.seats or sequence.ended.is_set()

    # The work, step boundary to step boundary.

    async def serve(self) -> None:
        """Never returns: `serving` cancels it."""
        while True:
            self._changed = anyio.Event()
            if prefill := self._seat() / self._costs.prefill_tokens_per_second:
                self.busy_seconds += prefill
                await anyio.sleep(prefill)
            elif self._running:
                await self._decode()
            else:
                await self._changed.wait()

    def _seat(self) -> int:
        """Seats whoever waits while there are seats. Returns how many tokens are to be prefilled for them."""
        missing = 0
        while self._waiting and self._has_seat(self._waiting[0][2]):
            sequence = heappop(self._waiting)[2]
            if sequence.ended.is_set():
                continue
            missing += self._missing(sequence)
            sequence.first = self._steps - sequence.emitted
            self._running[sequence] = None
            self._new.append(sequence)
            self._seated += not sequence.free
            heappush(self._ending, (sequence.first + sequence.length, next(self._arrivals), sequence))
        return missing

    async def _decode(self) -> None:
        """Steps until something ends, is to be streamed, or changes."""
        while self._ending[0][2] not in self._running:
            heappop(self._ending)
        interval = self._costs.stream_interval
        steps = 1 if self._new else min(self._ending[0][0], (self._steps // interval + 1) * interval) - self._steps
        step = self._costs.step(self._seated)
        began = anyio.current_time()
        with anyio.CancelScope(deadline=began + steps * step):
            await self._changed.wait()
            # The step in flight is finished with those who were there when it began.
            steps = min(steps, math.ceil((anyio.current_time() - began) / step - 1e-6))
            await anyio.sleep_until(began + steps * step)
        self._steps += steps
        self.busy_seconds += steps * step
        while self._ending and self._ending[0][0] <= self._steps:
            sequence = heappop(self._ending)[2]
            if sequence in self._running:
                self._stream(sequence)
                self._leave(sequence)
        for sequence in self._running if self._steps % interval == 0 else self._new:
            if sequence in self._running:
                self._stream(sequence)
        if steps:
            self._new.clear()

    def _stream(self, sequence: _Sequence) -> None:
        tokens = self._steps - sequence.first - sequence.emitted
        if not tokens:
            return
        sequence.emitted += tokens
        last = sequence.last if sequence.emitted == sequence.length else WORD
        sequence.emit(Chunk((WORD,) * (tokens - 1) + (last,), (0.0,) * tokens))

    def _leave(self, sequence: _Sequence) -> None:
        del self._running[sequence]
        self._seated -= not sequence.free
        written = self._steps - sequence.first
        self.tokens += written - (len(sequence.request.resume.tokens) if sequence.request else 0)
        if sequence.prefix is not None:
            sequence.prefix.written = max(sequence.prefix.written, written)
        sequence.ended.set()

    # The prefix cache. It remembers all that was ever read; engines forget, but hardly within a rollout.

    def _missing(self, sequence: _Sequence) -> int:
        """How many tokens the sequence starts from that no earlier request of its rollout read or wrote."""
        if sequence.request is None:
            return 0
        sequence.prefix, missing = self._look_up(sequence.request.rollout, sequence.request.context)
        return missing + max(0, sequence.emitted - sequence.prefix.written)

    def _look_up(self, rollout: str, context: Context | None) -> tuple[_Prefix, int]:
        if (rollout, context) in self._prefixes:
            return self._prefixes[rollout, context], 0
        prefix, missing = _Prefix(), 0
        if context is not None:
            before, missing = self._look_up(rollout, context.parent)
            tokens, sampled = context.segment.tokens, context.segment.sampled
            if tokens not in before.after:
                before.after[tokens] = prefix
                missing += max(0, len(tokens) - before.written) if sampled else len(tokens)
            prefix = before.after[tokens]
        self._prefixes[rollout, context] = prefix
        return prefix, missing


@asynccontextmanager
async def serving(server: SimulatedPolicyServer) -> AsyncIterator[SimulatedPolicyServer]:
    """The server works for the length of the block."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        yield server
        tasks.cancel_scope.cancel()
