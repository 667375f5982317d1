"""One model on several vLLM servers.

Two rules. All requests of a rollout go to the same server, as long as that is there, for it has their prefix in its
cache. What can be reached serves: a server that is away, or not fit, is tried again and again, and holds up nobody.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from obsspec.background import background
from obsspec.errors import InputError
from obsspec.policies.following import FollowingPolicy
from obsspec.policies.http import Unreachable
from obsspec.types import Chunk, Finish, PolicyError, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_START_SECONDS = 20.0
"""For which a server that neither serves nor fails is waited for at the start."""


class Replicas:
    """Samples from those servers of a world model that are there. A ``types.Policy``.

    Each rollout has an order of its own of the servers, the same in every process, and goes to the first that is there.
    So those of a server that goes away spread over the others, all others stay, and they come back when it does. A
    server that fails a request is away until it has been connected to anew. Where the request has no tokens yet, it
    goes on to the next server; else it fails, to be resumed there. What a server refuses is raised as it is.
    """

    def __init__(self) -> None:
        self._servers: dict[str, FollowingPolicy | None] = {}
        """By URL, those that have been tried; None while they are away."""
        self._failures: dict[str, Exception] = {}
        """By URL, why it went away last."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        urls: Sequence[str],
        name: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_context: int = 1,
        every: float = 3.0,
    ) -> AsyncIterator[Replicas]:
        """One that holds those servers that it can until the block ends, and looks after each every ``every`` seconds.

        The block begins when each has been tried once, also where none is there. What is wrong with a server is logged;
        where all that are there are not fit, as `FollowingPolicy.connect` has it, that is raised.
        """
        replicas = cls()
        tried = {url: anyio.Event() for url in urls}
        async with background() as tasks:
            for url, event in tried.items():
                # It need not look for versions by itself: `_hold` looks, to see whether the server is there.
                connect = partial(
                    FollowingPolicy.connect, url, name, tokenizer, max_context=max_context, every=math.inf
                )
                tasks.start_soon(replicas._hold, url, connect, every, event)
            with anyio.move_on_after(_START_SECONDS):
                for event in tried.values():
                    await event.wait()
            replicas._check_fit()
            yield replicas

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        """See ``types.Policy``."""
        failure = PolicyError("no world model server is there")
        emitted = False

        def take(chunk: Chunk) -> None:
            nonlocal emitted
            emitted = True
            emit(chunk)

        for url in sorted(self._servers, key=lambda url: _weight(url, request.rollout)):
            policy = self._servers[url]
            if policy is not None:
                try:
                    return await policy.generate(request, take)
                except PolicyError as error:
                    if self._servers[url] is policy:
                        self._lose(url, error)
                    if emitted:
                        raise
                    failure = error
        raise failure

    async def _hold(
        self,
        url: str,
        connect: Callable[[], AbstractAsyncContextManager[FollowingPolicy]],
        every: float,
        tried: anyio.Event,
    ) -> None:
        """Keeps a connection to a server until it is cancelled."""
        while True:
            try:
                async with connect() as policy:
                    self._find(url, policy)
                    tried.set()
                    while self._servers[url] is policy:
                        await anyio.sleep(every)
                        try:
                            await policy.look()
                        except Exception as error:  # With the connection its requests end, also if it hangs.
                            self._lose(url, error)
            except Exception as error:  # Whatever it is, the others serve.
                self._lose(url, error)
                tried.set()
                await anyio.sleep(every)

    def _check_fit(self) -> None:
        unfit = [error for error in self._failures.values() if isinstance(error, InputError)]
        unfit = [error for error in unfit if not isinstance(error, Unreachable)]
        if unfit and not any(self._servers.values()):
            raise unfit[0]

    def _find(self, url: str, policy: FollowingPolicy) -> None:
        if url in self._servers:
            _log.warning("world model server %s is there now", url)
        self._servers[url] = policy

    def _lose(self, url: str, error: Exception) -> None:
        if self._servers.get(url, error) is not None:  # It is news.
            _log.warning("world model server %s is away, and tried again until it is there: %s", url, error)
        self._servers[url] = None
        self._failures[url] = error


def _weight(url: str, rollout: str) -> bytes:
    """Rendezvous hashing: of each rollout, every server draws a weight."""
    return hashlib.blake2b(f"{url} {rollout}".encode(), digest_size=8).digest()
