"""One run: what the command line asked for, carried out into a directory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
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
from obsspec.reports.records import line_of, open_run
from obsspec.reports.tables import counting
from obsspec.rollout import Failure, rollouts
from obsspec.signals import held_back
from obsspec.speculation import Settings
from obsspec.tasks import parse_tasks
from obsspec.training.transitions import Transitions, recorded
from obsspec.types import OpenEnvironment, Sampling, Task, Trajectory

if TYPE_CHECKING:
    from obsspec.policies.vllm import Served

BUILTIN = "builtin"
"""The policy, or the world model, that comes with the package."""


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
    """Where the models of a plan are that are on servers. None stands for this process."""

    policy: str | None = None
    """The URL."""
    world_model: str | None = None
    """The URL."""
    world_model_tokenizer: str = ""
    """The world model's, by directory or hub name."""


def find_models(plan: Plan) -> tuple[Plan, Servers]:
    """The plan with the names of what is served where it has a server's URL, and these URLs.

    Raises InputError where a server cannot be reached or does not have the model.
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
        served = _ask(plan.policy, plan.model)
        servers, base = replace(servers, policy=plan.policy), served.base
        plan = replace(plan, policy=served.weights, model=served.name, tokenizer=plan.tokenizer or base)
    if on_server[1] and not plan.predictors():
        plan = replace(plan, world_model=BUILTIN, world_model_name=None)  # No server has to be there for nothing.
    elif on_server[1]:
        if "language_model" not in plan.predictors():
            remedy = f"add that to --predictor {plan.predictor}"
            raise InputError(f"--world-model {plan.world_model}: only language_model uses it; {remedy}")
        served = _ask(plan.world_model, plan.world_model_name, versioned=True)
        # Whoever has said where the tokenizer is need not say it twice.
        tokenizer = plan.tokenizer if base == served.base and plan.tokenizer else served.base
        servers = replace(servers, world_model=plan.world_model, world_model_tokenizer=tokenizer)
        plan = replace(plan, world_model=served.base)
    return plan, servers


def is_url(name: str) -> bool:
    """Whether a model, or a place for transitions, is named by the URL of a server."""
    return name.startswith(("http://", "https://"))


def _ask(url: str, name: str | None, versioned: bool = False) -> Served:
    from obsspec.policies.http import Server
    from obsspec.policies.vllm import find_model

    async def ask() -> Served:
        async with Server(url) as server:
            return await find_model(server, name, versioned)

    return anyio.run(ask)


def run(
    plan: Plan,
    output: Path,
    resume: bool,
    concurrency: int,
    seats: int | None,
    gate_file: Path | None,
    notes: Console,
    transitions: str | None = None,
) -> list[Failure]:
    """Carries out what of ``plan`` is not in the directory ``output`` yet. Returns the rollouts that broke.

    ``seats``: how many requests the policy runs at once; if not given, one in this process, and on a server as many as
    it takes. ``gate_file``: where what the gate learns is kept. ``transitions``: the store to which every executed
    command is added, or the URL of a co-training that takes them. Raises InputError, before anything is loaded, where
    the plan cannot be carried out or one of these places not be written.
    """
    plan.predictors()
    jobs, tools = plan.jobs(), plan.environment()
    instructions = {task.id: task.instruction for task, _ in jobs}
    with notes.status("asking for the models"):
        plan, servers = find_models(plan)
    policy_seats = Seats(seats or (1 if servers.policy is None else math.inf))
    with (
        open_run(output, asdict(plan), resume) as directory,
        _kept(gate_file) as gate,
        _recording(tools, transitions) as environment,
    ):
        pending = [(task, seed) for task, seed in jobs if (task.id, seed) not in directory.done]
        with notes.status("loading the models"):
            with held_back():  # It imports for seconds; what is wrong with the plan has been said by now.
                from obsspec.loading import Models

            models = Models.load(plan, servers)
        with counting(notes, "rollouts", len(jobs), len(jobs) - len(pending)) as advance:

            def finished(result: Trajectory | Failure) -> None:
                if isinstance(result, Failure):
                    directory.write(result)
                else:
                    directory.write(line_of(result, instructions[result.task], models.chat.text))
                advance()

            async def run_all() -> list[Trajectory | Failure]:
                async with models.speculator(plan, policy_seats, gate) as speculator:
                    return await rollouts(speculator, pending, environment, concurrency, finished)

            results = anyio.run(run_all)
    return [result for result in results if isinstance(result, Failure)]


@contextmanager
def _kept(file: Path | None) -> Iterator[ExpectedValue]:
    """A gate that knows what ``file`` says, if there is one, and writes what it has learned there in the end."""
    gate = ExpectedValue() if file is None or not file.exists() else ExpectedValue.load(file)
    if file is None:
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
