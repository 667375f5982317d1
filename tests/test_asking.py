"""Which predictors are asked about which commands: full rollouts in virtual time, on the gate that learns from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import pytest
import trio
import trio.testing

from obsspec import ExpectedValue, Observation, Query, Sampling, Settings, Speculator, Task, Trajectory, rollout
from obsspec.gate import ToolTimes
from obsspec.predictors import Cascade
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode
from obsspec.types import Draft

TURNS = 20
FREQUENTLY, SELDOM = 0.9, 0.12
"""Shares of the queries: one that is not worth asking is asked one time in twenty."""


@dataclass
class Model:
    """Answers after ``seconds``, and is right about the queries of which ``right`` is true."""

    seconds: float
    right: Callable[[Query], bool]
    asked: list[Query] = field(default_factory=list)
    prepared: int = 0

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        self.asked.append(query)
        await anyio.sleep(self.seconds)
        propose(Draft(printed(query.command) if self.right(query) else "something else", 0.6, "model"))

    async def prepare(self, query: Query) -> None:
        self.prepared += 1

    def learn(self, query: Query, observation: Observation) -> None:
        pass

    def share(self, first: int, last: int, commands: str = "", of: float = TURNS - 1) -> float:
        """Of the queries in the rollouts from ``first`` up to ``last``, how many it was asked."""
        asked = [query for query in self.asked if first <= int(query.task) < last and commands in query.command]
        return len(asked) / ((last - first) * of)


def printed(command: str) -> str:
    return command.upper()


def run(
    model: Model,
    rollouts: int,
    tool_seconds: Callable[[str], float] = lambda command: 2.0,
    gate: ExpectedValue | None = None,
    others: dict[str, Model] | None = None,
    depth: int = 1,
) -> list[Trajectory]:
    """Rollouts whose tasks are numbered, one after another, of commands like ``make 3 17``, on even turns ``ls 3 16``.

    A generation takes 0.8 s or so. The last turn has no successor, so nobody is asked about it.
    """
    gate = gate or ExpectedValue()
    cascade = Cascade({**(others or {}), "model": model}, worth_asking=gate.worth_asking)

    def script(tokens: tuple[int, ...], seed: int) -> str:
        turn = decode(tokens).count("\n") // 2
        return f"{'make' if turn % 2 else 'ls'} {seed} {turn}"

    def tool(commands: tuple[str, ...]) -> Observation:
        return Observation(printed(commands[-1]), tool_seconds(commands[-1]), 0)

    settings = Settings(Sampling(max_tokens=20), depth=depth, max_turns=TURNS, max_context=10**6, gate=gate)
    speculator = Speculator(ScriptedPolicy(script, seconds=0.1), ScriptedChat(), cascade, settings)

    async def main() -> list[Trajectory]:
        return [
            await rollout(speculator, Task(str(number), "go"), ScriptedEnvironment(tool).open, number)
            for number in range(rollouts)
        ]

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def never(query: Query) -> bool:
    return False


def always(query: Query) -> bool:
    return True


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_is_right_in_time_is_asked_every_time(depth: int) -> None:
    model = Model(0.5, always)
    trajectories = run(model, 10, depth=depth)
    assert model.share(0, 10) >= 1
    assert all(turn.outcome == "hit" for each in trajectories for turn in each.turns[:-1])


def test_one_that_is_never_right_is_soon_asked_one_time_in_twenty() -> None:
    model = Model(0.5, never)
    run(model, 30)
    assert model.share(0, 1) > 0.2, "what it is worth has to be found out"
    assert 0.01 < model.share(3, 30) < SELDOM
    assert model.prepared < 0.2 * 30 * (TURNS - 1), "and need not read what it is not asked about"


def test_one_that_is_right_but_too_late_is_soon_asked_one_time_in_twenty() -> None:
    model = Model(3.0, always)
    run(model, 30)
    assert 0.01 < model.share(1, 30) < SELDOM


def test_one_that_has_learned_comes_back() -> None:
    model = Model(0.5, lambda query: int(query.task) >= 20)
    run(model, 60)
    assert model.share(5, 20) < SELDOM
    assert model.share(50, 60) > FREQUENTLY


def test_one_that_becomes_fast_enough_comes_back() -> None:
    class Hastened(Model):
        async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
            self.seconds = 3.0 if int(query.task) < 20 else 0.2
            await super().predict(query, propose)

    model = Hastened(3.0, always)
    run(model, 60)
    assert model.share(5, 20) < SELDOM
    assert model.share(50, 60) > FREQUENTLY


def test_one_that_answers_at_once_is_asked_whatever_it_says() -> None:
    quick = Model(0.0, never)
    run(Model(0.5, always), 10, others={"quick": quick})
    assert quick.share(0, 10) == 1


def test_what_a_cheaper_one_knows_as_well_is_not_worth_asking_for() -> None:
    """It is right as often as the cheaper one, which says little of itself, and never saves anything."""
    cheap, costly = Model(0.0, always), Model(0.5, always)
    trajectories = run(costly, 30, others={"cheap": cheap})
    assert cheap.share(0, 30) == 1
    assert costly.share(3, 30) < SELDOM
    assert all(turn.outcome == "hit" for each in trajectories for turn in each.turns[:-1])


def test_commands_that_are_over_before_it_answers_are_none_of_its_business() -> None:
    model = Model(0.5, always)
    run(model, 30, tool_seconds=lambda command: 0.05 if "ls" in command else 5.0)
    assert model.share(3, 30, "ls", of=TURNS / 2) < SELDOM
    assert model.share(3, 30, "make", of=TURNS / 2 - 1) > FREQUENTLY


def test_one_whose_drafts_get_no_branch_saves_nothing() -> None:
    """The server is so full that the gate hardly admits anything."""

    class Closed(ExpectedValue):
        def admits(self, bet: object) -> bool:
            return False

    model = Model(0.5, always)
    run(model, 40, gate=Closed())
    assert model.share(10, 40) < SELDOM


def test_a_run_can_be_repeated() -> None:
    first, second = Model(0.5, never), Model(0.5, never)
    run(first, 10)
    run(second, 10)
    assert first.asked == second.asked


def test_nothing_is_lost_or_changed_by_not_asking() -> None:
    """The trajectories are the same whoever is asked, and no later than without speculation."""
    spared, off = run(Model(0.5, never), 5), run(Model(0.5, never), 5, depth=0)
    assert [each.context.tokens for each in spared] == [each.context.tokens for each in off]
    assert [each.seconds for each in spared] == [pytest.approx(each.seconds) for each in off]


def test_how_long_a_command_goes_on_after_a_draft_has_come() -> None:
    times = ToolTimes()
    assert times.outlasting("make", 1.0, most=3.0) == 3.0
    for seconds in (0.5, 2.0, 60.0) * 20:
        times.learn("make", seconds)
    assert times.outlasting("make", 1.0, most=3.0) == pytest.approx((0 + 1 + 3) / 3)
    assert times.outlasting("make", 100.0, most=3.0) == 0
    for _ in range(60):
        times.learn("ls", 0.01)
    assert times.outlasting("ls", 1.0, most=3.0) < 0.1


def test_on_a_full_server_less_is_worth_asking_for_unless_the_model_has_a_server_of_its_own() -> None:
    gate = ExpectedValue()
    for _ in range(50):
        gate.tool_times.learn("make", 5.0)
    assert gate.worth_asking("model", "make", 0.5, 0.3)
    gate.price = 0.8
    assert not gate.worth_asking("model", "make", 0.5, 0.3)
    assert gate.worth_asking("model", "make", 0.5, 0.3, price=0.02)
