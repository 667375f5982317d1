"""A policy behind a vLLM server, from token ids to token ids.

Start it with ``--logprobs-mode processed_logprobs``, so that log-probabilities are those of the distribution sampled
from, and with ``--scheduling-policy priority`` where speculative requests are to wait for real ones.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

import anyio

from obsspec.budget import Seats
from obsspec.context import Context
from obsspec.errors import InputError
from obsspec.policies.http import Server, seed_of
from obsspec.policies.versions import newest
from obsspec.types import Chunk, Finish, PolicyError, Request, RunnerUp, Sampling, finish_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Served:
    """A model, or a LoRA adapter, that a server offers."""

    name: str
    """What requests call it."""
    weights: str
    """Where the server has them from: a directory on its machine, or a name at the model hub."""
    base: str
    """The same of the model that an adapter is for, and that has the tokenizer."""
    longest: float
    """Most tokens in a context, for an adapter those of its base; infinite where it is not said."""


async def find_model(server: Server, name: str | None = None, versioned: bool = False) -> Served:
    """What the server says of a model; of the first one where no ``name`` is given.

    ``versioned``: its newest version, as `newest` has it. Raises InputError where the server cannot be reached, is
    another kind of server, or does not have the model.
    """
    with server.starting():
        cards = {card["id"]: card for card in (await server.ask("GET", "/v1/models"))["data"]}
        name = (newest(name, [*cards]) if versioned else name or next(iter(cards), None)) or ""
        if name not in cards:
            raise InputError(f"server {server.url}: no model {name!r}; it serves {', '.join(sorted(cards))}")
        card = cards[name]
        if card.get("owned_by") == "sglang":
            raise InputError(f"server {server.url}: is SGLang; use obsspec.policies.sglang, in Python")
        weights, parent = card.get("root") or name, card.get("parent")
        of_base = cards.get(parent, {}) if parent else card
        longest = card.get("max_model_len") or of_base.get("max_model_len") or math.inf
        return Served(name, weights, of_base.get("root") or parent or weights, longest)


class VllmPolicy:
    """Samples from a vLLM server. A ``types.Policy``.

    The seed of a request is a function of the rollout's seed, the turn and how many tokens it resumes from. So the
    same request gives the same tokens, but for numerics that depend on what else the server runs; a generation that
    was suspended goes on with other draws of the same distribution.
    """

    def __init__(self, server: Server, model: str, priority: bool = True) -> None:
        """``priority``: whether requests have theirs. Without priority scheduling servers ignore it, or refuse them."""
        self.model = model
        """The name that requests go to: a model's or a LoRA adapter's. May be set at any time, for later requests."""
        self.weight_version = 0
        """What the tokens of later requests are said to be sampled by: to be set by whoever changes the weights. vLLM
        itself tells only when a generation is over, too late for one that is suspended."""
        self.processed_logprobs = True
        """False where log-probabilities are known to be those of temperature 1 and the whole vocabulary."""
        self._server = server
        self._priority = priority

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        model: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_context: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[VllmPolicy]:
        """A policy on a server that was seen to work, and whose connections are closed when the block ends.

        ``model``: the first that is served, by default. ``tokenizer``: compared with the server's. ``max_context``:
        the most tokens that contexts will have. ``headers``: sent with every request. Raises InputError where the
        server cannot be reached, lacks the model, cuts contexts shorter, has another tokenizer, or sends no token ids.
        """
        async with Server(url, headers) as server:
            served = await find_model(server, model)
            if served.longest < max_context:
                raise InputError(
                    f"server {server.url}: {served.name} is served with contexts of {served.longest} tokens, "
                    f"not {max_context}; start it with --max-model-len {max_context}, or lower max_context"
                )
            policy = cls(server, served.name)
            with server.starting():
                if tokenizer is not None:
                    await server.check_tokenizer(tokenizer, policy.model)
                await policy._try(len(tokenizer) - 1 if tokenizer is not None else 0)
            yield policy

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        """See ``types.Policy``. Raises ValueError for what the server refuses, such as a context that is too long."""
        if finish := finish_of(request.resume.tokens, request.stop, request.max_tokens):
            return finish
        self.check(request.sampling)
        sampled = len(request.resume.tokens)
        model, version = self.model, self.weight_version
        reason: str | None = None

        def take(event: Any) -> None:
            nonlocal sampled, reason
            for choice in event["choices"]:
                tokens = choice.get("token_ids")
                if tokens is None:
                    raise InputError(f"server {self._server.url}: sends no token ids; use vLLM 0.10.2 or newer")
                if tokens:
                    sampled += len(tokens)
                    logprobs = choice["logprobs"]
                    second = _runners_up(tokens, logprobs["top_logprobs"]) if request.wants_runners_up else ()
                    # An adapter stays with the requests that began with it; all weights change under them.
                    by = self.weight_version if self.model == model else version
                    emit(Chunk(tuple(tokens), tuple(logprobs["token_logprobs"]), by, second))
                reason = choice["finish_reason"]

        # The rollout's name may hold anything, headers may not.
        headers = {"X-Session-ID": quote(request.rollout), "X-Request-Id": uuid4().hex}
        await self._server.stream("/v1/completions", self._body(request), headers, take)
        return self._server.ended(request, sampled, reason)

    def check(self, sampling: Sampling) -> None:
        """Raises InputError where the server's log-probabilities would be of another distribution than its tokens."""
        if not self.processed_logprobs and (sampling.temperature not in (0, 1) or sampling.top_p < 1):
            raise InputError(
                f"server {self._server.url}: its log-probabilities are not those of temperature "
                f"{sampling.temperature} and top_p {sampling.top_p}; start it with --logprobs-mode processed_logprobs"
            )

    async def models(self) -> list[str]:
        """The names of all models and LoRA adapters that the server has now, models first."""
        return [card["id"] for card in (await self._server.ask("GET", "/v1/models"))["data"]]

    async def report(self, seats: Seats, every: float = 1.0) -> None:
        """Tells ``seats`` of everybody's requests, each ``every`` seconds until it is cancelled.

        For servers that other processes use as well. While the server cannot be asked, what it said last holds.
        """
        while True:
            with suppress(PolicyError, ValueError):
                running, waiting = await self._server.metrics("vllm:num_requests_running", "vllm:num_requests_waiting")
                seats.report(int(running), int(waiting))
            await anyio.sleep(every)

    def _body(self, request: Request) -> dict[str, Any]:
        resumed = request.resume.tokens
        body = {
            "model": self.model,
            "prompt": [*request.context.tokens, *resumed],
            "max_tokens": request.max_tokens - len(resumed),
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": seed_of(request.seed, request.turn, len(resumed)),
            "stop_token_ids": request.stop,
            # These tokens alone end it, and nothing else bends the distribution: a model's generation_config.json
            # would otherwise add to both.
            "ignore_eos": True,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # in the log-probabilities, whose text nobody reads
            "logprobs": 2 if request.wants_runners_up else 0,  # of the chosen token only
        }
        return body | ({"priority": request.priority} if self._priority else {})

    async def _try(self, token: int) -> None:
        """Samples one token after ``token`` from a nucleus of one: whatever it is, its log-probability there is 0."""
        chunks: list[Chunk] = []
        asked = Request(Context.of((token,)), Sampling(top_p=1e-6), 1, (), seed=0, turn=0, priority=1)
        try:
            await self.generate(asked, chunks.append)
        except ValueError:
            self._priority = False  # If that is not what it refused, it refuses the next one as well.
            await self.generate(asked, chunks.append)
        self.processed_logprobs = chunks[0].logprobs[0] > -1e-6


def _runners_up(tokens: Sequence[int], likeliest: Sequence[Mapping[str, float]]) -> tuple[RunnerUp, ...]:
    """``likeliest``: at each place some of the likeliest tokens, as ``token_id:17``, the chosen one among them."""
    return tuple(
        max(
            ((int(name.partition(":")[2]), logprob) for name, logprob in each.items() if name != f"token_id:{token}"),
            key=lambda pair: pair[1],
        )
        for token, each in zip(tokens, likeliest, strict=True)
    )
