"""Named ways to run a workload: what speculates, how far, and who goes first on the policy server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from obsspec import types
from obsspec.budget import Seats
from obsspec.gate import PRICE_APART, ExpectedValue, Gate, Threshold
from obsspec.lab.server import Scheduling, SimulatedPolicyServer
from obsspec.lab.workload import GateName, Predictor, Workload
from obsspec.lab.world import SimulatedChat, SimulatedWorldModel, World
from obsspec.predictors.cascade import Cascade
from obsspec.speculation import Settings, Speculator
from obsspec.types import Sampling


def everything() -> Gate:
    return Threshold(0)


GATES: dict[str, Callable[[], Gate]] = {"expected_value": ExpectedValue, "everything": everything}


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a workload is run."""

    what: str
    """For people."""
    depth: int = 2
    breadth: int = 1
    gate: GateName = "expected_value"
    scheduling: Scheduling = "priority"
    """Of the policy server."""
    budget: bool = True
    """Whether the client counts the server's seats, so that no real request waits for a speculative one."""
    clairvoyant: bool = False
    """Drafts are exact and come at once, and speculation takes no seat and slows nobody down."""
    always_wrong: bool = False
    """No draft is exact, though the predictor is as sure as ever."""

    def settle(self, workload: Workload) -> Workload:
        """The workload with all that it leaves to the schedule, and without what makes no difference under it."""
        sequential = self.depth == 0
        changes: dict[str, Any] = {}
        for name in ("depth", "breadth", "gate", "budget"):
            asked = getattr(workload, name)
            changes[name] = getattr(self, name) if sequential or asked is None else asked
        scheduling = None if sequential else workload.server.scheduling
        changes["server"] = workload.server.model_copy(update={"scheduling": scheduling or self.scheduling})
        changes["stragglers_first"] = workload.stragglers_first and changes["budget"]
        if self.clairvoyant or changes["depth"] == 0:
            changes["predictor"] = Predictor(accuracy=1.0, delay_seconds=0.0)
        return workload.model_copy(update=changes)

    def server(self, world: World) -> SimulatedPolicyServer:
        own = world.workload.server
        assert own.scheduling is not None
        return SimulatedPolicyServer(own.costs, world.generation, own.scheduling, free_speculation=self.clairvoyant)

    def speculator(self, world: World, server: SimulatedPolicyServer) -> Speculator:
        """``world`` is that of a settled workload."""
        workload = world.workload
        assert workload.depth is not None and workload.breadth is not None and workload.gate is not None
        gate = GATES[workload.gate]()
        settings = Settings(
            Sampling(max_tokens=_ENDLESS),
            depth=workload.depth,
            breadth=workload.breadth,
            gate=gate,
            max_turns=workload.turns,
            max_context=_ENDLESS,
        )
        predictor: types.Predictor = SimulatedWorldModel(world, server, self.always_wrong)
        if isinstance(gate, ExpectedValue):  # As in a rollout: it is asked where that pays.
            price = None if workload.predictor.server == "shared" else PRICE_APART
            predictor = Cascade({"world_model": predictor}, worth_asking=partial(gate.worth_asking, price=price))
        seats = Seats(workload.server.seats if workload.budget else math.inf, workload.stragglers_first)
        return Speculator(server, SimulatedChat(world), predictor, settings, seats)


_ENDLESS = 2**62
"""Tokens: the lab's generations and contexts are as long as the workload says."""

_OBSSPEC = Schedule("ours: depth 2, a gate, a budget of seats, real requests first")

SCHEDULES = {
    "sequential": Schedule("no speculation", depth=0, scheduling="fcfs", budget=False),
    "reference": Schedule(
        "as published: depth 1, every command attempted, no gate, no priority, no seats kept free",
        depth=1,
        gate="everything",
        scheduling="fcfs",
        budget=False,
    ),
    "obsspec": _OBSSPEC,
    "clairvoyant": replace(
        _OBSSPEC,
        what="the bound at that depth: exact drafts at once, and room for speculation",
        gate="everything",
        budget=False,
        clairvoyant=True,
    ),
    "harmful": replace(_OBSSPEC, what="as obsspec, but every draft is wrong", always_wrong=True),
}
