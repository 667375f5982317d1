"""One run: what the command line asked for, carried out into a directory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
from rich.console import Console

from obsspec.environments.latency import parse_latency, with_latency
from obsspec.environments.sandbox import open_sandbox
from obsspec.errors import InputError
from obsspec.policies import Precision
from obsspec.reports.records import line_of, open_run
from obsspec.reports.tables import counting
from obsspec.rollout import Failure, rollouts
from obsspec.speculation import Settings
from obsspec.tasks import parse_tasks
from obsspec.types import OpenEnvironment, Sampling, Task, Trajectory

BUILTIN = "builtin"
"""The policy, or the world model, that comes with the package."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What determines a run's results, as the command line has it. A resumed run must match it."""

    tasks: str
    policy: str = BUILTIN
    predictor: str = "rules,memory"
    world_model: str = BUILTIN
    depth: int = 1
    breadth: int = 1
    seed: int = 0
    samples: int = 1
    temperature: float = 1.0
    max_turns: int = 12
    precision: Precision = "int8"
    latency: str = "0"

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"--temperature {self.temperature}: must be 0 or more, and finite")

    def predictors(self) -> tuple[str, ...]:
        """Names of the predictors it uses, cheapest first. Raises InputError for one that is not known."""
        known = ("rules", "memory", "language_model")
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
        sampling = Sampling(self.temperature, max_tokens=128)
        return Settings(sampling, depth=self.depth, breadth=self.breadth, max_turns=self.max_turns)


def run(plan: Plan, output: Path, resume: bool, concurrency: int, workers: int, notes: Console) -> list[Failure]:
    """Carries out what of ``plan`` is not in the directory ``output`` yet. Returns the rollouts that broke.

    Raises InputError, before anything is loaded, where the plan cannot be carried out or ``output`` not be written.
    """
    plan.predictors()
    jobs, environment = plan.jobs(), plan.environment()
    instructions = {task.id: task.instruction for task, _ in jobs}
    with open_run(output, asdict(plan), resume) as directory:
        pending = [(task, seed) for task, seed in jobs if (task.id, seed) not in directory.done]
        with notes.status("loading the models"):
            from obsspec.loading import Models  # Imports for seconds; what is wrong with the plan has been said by now.

            models = Models.load(plan)
        speculator = models.speculator(plan, workers)
        with counting(notes, "rollouts", len(jobs), len(jobs) - len(pending)) as advance:

            def finished(result: Trajectory | Failure) -> None:
                if isinstance(result, Failure):
                    directory.write(result)
                else:
                    directory.write(line_of(result, instructions[result.task], models.chat.text))
                advance()

            results = anyio.run(rollouts, speculator, pending, environment, concurrency, finished)
    return [result for result in results if isinstance(result, Failure)]
