"""Named ways to run a workload: what speculates, how far, and who goes first on the policy server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from obsspec.budget import Seats
from obsspec.gate import ExpectedValue, Gate, Threshold
from obsspec.lab.server import Scheduling, SimulatedPolicyServer
from obsspec.lab.workload import Workload
from obsspec.lab.world import SimulatedChat, SimulatedWorldModel, World
from obsspec.speculation import Settings, Speculator
from obsspec.types import Sampling


def everything() -> Gate:
    return Threshold(0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a workload is run."""

    what: str
    """For people."""
    depth: int = 2
    breadth: int = 1
    gate: Callable[[], Gate] = ExpectedValue
    scheduling: Scheduling = "priority"
    """Of the policy server."""
    budget: bool = True
    """Whether the client counts the server's seats, so that no real request waits for a speculative one."""
    clairvoyant: bool = False
    """Drafts are exact and come at once, and speculation takes no seat and slows nobody down."""
    always_wrong: bool = False
    """No draft is exact, though the predictor is as sure as ever."""

    def speculator(self, world: World, server: SimulatedPolicyServer) -> Speculator:
        workload = world.workload
        settings = Settings(
            Sampling(max_tokens=_ENDLESS),
            # The sequential schedule stays one, so that a workload with a depth can still be compared with it.
            depth=workload.depth if self.depth and workload.depth is not None else self.depth,
            breadth=self.breadth if workload.breadth is None else workload.breadth,
            gate=self.gate(),
            max_turns=workload.turns,
            max_context=_ENDLESS,
        )
        predictor = SimulatedWorldModel(world, server, self.always_wrong)
        seats = Seats(workload.server.seats) if self.budget else Seats()
        return Speculator(server, SimulatedChat(world), predictor, settings, seats)

    def world(self, workload: Workload) -> World:
        if self.clairvoyant:
            exact = {"accuracy": 1.0, "further": (), "delay_seconds": 0.0, "delay_fraction": None, "server": "own"}
            workload = workload.model_copy(update={"predictor": workload.predictor.model_copy(update=exact)})
        return World(workload)

    def server(self, world: World) -> SimulatedPolicyServer:
        own = world.workload.server
        return SimulatedPolicyServer(
            own.costs, world.generation_tokens, own.scheduling or self.scheduling, free_speculation=self.clairvoyant
        )


_ENDLESS = 2**62
"""Tokens: the lab's generations and contexts are as long as the workload says."""

_OBSSPEC = Schedule("ours: depth 2, a gate, a budget of seats, real requests first")

SCHEDULES = {
    "sequential": Schedule("no speculation", depth=0, scheduling="fcfs", budget=False),
    "reference": Schedule(
        "as published: depth 1, every command attempted, no gate, no priority, no seats kept free",
        depth=1,
        gate=everything,
        scheduling="fcfs",
        budget=False,
    ),
    "obsspec": _OBSSPEC,
    "clairvoyant": replace(
        _OBSSPEC,
        what="the bound at that depth: exact drafts at once, and room for speculation",
        gate=everything,
        budget=False,
        clairvoyant=True,
    ),
    "harmful": replace(_OBSSPEC, what="as obsspec, but every draft is wrong", always_wrong=True),
}
