"""A policy in this process: any causal language model, one sequence at a time for each worker thread.

Two properties make speculation on it exact. **Randomness is a function** of (seed, turn, position): a generation does
not depend on what ran before or beside it, and goes on after a suspension as if nothing had happened. **So are the
numerics:** the result of a matrix product may depend, in its last bits, on how many rows it has, so the pieces in
which a context is read are a function of the context alone (``pieces``), whatever part of it was remembered.

What was read is remembered (keys and values), so that a request only reads what is new. Prefixes are found by their
content, not by rollout: the branches of a rollout share them, and so do the rollouts of one task.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import anyio
import numpy as np
import torch

from obsspec.types import Chunk, Finish, Request, RunnerUp, Sampling, finish_of

if TYPE_CHECKING:
    from obsspec.context import Context, Tokens
    from obsspec.policies.networks import Memory, Network

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_PIECE = 64
"""Most tokens read at once. Reading one piece is also the longest that a cancellation has to wait for."""


class LocalPolicy:
    """Samples from a network. A ``types.Policy``.

    ``workers`` generations run at a time, each on one thread: that is its number of seats. When more are asked for,
    the most urgent ones run (lowest priority value, then first come), and a more urgent request that arrives takes a
    seat over at the next token. What past requests read is remembered up to ``cache_bytes``, least recently used first
    out; the memories of requests in flight come on top.
    """

    def __init__(self, network: Network, workers: int = 1, cache_bytes: int = 1 << 30) -> None:
        self._network = network
        self._version = 0
        self._seats = _Seats(workers)
        self._cache_bytes = cache_bytes
        self._prefixes = _Prefixes(cache_bytes)
        self._arrivals = count()

    def replace(self, network: Network, version: int = 0) -> None:
        """Later requests are sampled from ``network``, those under way from the one with which they began.

        ``version``: what their tokens are said to be sampled by.
        """
        self._network, self._version = network, version
        self._prefixes = _Prefixes(self._cache_bytes)  # What the other one remembers means nothing to it.

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        """See ``types.Policy``. Raises ValueError for an empty context."""
        if not request.context.length:
            raise ValueError("the context is empty: there is nothing to continue")
        sampled = list(request.resume.tokens)
        finish = finish_of(sampled, request.stop, request.max_tokens)
        if finish is not None:
            return finish
        network, version, prefixes = self._network, self._version, self._prefixes
        unread = pieces(request.context) + [(token,) for token in sampled]
        with self._seats.seat((request.priority, next(self._arrivals))) as seat:
            # The last piece is read in any case, for what follows it.
            known, past = prefixes.find(unread[:-1])
            prefix = await seat.run(past.fork, known) if past else _Prefix([], network.memory())
            with prefixes.kept(prefix):
                for piece in unread[known:-1]:
                    await seat.run(prefix.read, piece, network)
                piece = unread[-1]
                while finish is None:
                    uniform = _uniform(request.seed, request.turn, len(sampled))
                    chunk = await seat.run(_next, prefix, piece, network, version, request, uniform)
                    emit(chunk)
                    sampled += chunk.tokens
                    piece = chunk.tokens
                    finish = finish_of(sampled, request.stop, request.max_tokens)
        return finish


def _next(prefix: _Prefix, piece: Tokens, network: Network, version: int, request: Request, uniform: float) -> Chunk:
    logits = prefix.read(piece, network)
    token, logprob = draw(logits, request.sampling, uniform)
    runners_up = (runner_up(logits, token),) if request.wants_runners_up else ()
    return Chunk((token,), (logprob,), version, runners_up)


def pieces(context: Context) -> list[Tokens]:
    """How a context is read: given tokens up to ``_PIECE`` at a time from the start of their segment, sampled ones
    singly, as they were when they were sampled."""
    parts: list[Tokens] = []
    for segment in context.segments():
        size = 1 if segment.sampled else _PIECE
        parts += (segment.tokens[start : start + size] for start in range(0, len(segment.tokens), size))
    return parts


def draw(logits: torch.Tensor, sampling: Sampling, uniform: float) -> tuple[int, float]:
    """The token at ``uniform``, in [0, 1), of the sampling distribution, and its log-probability under it.

    Temperature divides the logits; then top-p keeps the smallest set of most likely tokens whose probabilities sum to
    at least ``top_p`` (Holtzman et al. 2020). At temperature 0 it is the most likely token, with its log-probability
    at temperature 1.
    """
    logits = logits.double()
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(0)[token])
    # From the highest down: divided by next to nothing, the others would all be infinite.
    logprobs = ((logits - logits.max()) / sampling.temperature).log_softmax(0)
    if sampling.top_p < 1:
        probabilities = logprobs.exp()
        # Tokens below this floor have less than 1 - top_p together, so none is in the set: most need not be sorted.
        candidates = (probabilities > (1 - sampling.top_p) / len(logits)).nonzero()[:, 0]
        ordered, order = probabilities[candidates].sort(descending=True, stable=True)
        chosen = candidates[order[ordered.cumsum(0) - ordered < sampling.top_p]]
        nucleus = torch.full_like(logprobs, -torch.inf)
        nucleus[chosen] = logprobs[chosen]
        logprobs = nucleus.log_softmax(0)
    cumulative = logprobs.exp().cumsum(0)
    token = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return token, float(logprobs[token])


def runner_up(logits: torch.Tensor, token: int) -> RunnerUp:
    """The likeliest token but for ``token``, and its log-probability at temperature 1."""
    logprobs = logits.double().log_softmax(0)
    logprobs[token] = -torch.inf
    second = int(logprobs.argmax())
    return second, float(logprobs[second])


def _uniform(seed: int, turn: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments (Philox 4x64, Salmon et al. 2011: no state, no order)."""
    bits = np.random.Philox(key=seed % 2**128, counter=[0, position, turn, 0]).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


class _Prefix:
    """Pieces that were read, and the memory of exactly these."""

    def __init__(self, read: list[Tokens], memory: Memory) -> None:
        self.pieces = read
        self.memory = memory

    def read(self, piece: Tokens, network: Network) -> torch.Tensor:
        logits = network.read(piece, self.memory)
        self.pieces.append(piece)
        return logits

    def shared(self, wanted: Sequence[Tokens]) -> int:
        """How many of the first ``wanted`` pieces a fork can start with."""
        pairs = zip(self.pieces, wanted, strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return count if self.memory.croppable or count == len(self.pieces) else 0

    def fork(self, count: int) -> _Prefix:
        kept = self.pieces[:count]
        return _Prefix(kept, self.memory.fork(sum(map(len, kept))))


class _Prefixes:
    """What past requests read, least recently used first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prefixes: list[_Prefix] = []

    def find(self, wanted: Sequence[Tokens]) -> tuple[int, _Prefix | None]:
        """How many of the first ``wanted`` pieces are known, and the prefix that knows them."""
        known, best = max(
            ((prefix.shared(wanted), prefix) for prefix in self._prefixes),
            key=lambda found: found[0],
            default=(0, None),
        )
        if best is None or not known:
            return 0, None
        self._prefixes.remove(best)
        self._prefixes.append(best)
        return known, best

    @contextmanager
    def kept(self, prefix: _Prefix) -> Iterator[None]:
        """Keep ``prefix`` as it is when the block ends or is cancelled, but not if a read failed half-way."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._keep(prefix)
            raise
        self._keep(prefix)

    def _keep(self, prefix: _Prefix) -> None:
        if prefix.memory.croppable:  # then it stands in for its own beginnings
            self._prefixes = [old for old in self._prefixes if old.pieces != prefix.pieces[: len(old.pieces)]]
        self._prefixes.append(prefix)
        while sum(old.memory.bytes for old in self._prefixes) > self._limit:
            del self._prefixes[0]


Rank = tuple[int, int]
"""Priority and order of arrival; the smallest goes first."""


class _Seats:
    """So many generations at a time, the most urgent ones."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._waiting: list[tuple[Rank, anyio.Event]] = []

    @contextmanager
    def seat(self, rank: Rank) -> Iterator[_Seat]:
        seat = _Seat(self, rank)
        try:
            yield seat
        finally:
            seat.leave()

    async def take(self, rank: Rank) -> None:
        if self._free:  # then nobody waits
            self._free -= 1
            return
        waiter = (rank, anyio.Event())
        heapq.heappush(self._waiting, waiter)
        try:
            await waiter[1].wait()
        except BaseException:
            if waiter[1].is_set():  # cancelled just after the seat was handed over
                self.give_back()
            else:
                self._waiting.remove(waiter)
                heapq.heapify(self._waiting)
            raise

    def give_back(self) -> None:
        if self._waiting:
            heapq.heappop(self._waiting)[1].set()
        else:
            self._free += 1

    def wanted_before(self, rank: Rank) -> bool:
        return bool(self._waiting) and self._waiting[0][0] < rank


class _Seat:
    """One generation's right to run steps in a thread; taken at its first step, lent to more urgent ones between."""

    def __init__(self, seats: _Seats, rank: Rank) -> None:
        self._seats = seats
        self._rank = rank
        self._held = False
        self._thread = anyio.CapacityLimiter(1)

    async def run(self, step: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Run ``step`` in a thread. A cancellation waits until the thread has ended, and then always shows."""
        if self._held and self._seats.wanted_before(self._rank):
            self.leave()
        if not self._held:
            await self._seats.take(self._rank)
            self._held = True
        result = await anyio.to_thread.run_sync(_single_threaded, step, arguments, limiter=self._thread)
        await anyio.lowlevel.checkpoint_if_cancelled()
        return result

    def leave(self) -> None:
        if self._held:
            self._held = False
            self._seats.give_back()


def _single_threaded(step: Callable[[*Arguments], Result], arguments: tuple[*Arguments]) -> Result:
    """Two busy threads of one model each are fast; a model that spreads over both is ten times slower."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        return step(*arguments)
