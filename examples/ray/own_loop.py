"""Rollouts on a Ray cluster in a program of your own: `python examples/ray/own_loop.py`.

It runs as it is: the built-in policy on terminal tasks, in two actors of a cluster on this machine. Put your own
policy, predictor and environment into `open_worker`, and "auto" for "local" where `ray start` has made a cluster.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from obsspec import Failure, Settings, Speculator, Task, Trajectory, rollout
from obsspec.actors import connected, spread
from obsspec.chat import ChatFormat, TerminalChat
from obsspec.environments.sandbox import open_sandbox
from obsspec.models import BUILTIN_POLICY, DEFAULT_MODEL
from obsspec.policies.local import LocalPolicy
from obsspec.policies.networks import load_network
from obsspec.predictors import Cascade, Memory, Rules
from obsspec.tasks import parse_tasks

ACTORS = 2


@asynccontextmanager
async def open_worker() -> AsyncIterator[Callable[[Task, int], Awaitable[Trajectory]]]:
    """In each actor: what all its rollouts share, and what runs one of them."""
    network, tokenizer = load_network(DEFAULT_MODEL, BUILTIN_POLICY)
    predictor = Cascade({"rules": Rules(), "memory": Memory()})
    speculator = Speculator(LocalPolicy(network), TerminalChat(ChatFormat(tokenizer)), predictor, Settings(max_turns=8))

    async def run(task: Task, seed: int) -> Trajectory:
        return await rollout(speculator, task, open_sandbox, seed)

    yield run


def finished(result: Trajectory | Failure) -> None:
    """Called in this process, with each result as it comes."""
    if isinstance(result, Failure):
        print(result.task, result.seed, result.error)
    else:
        print(result.task, result.seed, result.reward, [turn.outcome for turn in result.turns])


if __name__ == "__main__":
    jobs = [(task, seed) for task in parse_tasks("generated:checksum,permissions/easy/0") for seed in range(2)]
    with connected("local", ACTORS):
        anyio.run(spread, open_worker, jobs, ACTORS, 1, finished)
