"""A language model as a predictor: it continues the rollout as a shell would.

The probability of a draft is the product of its tokens' probabilities, which is the model's own estimate that exactly
this text follows. So the policy it runs on must report, for greedy generation too, the log-probability of each token
under the model's softmax at temperature 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import anyio

from obsspec.chat import WorldModelChat
from obsspec.context import Context, Tokens
from obsspec.errors import InputError
from obsspec.predictors.prefixes import Prefixes
from obsspec.predictors.trials import on_trial
from obsspec.types import (
    Chunk,
    Draft,
    Exchange,
    Finish,
    Generation,
    Observation,
    Policy,
    Query,
    Request,
    RunnerUp,
    Sampling,
)

_NAME = "language_model"

_DRAFTING, _READING = 1000, 1001
"""Priorities of requests. On a server that the policy uses as well they come behind all of its own, whose priorities
count observations. What is wanted now goes before what will be wanted soon."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a world model reads and writes. Training and prediction must use the same."""

    context_tokens: int = 4096
    """Most tokens of prompt and draft together."""
    draft_tokens: int = 512
    """Longer drafts are abandoned, and longer commands are not predicted."""
    observation_characters: int = 2000
    """Of a longer observation in the history, the model reads only the first and the last half of this many."""

    def __post_init__(self) -> None:
        if not 1 <= self.draft_tokens <= self.context_tokens // 4:
            raise InputError(
                f"world model: draft_tokens ({self.draft_tokens}) must be at least 1 and at most a quarter of "
                f"context_tokens ({self.context_tokens})"
            )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A history as the world model reads it."""

    opening: Tokens
    exchanges: tuple[Tokens, ...]
    """The tokens of each exchange that is still in the prompt, oldest first."""
    context: Context


class Prompts:
    """What a world model reads, in training as in use.

    A prompt only grows with its rollout, so that a prefix cache stays warm, until it would be longer than the limits
    allow. Then it starts again from the instruction and the latest exchanges, as many as fit in half of its room.
    """

    def __init__(self, chat: WorldModelChat, limits: Limits) -> None:
        self._chat = chat
        self._limits = limits
        self._prompts: Prefixes[_Prompt] = Prefixes(self._start, self._then)

    def before(self, query: Query) -> Context:
        """The prompt up to where the command begins."""
        return self._prompts.after(query).context

    def of(self, query: Query) -> Context | None:
        """The prompt that the answer to ``query`` follows; None where command or instruction are too long for it."""
        command = self._chat.ask(query.command)
        context = self.before(query).given(command)
        fits = context.length + self._limits.draft_tokens <= self._limits.context_tokens
        return context if fits and len(command) <= self._limits.draft_tokens else None

    def _start(self, instruction: str) -> _Prompt:
        opening = self._chat.start(instruction)
        return _Prompt(opening, (), Context.of(opening))

    def _then(self, prompt: _Prompt, exchange: Exchange) -> _Prompt:
        observation = abridge(exchange.observation, self._limits.observation_characters)
        tokens = self._chat.ask(exchange.command) + self._chat.answer(observation)
        exchanges = (*prompt.exchanges, tokens)
        room = self._limits.context_tokens - 2 * self._limits.draft_tokens
        if prompt.context.length + len(tokens) <= room:
            return _Prompt(prompt.opening, exchanges, prompt.context.given(tokens))
        kept = _latest(exchanges, room // 2 - len(prompt.opening))
        context = Context.of(prompt.opening)
        for each in kept:
            context = context.given(each)
        return _Prompt(prompt.opening, kept, context)


class Least(Protocol):
    """The least probability that ``predictor``, a name, has to state of a draft for ``command`` to get it a branch.
    `ExpectedValue.least` is one."""

    def __call__(self, predictor: str, command: str) -> float: ...


@dataclass(slots=True)
class _Writing:
    """What has been written of a draft."""

    tokens: Tokens = ()
    logprobs: tuple[float, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    """One for each of the tokens, where the policy says them."""

    @property
    def logprob(self) -> float:
        return min(0.0, sum(self.logprobs))

    def alternative(self) -> Generation | None:
        """Where another draft begins: with these tokens up to some place and the runner-up there, where that is
        likeliest."""
        before = accumulate(self.logprobs, initial=0.0)
        likely = [so_far + logprob for so_far, (_, logprob) in zip(before, self.runners_up, strict=False)]
        if not likely:
            return None
        place = likely.index(max(likely))
        token, logprob = self.runners_up[place]
        return Generation((*self.tokens[:place], token), (*self.logprobs[:place], logprob), (0,) * (place + 1))


class LanguageModel:
    """A ``types.Predictor`` that proposes the greedy continuation, if it is short and likely enough.

    With two ``drafts`` or more it then proposes another one, and no third, where the policy says which tokens were
    second likeliest: greedy again, from where replacing a token by its runner-up is likeliest.

    A draft is given up as soon as its probability falls below ``floor``, since it can only fall further; or below
    ``least``, where that is more, but for one query in twenty, by which is learned how often such drafts come true.
    ``learn`` does nothing: the model is trained elsewhere, on ``Prompts`` of the same limits.
    """

    def __init__(
        self,
        policy: Policy,
        chat: WorldModelChat,
        limits: Limits = Limits(),
        floor: float = 0.1,
        least: Least | None = None,
        drafts: int = 1,
    ) -> None:
        self._policy = policy
        self._chat = chat
        self._prompts = Prompts(chat, limits)
        self._sampling = Sampling(temperature=0.0, max_tokens=limits.draft_tokens)
        self._floor = floor
        self._least = least
        self._drafts = drafts

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        context = self._prompts.of(query)
        if context is None:
            return
        request = replace(
            self._request(query, context, self._sampling.max_tokens, _DRAFTING), runners_up=self._drafts > 1
        )
        least = self._least_logprob(query)
        first = await self._write(request, least, propose)
        other = first.alternative()
        if other is not None and sum(other.logprobs) >= least:
            await self._write(replace(request, resume=other, runners_up=False), least, propose)

    async def _write(self, request: Request, least: float, propose: Callable[[Draft], None]) -> _Writing:
        """Proposes what it has written if that is whole and no less likely than ``least``, a log-probability."""
        written = _Writing(request.resume.tokens, request.resume.logprobs)
        finish: Finish | None = None
        with anyio.CancelScope() as likely_enough:

            def emit(chunk: Chunk) -> None:
                written.tokens += chunk.tokens
                written.logprobs += chunk.logprobs
                written.runners_up += chunk.runners_up
                if written.logprob < least:
                    likely_enough.cancel()

            finish = await self._policy.generate(request, emit)
        if finish == "stop" and written.logprob >= least:
            propose(Draft(self._chat.text(written.tokens), math.exp(written.logprob), _NAME))
        return written

    def _least_logprob(self, query: Query) -> float:
        least = self._floor
        if self._least is not None and not on_trial(f"unlikely {_NAME}", query):
            least = max(least, self._least(_NAME, query.command))
        return math.log(least) if least > 0 else -math.inf

    async def prepare(self, query: Query) -> None:
        """Has the history read, so that what is left to read is the command."""
        # A policy that generates has read its context; the one token is for nothing.
        request = self._request(query, self._prompts.before(query), 1, _READING)
        await self._policy.generate(request, lambda chunk: None)

    def _request(self, query: Query, context: Context, max_tokens: int, priority: int) -> Request:
        return Request(
            context=context,
            sampling=self._sampling,
            max_tokens=max_tokens,
            stop=self._chat.stop,
            seed=0,
            turn=len(query.history),
            priority=priority,
            # Of several servers the same one gets what has the same name. All rollouts with the same instruction share
            # it, for their prompts begin alike, and many of them ask the very same: what one had read, all have.
            rollout=f"world model {hashlib.blake2b(query.instruction.encode(), digest_size=8).hexdigest()}",
        )

    def learn(self, query: Query, observation: Observation) -> None:
        """Nothing."""


def abridge(text: str, characters: int) -> str:
    """``text``, or where it is longer than ``characters``, its first and last half as many and how many are between."""
    half = characters // 2
    if len(text) <= characters:
        return text
    return f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"


def _latest(exchanges: Sequence[Tokens], room: int) -> tuple[Tokens, ...]:
    """As many of the last exchanges as have at most ``room`` tokens together."""
    first = len(exchanges)
    while first and (room := room - len(exchanges[first - 1])) >= 0:
        first -= 1
    return tuple(exchanges[first:])
