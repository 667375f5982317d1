"""One run: what the command line asked for, carried out into a directory."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from rich.console import Console

from obsspec.budget import Seats
from obsspec.environments.latency import parse_latency, with_latency
from obsspec.environments.sandbox import open_sandbox
from obsspec.errors import InputError
from obsspec.gate import ExpectedValue
from obsspec.policies import Precision
from obsspec.reports.records import TrajectoryLine, line_of, open_run
from obsspec.reports.tables import counting
from obsspec.rollout import Failure, rollout, rollouts
from obsspec.signals import held_back
from obsspec.speculation import Settings, Speculator
from obsspec.tasks import parse_tasks
from obsspec.training.transitions import Transitions, recorded
from obsspec.types import OpenEnvironment, Sampling, Task, Trajectory

if TYPE_CHECKING:
    from obsspec.loading import Models
    from obsspec.policies.vllm import Served

BUILTIN = "builtin"
"""The policy, or the world model, that comes with the package."""
ACTORS = 2
"""How many a run on Ray has where nobody says."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What determines a run's results, as the command line has it. A resumed run must match it.

    Where the policy is on a server, a plan has its weights' own name as ``policy`` and not the URL: a run goes on where
    the same model is served from another place. Likewise the world model, but it has the name of its base, for of what
    is trained on that there may be a new version at any time. See `find_models`.
    """

    tasks: str
    policy: str = BUILTIN
    model: str | None = None
    """What the policy's server calls it; None for a policy in this process, as the next one."""
    tokenizer: str | None = None
    predictor: str = "rules,memory,timeouts"
    world_model: str = BUILTIN
    world_model_name: str | None = None
    """What it was said to be called on its server; see `obsspec.policies.versions.newest`."""
    depth: int = 1
    breadth: int = 1
    seed: int = 0
    samples: int = 1
    temperature: float = 1.0
    max_turns: int = 12
    max_tokens: int = 128
    max_context: int = 4096
    precision: Precision = "int8"
    latency: str = "0"

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"--temperature {self.temperature}: must be 0 or more, and finite")

    def predictors(self) -> tuple[str, ...]:
        """Names of the predictors it uses, cheapest first. Raises InputError for one that is not known."""
        known = ("rules", "memory", "language_model", "timeouts")
        names = () if self.predictor == "off" else tuple(self.predictor.split(","))
        for name in names:
            if name not in known:
                raise InputError(f"--predictor {name}: not one of {', '.join(known)}, off")
        return tuple(name for name in known if name in names and self.depth > 0)

    def jobs(self) -> list[tuple[Task, int]]:
        """Every task with each of its seeds. Raises InputError where the tasks cannot be made or found."""
        return [(task, self.seed + sample) for task in parse_tasks(self.tasks) for sample in range(self.samples)]

    def environment(self) -> OpenEnvironment:
        """The sandbox, behind the latency that was asked for."""
        latency = parse_latency(self.latency)
        return open_sandbox if latency is None else with_latency(open_sandbox, latency, self.seed)

    def settings(self) -> Settings:
        sampling = Sampling(self.temperature, max_tokens=self.max_tokens)
        return Settings(
            sampling,
            depth=self.depth,
            breadth=self.breadth,
            max_turns=self.max_turns,
            max_context=self.max_context,
        )


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the models of a plan are that are on servers. None, or no URL, stands for this process."""

    policy: str | None = None
    """The URL."""
    world_model: tuple[str, ...] = ()
    """The URLs of all that serve it."""
    world_model_tokenizer: str = ""
    """The world model's, by directory or hub name."""


def find_models(plan: Plan) -> tuple[Plan, Servers]:
    """The plan with the names of what is served where it has a server's URL, and these URLs.

    Of several for the world model it is enough that one can be reached. Raises InputError where a server cannot be, or
    does not have the model.
    """
    on_server = is_url(plan.policy), is_url(plan.world_model)
    if not on_server[0] and (plan.model or plan.tokenizer):
        raise InputError(f"--policy {plan.policy}: is no URL of a server, and --model and --tokenizer are for those")
    if not on_server[1] and plan.world_model_name:
        raise InputError(
            f"--world-model {plan.world_model}: is no URL of a server, and --world-model-name is for those"
        )
    servers, base = Servers(), None
    if on_server[0]:
        url, *others = server_urls("--policy", plan.policy)
        if others:
            raise InputError(f"--policy {plan.policy}: several servers; give the URL of one")
        served = _ask(url, plan.model)
        servers, base = replace(servers, policy=url), served.base
        plan = replace(plan, policy=served.weights, model=served.name, tokenizer=plan.tokenizer or base)
    if on_server[1] and not plan.predictors():
        plan = replace(plan, world_model=BUILTIN, world_model_name=None)  # No server has to be there for nothing.
    elif on_server[1]:
        if "language_model" not in plan.predictors():
            remedy = f"add that to --predictor {plan.predictor}"
            raise InputError(f"--world-model {plan.world_model}: only language_model uses it; {remedy}")
        urls = server_urls("--world-model", plan.world_model)
        common = _common_base(urls, plan.world_model_name)
        # Whoever has said where the tokenizer is need not say it twice.
        tokenizer = plan.tokenizer if base == common and plan.tokenizer else common
        servers = replace(servers, world_model=urls, world_model_tokenizer=tokenizer)
        plan = replace(plan, world_model=common)
    return plan, servers


def is_url(name: str) -> bool:
    """Whether a model, or a place for transitions, is named by the URL of a server."""
    return "://" in name


def server_urls(option: str, given: str) -> tuple[str, ...]:
    """Of ``URL,URL``, as an option has it: each of them once. Raises InputError where one is no URL of a server."""
    from obsspec.policies.http import Server

    urls = tuple(dict.fromkeys(url.strip() for url in given.split(",")))
    if "" in urls:
        raise InputError(
            f"{option} {given}: no URL before or after a comma; give URL,URL, or give a URL like http://localhost:8000 "
            "alone"
        )
    try:
        for url in urls:
            Server(url)
    except InputError as error:
        raise InputError(f"{option} {given}: {error}") from None
    return urls


def _common_base(urls: Sequence[str], name: str | None) -> str:
    """The base of the world model on these servers, of which one that can be reached is enough.

    Raises InputError where none can be, or where they have different ones.
    """
    from obsspec.policies.http import Unreachable

    bases: dict[str, str] = {}
    failures: list[str] = []
    for url in urls:
        try:
            bases[_ask(url, name, versioned=True).base] = url
        except Unreachable as error:
            failures.append(str(error))
    if not bases:
        raise InputError("; ".join(failures))
    if len(bases) > 1:
        what = ", ".join(f"{base} at {url}" for base, url in bases.items())
        raise InputError(f"--world-model {','.join(urls)}: these are different models, {what}; give servers of one")
    return next(iter(bases))


def _ask(url: str, name: str | None, versioned: bool = False) -> Served:
    from obsspec.policies.http import Server
    from obsspec.policies.vllm import find_model

    async def ask() -> Served:
        async with Server(url) as server:
            return await find_model(server, name, versioned)

    return anyio.run(ask)


@dataclass(frozen=True, slots=True)
class Means:
    """With what a plan is carried out. Nothing here changes what its rollouts are."""

    concurrency: int = 2
    """Rollouts at the same time, in each actor where there are several."""
    seats: int | None = None
    """Requests that the policy runs at once; None is one in this process, and on a server as many as it takes."""
    gate: Path | None = None
    """Where what the gate learns is kept."""
    transitions: str | None = None
    """The store to which every executed command is added, or the URL of a co-training that takes them."""
    ray: str | None = None
    """The Ray cluster on which the rollouts run, as for `obsspec.actors.connected`; None is this process."""
    actors: int | None = None
    """How many processes of the cluster; None is `ACTORS`. There are never more than rollouts."""

    def check(self) -> None:
        """Raises InputError for what does not go together."""
        if self.ray is None and self.actors is not None:
            raise InputError(f"--actors {self.actors}: these are processes of a Ray cluster; say which with --ray")
        if self.ray not in (None, "local") and self.transitions is not None and not is_url(self.transitions):
            raise InputError(
                f"--transitions {self.transitions}: other machines of the cluster do not have this file; give the URL "
                "of an `obsspec world-model serve --listen`, or --ray local"
            )


Result = TrajectoryLine | Failure
RunAll = Callable[[list[tuple[Task, int]], Callable[[Result], None]], Awaitable[None]]
"""Runs tasks, each with its seed, and calls with every result as it comes."""


def run(plan: Plan, output: Path, resume: bool, means: Means, notes: Console) -> list[Failure]:
    """Carries out what of ``plan`` is not in the directory ``output`` yet. Returns the rollouts that broke.

    Raises InputError, before anything is loaded, where the plan cannot be carried out or a place not be written.
    """
    plan.predictors()
    means.check()
    jobs, tools = plan.jobs(), plan.environment()
    with notes.status("asking for the models"):
        plan, servers = find_models(plan)
    broken: list[Failure] = []
    with open_run(output, asdict(plan), resume) as directory, _kept(means) as gate:
        pending = [(task, seed) for task, seed in jobs if (task.id, seed) not in directory.done]
        if not pending:
            return []
        work = _Work(plan, servers, means, gate, tools)
        actors = min(means.actors or ACTORS, len(pending))
        place = work.here(notes) if means.ray is None else work.on_ray(means.ray, actors, notes)
        with place as run_all, counting(notes, "rollouts", len(jobs), len(jobs) - len(pending)) as advance:

            def finished(result: Result) -> None:
                directory.write(result)
                if isinstance(result, Failure):
                    broken.append(result)
                advance()

            anyio.run(run_all, pending, finished)
    return broken


@dataclass(frozen=True, slots=True)
class _Work:
    """A plan and all that it is carried out with, in this process or in the actors that it is sent to."""

    plan: Plan
    servers: Servers
    means: Means
    gate: ExpectedValue
    tools: OpenEnvironment

    @contextmanager
    def here(self, notes: Console) -> Iterator[RunAll]:
        with _recording(self.tools, self.means.transitions) as environment:
            with notes.status("loading the models"):
                models = self._models()

            async def run_all(jobs: list[tuple[Task, int]], finished: Callable[[Result], None]) -> None:
                instructions = {task.id: task.instruction for task, _ in jobs}

                def lined(result: Trajectory | Failure) -> None:
                    if isinstance(result, Trajectory):
                        finished(line_of(result, instructions[result.task], models.chat.text))
                    else:
                        finished(result)

                async with self._speculator(models) as speculator:
                    await rollouts(speculator, jobs, environment, self.means.concurrency, lined)

            yield run_all

    @contextmanager
    def on_ray(self, address: str, actors: int, notes: Console) -> Iterator[RunAll]:
        with ExitStack() as stack:
            with notes.status("starting Ray"):
                with held_back():
                    from obsspec.actors import connected, spread
                stack.enter_context(connected(address, actors))
            work = self._wherever()

            async def run_all(jobs: list[tuple[Task, int]], finished: Callable[[Result], None]) -> None:
                await spread(work.in_actor, jobs, actors, self.means.concurrency, finished)

            yield run_all

    @asynccontextmanager
    async def in_actor(self) -> AsyncIterator[Callable[[Task, int], Awaitable[TrajectoryLine]]]:
        """See `obsspec.actors.OpenWorker`."""
        with _recording(self.tools, self.means.transitions) as environment:
            models = self._models()
            async with self._speculator(models) as speculator:

                async def run(task: Task, seed: int) -> TrajectoryLine:
                    trajectory = await rollout(speculator, task, environment, seed)
                    return line_of(trajectory, task.instruction, models.chat.text)

                yield run

    def _wherever(self) -> _Work:
        """The same for another working directory."""

        def absolute(name: str) -> str:
            return str(Path(name).resolve()) if Path(name).exists() else name

        plan, store = self.plan, self.means.transitions
        tokenizer = None if plan.tokenizer is None else absolute(plan.tokenizer)
        plan = replace(plan, policy=absolute(plan.policy), world_model=absolute(plan.world_model), tokenizer=tokenizer)
        if store is not None and not is_url(store):
            store = str(Path(store).resolve())
        return replace(self, plan=plan, means=replace(self.means, transitions=store))

    def _models(self) -> Models:
        with held_back():  # It imports for seconds; what is wrong with the plan has been said by now.
            from obsspec.loading import Models
        return Models.load(self.plan, self.servers)

    def _speculator(self, models: Models) -> AbstractAsyncContextManager[Speculator]:
        seats = self.means.seats or (1 if self.servers.policy is None else math.inf)
        return models.speculator(self.plan, Seats(seats), self.gate)


@contextmanager
def _kept(means: Means) -> Iterator[ExpectedValue]:
    """A gate that knows what the file of ``means`` says, if there is one, and writes what it has learned there in the
    end. On Ray each actor learns for itself, and nothing is written."""
    file = means.gate
    gate = ExpectedValue() if file is None or not file.exists() else ExpectedValue.load(file)
    if file is None or means.ray is not None:
        yield gate
        return
    gate.save(file)  # Whether it can be written is better known before hours of work.
    try:
        yield gate
    finally:
        gate.save(file)


@contextmanager
def _recording(environment: OpenEnvironment, where: str | None) -> Iterator[OpenEnvironment]:
    """The environment, with each command that it executes added to a store or sent to a URL, if there is one."""
    if where is None:
        yield environment
    elif is_url(where):
        from obsspec.training.posting import PostedTransitions

        with PostedTransitions.open(where) as posted:
            yield recorded(environment, posted)
    else:
        with Transitions.open(Path(where)) as transitions:
            yield recorded(environment, transitions)
