"""A model on a vLLM server that is trained while it is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from obsspec.background import background
from obsspec.policies.http import NotFound, Server
from obsspec.policies.versions import newest
from obsspec.policies.vllm import VllmPolicy, find_model
from obsspec.types import Chunk, Finish, PolicyError, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FollowingPolicy:
    """Samples from the newest version of a LoRA adapter that a server has at the time. A ``types.Policy``.

    What is the newest, also where there are no versions, says `obsspec.policies.versions.newest`. A request keeps the
    version with which it began; a server that no longer has that one, or has been restarted without it, is asked what
    it has, and the request is made again, once.
    """

    def __init__(self, policy: VllmPolicy, name: str | None = None) -> None:
        """``name``: of the adapter, or of a model; where it is not given, see `newest`."""
        self._policy = policy
        self._name = name

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        name: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_context: int = 1,
        every: float = 3.0,
    ) -> AsyncIterator[FollowingPolicy]:
        """One that looks for new versions each ``every`` seconds until the block ends. See `VllmPolicy.connect`."""
        async with Server(url) as server:
            model = await find_model(server, name, versioned=True)
        connection = VllmPolicy.connect(url, model.name, tokenizer, max_context=max_context)
        async with connection as policy, background() as looks:
            following = cls(policy, name)
            looks.start_soon(following.follow, every)
            yield following

    @property
    def model(self) -> str:
        """What requests go to now."""
        return self._policy.model

    async def follow(self, every: float) -> None:
        """Looks for a new version each ``every`` seconds until it is cancelled. A server that gives no answer, or none
        that makes sense, is asked again the next time."""
        while True:
            with suppress(PolicyError, ValueError, LookupError, TypeError):
                await self.look()
            await anyio.sleep(every)

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        """See ``types.Policy``."""
        try:
            return await self._policy.generate(request, emit)
        except NotFound:  # Unloaded since the last look. A server says so before the first token.
            await self.look()
            return await self._policy.generate(request, emit)

    async def look(self) -> None:
        """Takes up the newest version that the server has now. Raises as `VllmPolicy.models` does."""
        self._policy.model = newest(self._name, await self._policy.models()) or self.model
