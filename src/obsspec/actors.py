"""Rollouts on a Ray cluster: actors run them; this process hands the jobs out and takes in what comes back.

A job, a task and a seed, goes to an actor that has room: rollouts of one task to the same one where that can be, for
they learn from each other there. The jobs of an actor that dies go to whichever has room, and another actor is started
in its place. So every job has one result, whatever dies but this process; and of that there is the directory of a run
(`obsspec.reports.records`), to go on with.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, TypeVar

import anyio
import ray
from ray.exceptions import AuthenticationError, RayActorError, RayTaskError

from obsspec.background import raising_alone
from obsspec.errors import InputError, host_and_port
from obsspec.rollout import Failure
from obsspec.types import Task

Result = TypeVar("Result")
Job = tuple[Task, int]
"""A task and a seed."""

OpenWorker = Callable[[], AbstractAsyncContextManager[Callable[[Task, int], Awaitable[Result]]]]
"""Opens in an actor what its rollouts share, such as models, and gives what runs a task with a seed."""

_DEATHS = 3
"""So often may an actor die without a result in between, or a job be lost with its actor."""
_ACTORS_PER_CORE = 8
"""On a cluster of this machine alone: each is a process that loads what it needs."""
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 20.0
"""For Ray to say that it is there, which takes it 2 s. It gives up after 40."""
_START_SECONDS = 300.0
"""For an actor to be placed, and to load its models."""
_END_SECONDS = 30.0
_AGAIN_SECONDS = 1.0


@contextmanager
def connected(address: str, actors: int) -> Iterator[None]:
    """To a Ray cluster: ``local`` is one on this machine for the block, with room for so many actors; ``auto`` the one
    that this machine is part of; anything else the address of one. Raises InputError where there is none."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        cores = os.cpu_count() or 1
        if actors > _ACTORS_PER_CORE * cores:
            raise InputError(
                f"--ray local: {actors} actors are too many for the {cores} cores of this machine; give at most "
                f"--actors {_ACTORS_PER_CORE * cores}, with more of --concurrency"
            )
        options |= {"num_cpus": max(actors, cores), "include_dashboard": False}
    else:
        if address != "auto":
            _check_listening(address)
        _check_answers(address)
    on_termination = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError, AuthenticationError) as error:
        raise _nowhere(address, str(error)) from None
    if threading.current_thread() is threading.main_thread():
        # Ray has put its own in place, which prints stacks and ends the process without cleaning up.
        signal.signal(signal.SIGTERM, on_termination)
    try:
        yield
    finally:
        ray.shutdown()


def _nowhere(address: str, reason: str) -> InputError:
    what, _, _ = " ".join(reason.split()).partition(" Please specify")  # An option of Ray's own.
    return InputError(
        f"--ray {address}: {what[:200].rstrip('.')}; start a cluster with `ray start --head`, or give local"
    )


def _check_listening(address: str) -> None:
    """Raises InputError where nothing does, or what is given is no address."""
    if address.startswith("ray://"):
        raise InputError(f"--ray {address}: run this on a machine of the cluster, with auto")
    try:
        host, port = host_and_port(address)
    except ValueError:
        raise _nowhere(address, "is not local, auto or HOST:PORT") from None
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # The latter for a name that can be none.
        raise _nowhere(address, getattr(error, "strerror", None) or str(error)) from None


def _check_answers(address: str) -> None:
    """Raises InputError where no Ray cluster answers. Ray itself tries for minutes, and ends the process then."""
    # This is `ray status`, which finds what `auto` is as `ray.init` does. It waits for whatever else listens there,
    # such as Ray's own dashboard.
    ask = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    if address != "auto":
        ask += ["--address", address]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise _nowhere(address, "what is there does not answer as a Ray cluster does") from None
    if "AuthenticationError" in answer.stderr:
        if address == "auto" and "RAY_ADDRESS" not in os.environ:
            return  # It is there. To one that Ray has found by itself `ray.init` gives the token.
        raise InputError(
            f"--ray {address}: the cluster asks for a token; set RAY_AUTH_MODE=token, with the cluster's token in "
            "~/.ray/auth_token"
        )
    if answer.returncode:
        last = answer.stderr.strip().rpartition("\n")[2]
        raise _nowhere(address, re.sub(r"^\w+Error: ", "", last))


async def spread(
    open_worker: OpenWorker[Result],
    jobs: Iterable[Job],
    actors: int,
    concurrency: int,
    finished: Callable[[Result | Failure], None] = lambda result: None,
) -> None:
    """Runs every job on so many actors of the cluster that is connected, ``concurrency`` at once on each.

    ``open_worker`` and what it holds are sent to the actors, which need the same packages. ``finished`` is called with
    each result as it comes. A rollout that breaks is a Failure; so is one whose actor died `_DEATHS` times. What
    ``open_worker`` or ``finished`` raises ends them all, and so it does (InputError) where no actor stays alive.
    However it ends, no actor is left.
    """
    todo = _Jobs(jobs)
    given_up: list[str] = []

    async def keep(place: int) -> None:
        """An actor in this place until all is done; another one where it dies, unless that is all they do."""
        deaths, reason = 0, ""
        while todo.left and deaths < _DEATHS:
            before = todo.done_by[place]
            try:
                await _use(open_worker, place, concurrency, todo, finished)
            except (RayActorError, TimeoutError) as error:
                reason = str(error).strip().rpartition("\n")[2] or f"none has started within {_START_SECONDS:.0f} s"
                deaths = 1 if todo.done_by[place] > before else deaths + 1
                await anyio.sleep(_AGAIN_SECONDS)
        if not todo.left:
            places.cancel_scope.cancel()  # Another one may still be about to start.
            return
        given_up.append(reason)
        if len(given_up) == actors:
            raise InputError(f"--ray: no actor stays alive: {reason}")

    async with raising_alone() as places:
        for place in range(actors):
            places.start_soon(keep, place)


async def _use(
    open_worker: OpenWorker[Result],
    place: int,
    concurrency: int,
    todo: _Jobs,
    finished: Callable[[Result | Failure], None],
) -> None:
    """One actor until all jobs are done. Raises RayActorError where it dies, TimeoutError where it does not start."""
    create = ray.remote(_Actor).options(num_cpus=1, max_concurrency=concurrency + 2, scheduling_strategy="SPREAD")
    actor = create.remote(open_worker)
    running: dict[tuple[str, int], Job] = {}

    async def take() -> None:
        while job := await todo.take(place):
            task, seed = job
            running[task.id, seed] = job
            result = await actor.rollout.remote(task, seed)
            del running[task.id, seed]
            todo.done(place)
            finished(result)

    try:
        with anyio.fail_after(_START_SECONDS):
            await actor.open.remote()
        async with raising_alone() as seats:
            for _ in range(concurrency):
                seats.start_soon(take)
        with anyio.move_on_after(_END_SECONDS, shield=True):  # From the first actor to be done.
            await actor.close.remote()
    except RayActorError:
        for job in running.values():
            if failure := todo.lost(job):
                finished(failure)
        if todo.left:
            raise
    except RayTaskError as error:
        raise error.cause or error from None
    finally:
        ray.kill(actor)


class _Actor(Generic[Result]):
    """What runs rollouts in a process of its own. Ray calls its methods as tasks of one event loop."""

    def __init__(self, open_worker: OpenWorker[Result]) -> None:
        self._open_worker = open_worker
        self._run: Callable[[Task, int], Awaitable[Result]]
        self._held: asyncio.Task[None]
        self._ending = asyncio.Event()

    async def open(self) -> None:
        """Raises what the opening raises."""
        opened = asyncio.Event()
        # All in one task, for what was opened is closed by the task that opened it.
        self._held = asyncio.create_task(self._hold(opened))
        waiting = asyncio.create_task(opened.wait())
        await asyncio.wait([self._held, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not opened.is_set():
            waiting.cancel()
            await self._held

    async def rollout(self, task: Task, seed: int) -> Result | Failure:
        try:
            return await self._run(task, seed)
        except Exception as error:
            return Failure.of(task, seed, error)

    async def close(self) -> None:
        """Returns when what was opened has been closed."""
        self._ending.set()
        await self._held

    async def _hold(self, opened: asyncio.Event) -> None:
        async with self._open_worker() as self._run:
            opened.set()
            await self._ending.wait()


class _Jobs:
    """What is to be done yet, and by whom."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.left = 0
        """Jobs that have no result, those under way included."""
        self.done_by: Counter[int] = Counter()
        """By place of an actor: how many results came from there."""
        self._waiting: dict[str, deque[Job]] = {}
        """By task; those that nobody runs."""
        self._of_place: dict[int, str] = {}
        """The task that an actor takes jobs of, until there are none."""
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._changed = anyio.Event()
        for job in jobs:
            self.left += 1
            self._put(job)

    async def take(self, place: int) -> Job | None:
        """A job for the actor in this place, as soon as there is one. None when all are done."""
        while self.left:
            if self._waiting:
                return self._next(place)
            await self._changed.wait()
        return None

    def done(self, place: int) -> None:
        self.done_by[place] += 1
        self.left -= 1
        if not self.left:
            self._wake()

    def lost(self, job: Job) -> Failure | None:
        """With its actor. It waits for another one, or has failed."""
        task, seed = job
        self._deaths[task.id, seed] += 1
        if self._deaths[task.id, seed] == _DEATHS:
            self.left -= 1
            failure = Failure(task.id, seed, f"the actor that ran it died, {_DEATHS} times")
        else:
            self._put(job)
            failure = None
        self._wake()
        return failure

    def _put(self, job: Job) -> None:
        self._waiting.setdefault(job[0].id, deque()).append(job)

    def _next(self, place: int) -> Job:
        task = self._of_place.get(place)
        if task not in self._waiting:
            others = self._of_place.values()
            # One that no actor has begun, or else the one of which there is most to do.
            task = next((each for each in self._waiting if each not in others), None)
            task = task or max(self._waiting, key=lambda each: len(self._waiting[each]))
            self._of_place[place] = task
        job = self._waiting[task].popleft()
        if not self._waiting[task]:
            del self._waiting[task]
        return job

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
