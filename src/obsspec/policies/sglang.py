"""A policy behind an SGLang server, from token ids to token ids.

Start it with ``--incremental-streaming-output``, or every event repeats the whole generation so far; with
``--enable-priority-scheduling`` where speculative requests are to wait for real ones; and with
``--enable-deterministic-inference``, without which it takes no notice of seeds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio

from obsspec.context import Context
from obsspec.policies.http import Server, seed_of
from obsspec.types import Chunk, Finish, PolicyError, Request, RunnerUp, Sampling, finish_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ABORT_SECONDS = 2.0


class SglangPolicy:
    """Samples from an SGLang server. A ``types.Policy``.

    The seed of a request is a function of the rollout's seed and the turn; the server mixes each token's position into
    it, so a generation that was suspended goes on as if nothing had happened. The model's own end-of-sequence tokens
    end a generation, too: SGLang cannot ignore them and heed ``stop``. Log-probabilities have the temperature in them,
    but not ``top_p``.
    """

    def __init__(self, server: Server, adapter: str | None = None, priority: bool = False) -> None:
        """``priority``: whether the server runs priority scheduling."""
        self.adapter = adapter
        """The name of a loaded LoRA adapter, or None for the model. May be set at any time, for later requests."""
        self._server = server
        self._priority = priority

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        adapter: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        priority: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[SglangPolicy]:
        """A policy on a server that was seen to work, and whose connections are closed when the block ends.

        ``tokenizer``: compared with the server's. ``headers``: sent with every request. Raises InputError where the
        server cannot be reached, has another tokenizer, or refuses a request for one token.
        """
        async with Server(url, headers) as server:
            policy = cls(server, adapter, priority)
            with server.starting():
                if tokenizer is not None:
                    await server.check_tokenizer(tokenizer)
                asked = Request(Context.of((0,)), Sampling(), 1, (), seed=0, turn=0, priority=1)
                await policy.generate(asked, lambda chunk: None)
            yield policy

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        """See ``types.Policy``. Raises ValueError for what the server refuses, such as a context that is too long."""
        if finish := finish_of(request.resume.tokens, request.stop, request.max_tokens):
            return finish
        resumed = len(request.resume.tokens)
        sampled = 0
        reason: str | None = None

        def take(event: Any) -> None:
            nonlocal sampled, reason
            meta = event["meta_info"]
            new = meta["completion_tokens"] - sampled
            if new > 0:  # They come last, whether or not the event repeats the earlier ones.
                sampled += new
                logprobs, tokens, *_ = zip(*meta["output_token_logprobs"][-new:], strict=True)
                second = _runners_up(tokens, meta["output_top_logprobs"][-new:]) if request.wants_runners_up else ()
                emit(Chunk(tokens, logprobs, _version(meta.get("weight_version")), second))
            if end := meta["finish_reason"]:
                reason = end["type"]
                if reason == "abort" and 400 <= (end.get("status_code") or 0) < 500:
                    raise ValueError(f"server {self._server.url}: {end['message']}")

        # The server aborts whatever id begins with the one to abort, so all have the same length.
        rid = uuid4().hex
        try:
            await self._server.stream("/generate", self._body(request, rid), {}, take)
        except BaseException:
            # A closed connection would be noticed, too, but only after seconds.
            with anyio.move_on_after(_ABORT_SECONDS, shield=True), suppress(PolicyError, ValueError):
                await self._server.ask("POST", "/abort_request", {"rid": rid})
            raise
        return self._server.ended(request, resumed + sampled, reason)

    def _body(self, request: Request, rid: str) -> dict[str, Any]:
        resumed = request.resume.tokens
        body = {
            "rid": rid,
            "session_id": request.rollout or None,
            "input_ids": [*request.context.tokens, *resumed],
            "sampling_params": {
                "max_new_tokens": request.max_tokens - len(resumed),
                "temperature": request.sampling.temperature,
                "top_p": request.sampling.top_p,
                "sampling_seed": seed_of(request.seed, request.turn),
                "stop_token_ids": request.stop,
            },
            "return_logprob": True,
            "top_logprobs_num": 2 if request.wants_runners_up else 0,
            "stream": True,
            "lora_path": self.adapter,
        }
        # Higher is sooner here.
        return body | ({"priority": -request.priority} if self._priority else {})


def _runners_up(tokens: Sequence[int], likeliest: Sequence[Sequence[Any]]) -> tuple[RunnerUp, ...]:
    """``likeliest``: at each place the likeliest tokens, each its log-probability, its id and its text."""
    return tuple(
        next((other, logprob) for logprob, other, *_ in each if other != token)
        for token, each in zip(tokens, likeliest, strict=True)
    )


def _version(name: str | None) -> int:
    """Of the weights; 0 where their name is no number."""
    return int(name) if name is not None and name.isdecimal() else 0
