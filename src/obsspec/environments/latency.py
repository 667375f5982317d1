"""Delays around any environment, so that a local shell can stand for a remote sandbox.

Whatever reports a run with one of these must say so: every distribution has a ``description``.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import anyio

from obsspec.errors import InputError
from obsspec.types import Environment, Observation, OpenEnvironment, Task


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of delays in seconds, by its quantiles: the same one everywhere for a fixed delay."""

    quantiles: tuple[tuple[float, float], ...]
    """(probability, seconds) pairs in rising order, at least one."""
    description: str

    def sample(self, uniform: float) -> float:
        """The delay at ``uniform``, in [0, 1): logarithmic between the quantiles, constant beyond them."""
        place = bisect_right(self.quantiles, (uniform, math.inf))
        if place in (0, len(self.quantiles)):
            return self.quantiles[min(place, len(self.quantiles) - 1)][1]
        (low, shorter), (high, longer) = self.quantiles[place - 1 : place + 1]
        share = (uniform - low) / (high - low)
        if shorter <= 0:
            return shorter + share * (longer - shorter)
        return math.exp(math.log(shorter) + share * (math.log(longer) - math.log(shorter)))


def fixed(seconds: float) -> Latency:
    return Latency(((0.0, seconds),), f"{seconds:g} s a command")


def recorded(seconds: list[float], source: str) -> Latency:
    """Any of the delays that were recorded, each equally likely in the limit: their empirical quantiles."""
    ordered = sorted(seconds)
    last = max(1, len(ordered) - 1)
    return Latency(tuple((place / last, value) for place, value in enumerate(ordered)), f"recorded in {source}")


def parse_latency(text: str) -> Latency | None:
    """``0`` is none; ``0.3`` seconds for every command; ``FILE.json:NAME`` a table of quantiles or a recorded list.

    Such a file is a JSON object. What NAME leads to is a list of seconds, or an object with
    ``quantiles``: probability to seconds. NAME is looked up at the top and under ``tool_call``. Raises InputError.
    """
    try:
        seconds = float(text)
    except ValueError:
        file, _, name = text.rpartition(":")
        if not file:
            raise InputError(f"--latency {text}: give seconds, or FILE.json:NAME") from None
        return read_latency(file, name, "--latency ")
    if not 0 <= seconds < math.inf:
        raise InputError(f"--latency {text}: seconds must be 0 or more")
    return fixed(seconds) if seconds else None


def read_latency(file: str, name: str, option: str = "") -> Latency:
    """What ``name`` leads to in such a file. Raises InputError, whose message begins with ``option``."""
    try:
        content = json.loads(Path(file).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{option}{file}: {getattr(error, 'strerror', None) or 'not JSON'}") from None
    try:
        found: Any = content.get(name, content.get("tool_call", {}).get(name))
        if isinstance(found, list):
            latency = recorded([float(value) for value in found], f"{file}:{name}")
        else:
            pairs = sorted((float(probability), float(value)) for probability, value in found["quantiles"].items())
            latency = Latency(tuple(pairs), f"quantiles of {file}:{name}")
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        raise InputError(
            f"{option}{file}: {name!r} is neither a list of seconds nor an object with quantiles"
        ) from None
    if not latency.quantiles or any(not 0 <= value < math.inf for _, value in latency.quantiles):
        raise InputError(f"{option}{file}: {name!r} must hold seconds of 0 or more")
    if any(not 0 <= probability <= 1 for probability, _ in latency.quantiles):
        raise InputError(f"{option}{file}: {name!r} must have probabilities from 0 to 1")
    return latency


def with_latency(open_environment: OpenEnvironment, latency: Latency, seed: int = 0) -> OpenEnvironment:
    """The same environment with a delay before every command's observation.

    A delay is a function of the seed, the task and the command's place in its rollout, so runs that differ only in
    their speculation meet the same delays.
    """

    @asynccontextmanager
    async def open_delayed(task: Task) -> AsyncIterator[Environment]:
        async with open_environment(task) as environment:
            yield _Delayed(environment, latency, f"{seed}/{task.id}")

    return open_delayed


class _Delayed:
    def __init__(self, environment: Environment, latency: Latency, key: str) -> None:
        self._environment = environment
        self._latency = latency
        self._key = key
        self._commands = 0

    async def execute(self, command: str) -> Observation:
        delay = self._latency.sample(Random(f"{self._key}/{self._commands}").random())
        self._commands += 1
        observation = await self._environment.execute(command)
        await anyio.sleep(delay)
        return replace(observation, seconds=observation.seconds + delay)

    async def score(self) -> float:
        return await self._environment.score()
