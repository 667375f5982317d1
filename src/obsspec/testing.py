"""Scripted stand-ins for a policy, a chat format and an environment, for tests of code that runs rollouts.

Each is a pure function of what it is given, so two runs of the same rollout agree token for token. Time passes only
by `anyio.sleep`, so under trio's mock clock it costs nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import anyio

from obsspec.context import Tokens
from obsspec.types import Action, Chunk, Done, Finish, Generation, Malformed, Observation, Request, Step, Task

STOP = 0
"""The token that ends a scripted generation; any other token is 1 + a byte of UTF-8."""


def encode(text: str) -> Tokens:
    return tuple(1 + byte for byte in text.encode())


def decode(tokens: Tokens) -> str:
    return bytes(token - 1 for token in tokens if token != STOP).decode(errors="replace")


class ScriptedChat:
    """One token a byte. A generation is ``done``, ``?...`` (malformed), or a command; one cut short is malformed."""

    stop: Tokens = (STOP,)

    def start(self, instruction: str) -> Tokens:
        return encode(instruction + "\n")

    def parse(self, generation: Generation) -> Step:
        text = decode(generation.tokens)
        if generation.finish == "length" or text.startswith("?"):
            return Malformed("malformed")
        return Done() if text == "done" else Action(text)

    def observe(self, generation: Generation, text: str) -> Tokens:
        return encode(f"\n{text}\n")


class ScriptedPolicy:
    """Writes what ``script`` says, one token after another.

    ``script(tokens, seed)`` gives the text of the generation that continues a context of those tokens.
    ``seconds`` is the time that a token takes, or a function of (context tokens, position) that says so.
    """

    def __init__(
        self, script: Callable[[Tokens, int], str], seconds: float | Callable[[Tokens, int], float] = 0.1
    ) -> None:
        self._script = script
        self._seconds = seconds
        self.running = 0
        """Requests in progress."""

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        context = request.context.tokens
        text = (*encode(self._script(context, request.seed)), STOP)
        self.running += 1
        try:
            for position in range(len(request.resume.tokens), min(len(text), request.max_tokens)):
                seconds = self._seconds(context, position) if callable(self._seconds) else self._seconds
                await anyio.sleep(seconds)
                logprob = -Random(f"{context}{request.seed}{position}").random()
                emit(Chunk((text[position],), (logprob,)))
        finally:
            self.running -= 1
        return "stop" if len(text) <= request.max_tokens else "length"


class ScriptedEnvironment:
    """Prints what ``script(commands)`` says: the observation of the last of ``commands``, all executed so far."""

    def __init__(self, script: Callable[[tuple[str, ...]], Observation], reward: float = 1.0) -> None:
        self._script = script
        self._reward = reward
        self.executed: tuple[str, ...] = ()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[ScriptedEnvironment]:
        """Usable as OpenEnvironment, for one rollout."""
        yield self

    async def execute(self, command: str) -> Observation:
        self.executed += (command,)
        observation = self._script(self.executed)
        await anyio.sleep(observation.seconds)
        return observation

    async def score(self) -> float:
        return self._reward
