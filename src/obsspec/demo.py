"""The demonstration: the same rollouts with speculation off and on, interleaved, on real shells and a real model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import anyio
from rich.console import Console

from obsspec.budget import Seats
from obsspec.gate import ExpectedValue
from obsspec.reports.comparison import Comparison, Difference, compare
from obsspec.reports.records import TrajectoryLine, line_of
from obsspec.reports.summary import Summary, summarize
from obsspec.reports.tables import counting, families_table, share, summary_table
from obsspec.rollout import rollout
from obsspec.runs import Plan, Servers
from obsspec.signals import held_back

PLAN = Plan(
    tasks="generated:c_program,database,makefile,python_bug/easy/0",
    samples=3,
    depth=2,
    breadth=2,
    temperature=0.5,
    max_turns=8,
)
"""Tasks on which tools take time: they compile, query, build and test. Held-out ones, for the built-in models were
trained on seeds from 1000 on, and such that their commands print the same every time. Several rollouts of each, as
algorithms that compare a group of them need."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the demonstration measured. Each way ran every rollout once in each repeat."""

    off: Summary
    on: Summary
    ratios: list[float]
    """Agent latency on over off, of each repeat."""
    ratio: float
    """Their median."""
    identical: int
    """Rollouts whose tokens and loss mask were the same off and on."""
    compared: int
    largest_logprob_difference: float
    """Over the identical rollouts, natural log."""
    different: list[Difference]
    environment: list[Difference]
    """Rollouts not compared, because the environment itself answered the same command differently."""


def run_demo(plan: Plan, repeats: int, seats: int, notes: Console) -> Figures:
    """Runs every rollout of the plan ``repeats`` times each way. ``seats``: generations at once."""
    plan.predictors()
    plans = {"off": replace(plan, depth=0), "on": plan}
    lines = interleaved(plans, repeats, seats, notes)
    comparisons = [compare(off, on) for off, on in zip(lines["off"], lines["on"], strict=True)]
    return _figures(lines["off"], lines["on"], comparisons)


def interleaved(
    plans: Mapping[str, Plan], repeats: int, seats: int, notes: Console
) -> dict[str, list[list[TrajectoryLine]]]:
    """Runs the same rollouts by each of several plans, one at a time, taking turns at which plan goes first.

    The plans share their models, tasks and seeds. Each repeat starts with empty caches and an empty memory, so what it
    hits it has learned in that repeat. Returns the trajectories of each plan's repeats.
    """
    jobs = next(iter(plans.values())).jobs()
    environments = {name: plan.environment() for name, plan in plans.items()}
    with notes.status("loading the models"):
        with held_back():  # It imports for seconds.
            from obsspec.loading import Models

        models = Models.load(max(plans.values(), key=lambda plan: plan.depth), Servers())
    lines: dict[str, list[list[TrajectoryLine]]] = {name: [[] for _ in range(repeats)] for name in plans}

    async def run_all(advance: Callable[[], None]) -> None:
        order = list(plans)
        for repeat in range(repeats):
            async with AsyncExitStack() as stack:
                speculators = {
                    name: await stack.enter_async_context(models.speculator(plan, Seats(seats), ExpectedValue()))
                    for name, plan in plans.items()
                }
                for task, seed in jobs:
                    for name in order:
                        trajectory = await rollout(speculators[name], task, environments[name], seed)
                        lines[name][repeat].append(line_of(trajectory, task.instruction, models.chat.text))
                        advance()
                    order = [*order[1:], order[0]]

    with counting(notes, "rollouts", len(plans) * repeats * len(jobs)) as advance:
        anyio.run(run_all, advance)
    return lines


def _figures(
    off: Sequence[Sequence[TrajectoryLine]], on: Sequence[Sequence[TrajectoryLine]], comparisons: Sequence[Comparison]
) -> Figures:
    ratios = [comparison.second_seconds / comparison.first_seconds for comparison in comparisons]
    return Figures(
        off=summarize(line for repeat in off for line in repeat),
        on=summarize(line for repeat in on for line in repeat),
        ratios=ratios,
        ratio=statistics.median(ratios),
        identical=sum(comparison.identical for comparison in comparisons),
        compared=sum(comparison.compared for comparison in comparisons),
        largest_logprob_difference=max(comparison.largest_logprob_difference for comparison in comparisons),
        different=[difference for comparison in comparisons for difference in comparison.different],
        environment=[difference for comparison in comparisons for difference in comparison.environment],
    )


def print_demo(figures: Figures, output: Console) -> None:
    """For people to read, ending with what matters."""
    off, on = figures.off, figures.on
    output.print(summary_table(on, "With speculation"))
    output.print(families_table({"speculation off": off, "speculation on": on}))
    ratios = ", ".join(f"{ratio:.3f}" for ratio in figures.ratios)
    for line in (
        f"tasks: {on.tasks}, rollouts each way: {on.rollouts}",
        f"success rate: {share(on.solved, on.rollouts)}, without speculation {share(off.solved, off.rollouts)}",
        f"hit rate: {share(on.hits, on.tool_calls)} of all tool calls; {share(on.hits, on.attempted)} of attempted",
        f"hidden: {on.hidden_seconds:.1f} s of {on.tool_seconds:.1f} s that tools took",
        f"agent latency: {off.agent_seconds:.1f} s off, {on.agent_seconds:.1f} s on; on / off = {figures.ratio:.3f}"
        f" (median of {len(figures.ratios)} interleaved repeats: {ratios})",
        *(f"differs: {each.task} seed {each.seed}, turn {each.turn}: {each.what}" for each in figures.different),
        *(f"left out: {each.task} seed {each.seed}, turn {each.turn}: {each.what}" for each in figures.environment),
        f"largest difference of log-probabilities: {figures.largest_logprob_difference:g}",
        f"trajectories identical: {figures.identical} of {figures.compared}",
    ):
        output.print(line, highlight=False, soft_wrap=True)
