"""When a draft is worth a branch, and what the gate learns for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from obsspec import (
    Action,
    Bet,
    Draft,
    ExpectedValue,
    Generation,
    InputError,
    Observation,
    Query,
    Settings,
    Speculator,
    Task,
    Trajectory,
    Turn,
    rollout,
)
from obsspec.gate import Calibration, StepTimes, ToolTimes
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode
from obsspec.types import DraftRecord, Interval


def turn(command: str, seconds: float, generation: float = 1.0, *drafts: DraftRecord) -> Turn:
    return Turn(
        generation=Generation(),
        step=Action(command),
        observation=Observation(""),
        generating=(Interval(1.0, 1.0 + generation),),
        executing=Interval(1.0 + generation, 1.0 + generation + seconds),
        outcome="off",
        drafts=drafts,
    )


def learned(*turns: Turn) -> ExpectedValue:
    gate = ExpectedValue()
    for each in turns:
        gate.learn(each)
    return gate


def bet(probability: float, *commands: str, elapsed: float = 0.0, running: int = 1, seats: float = 64) -> Bet:
    return Bet(probability, commands, elapsed, running, seats)


def test_an_idle_server_takes_what_is_at_all_likely_and_a_busy_one_what_pays() -> None:
    gate = learned(*[turn("make", 5.0)] * 20)
    assert gate.admits(bet(0.1, "make", running=1))
    assert not gate.admits(bet(0.7, "make", running=64))
    assert gate.admits(bet(0.9, "make", running=64))
    assert not gate.admits(bet(0.0, "make", running=1))
    assert gate.admits(bet(0.1, "make", running=4, seats=math.inf))


def test_where_reading_a_draft_takes_long_only_what_is_likely_is_worth_that_all_others_wait() -> None:
    """Generations of 1 s each, of which a slow server reads for 0.5 s; eight run, hardly slowing each other."""
    words = Generation((1,) * 51, (0.0,) * 51, (0,) * 51)
    for first_token, admitted in ((0.02, True), (0.5, False)):
        learnt = replace(turn("make", 5.0), generation=words, running=1.0, first_token_seconds=first_token)
        gate = learned(*[learnt] * 20)
        assert gate.reading_seconds == pytest.approx(first_token - 1.5 * (1 - first_token) / 50)
        assert gate.admits(bet(0.7, "make", running=8, seats=1000)) == admitted
        assert gate.admits(bet(0.99, "make", running=8, seats=1000))
        assert gate.admits(bet(0.3, "make", running=0, seats=1000))


def test_a_branch_that_can_wait_for_its_own_tool_waits() -> None:
    """What stands on a second draft may as well begin when the first tool ends, if the second is as slow as that."""
    slow = learned(*[turn("make", 5.0)] * 20)
    assert not slow.admits(bet(1.0, "make", "make"))
    quick = learned(*[turn("make", 5.0), turn("ls", 0.01)] * 20)
    assert quick.admits(bet(0.9, "make", "ls"))


def test_a_later_tool_that_is_usually_quick_does_not_hide_the_generation_for_its_rare_slow_calls() -> None:
    """Its mean is ten generations, yet most of the time a branch that looks over it is what hides the first tool."""
    gate = learned(*[turn("make", 5.0)] * 50, *[turn("sometimes", 0.01)] * 9, turn("sometimes", 100.0))
    assert gate.admits(bet(0.7, "make", "sometimes"))
    slow = learned(*[turn("make", 5.0)] * 50, *[turn("always", 100.0)] * 10)
    assert not slow.admits(bet(0.7, "make", "always", running=8))


def test_times_of_the_kind_count_more_than_those_of_others() -> None:
    times = ToolTimes()
    for _ in range(50):
        times.learn("ls -l src", 0.01)
        times.learn("cd build && make -j2", 8.0)
    assert times.remaining("ls docs", 0.0, most=100.0) < 1.0
    assert times.remaining("cd other && make", 0.0, most=100.0) > 7.0
    assert 3.0 < times.remaining("never-seen", 0.0, most=100.0) < 5.0
    assert times.remaining("make", 0.0, most=0.5) <= 0.5


def test_a_command_that_has_run_for_long_is_expected_to_go_on() -> None:
    """Most are over at once, a tenth runs into its limit of 30 s: the longer one has run, the surer that is."""
    random = Random(0)
    times = ToolTimes()
    for _ in range(200):
        times.learn("pytest", 30.0 if random.random() < 0.1 else random.uniform(0.0, 0.2))
    expected = [times.remaining("pytest", elapsed, most=100.0) for elapsed in (0.0, 0.1, 0.5)]
    assert expected == sorted(expected)
    assert expected[0] < 5.0
    assert expected[2] == pytest.approx(29.5)
    assert times.remaining("pytest", 40.0, most=100.0) == pytest.approx(40.0)


def test_probabilities_are_those_that_came_true() -> None:
    calibration, random = Calibration(), Random(1)
    assert calibration.probability("memory", 0.9) == 0.9
    for _ in range(2000):
        stated = random.random()
        calibration.learn("boasts", stated, random.random() < stated / 3)
        calibration.learn("honest", stated, random.random() < stated)
    for stated in (0.25, 0.55, 0.95):
        assert calibration.probability("boasts", stated) == pytest.approx(stated / 3, abs=0.08)
        assert calibration.probability("honest", stated) == pytest.approx(stated, abs=0.08)
    for _ in range(2000):
        calibration.learn("boasts", 0.95, True)
    assert calibration.probability("boasts", 0.95) > 0.9, "it follows a predictor that gets better"


@pytest.mark.parametrize("slowdown", [0.0, 0.01, 0.1, 1.0])
def test_it_finds_out_how_much_requests_slow_each_other_down(slowdown: float) -> None:
    random, times = Random(2), StepTimes()
    for _ in range(300):
        running = random.randint(1, 40)
        times.learn(random.randint(5, 300), running, 0.02 * (1 + slowdown * running) * random.uniform(0.8, 1.2))
    loaded, truly = 20 * times.slowdown(0.05), 20 * slowdown
    assert loaded / (1 + loaded) == pytest.approx(truly / (1 + truly), abs=0.06)


def test_where_the_load_never_varies_it_stays_with_what_is_usual() -> None:
    times = StepTimes()
    assert times.slowdown(0.05) == 0.05
    for _ in range(100):
        times.learn(100, 30, 0.05)
    assert times.slowdown(0.05) == pytest.approx(0.05)


def test_it_learns_from_turns(tmp_path: Path) -> None:
    draft = DraftRecord("memory", 0.9, 0.0, True, False)
    gate = learned(*[turn("make", 5.0, 2.0, draft)] * 100)
    assert gate.generation_seconds == pytest.approx(2.0)
    assert gate.probability(Draft("out", 0.9, "memory"), "make", 0.0) < 0.15
    assert gate.probability(Draft("out", 0.9, "rules"), "make", 0.0) == 0.9
    assert gate.tool_times.remaining("make", 0.0, most=100.0) == pytest.approx(5.0)
    gate.save(tmp_path / "gate.json")
    assert ExpectedValue.load(tmp_path / "gate.json") == gate


@pytest.mark.parametrize("content", [None, "", "[]", '{"turns": "many"}'])
def test_what_is_no_gate_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "gate.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=r"gate\.json: .*; give a file that a gate was saved to"):
        ExpectedValue.load(file)
    with pytest.raises(InputError, match="choose a file that can be written"):
        ExpectedValue().save(tmp_path / "nowhere" / "gate.json")


@given(
    st.integers(0, 40),
    st.floats(0.0, 0.5),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=40),
    st.floats(0.05, 60.0),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_least_that_a_predictor_has_to_state_is_what_the_gate_admits(
    running: int, reading: float, drafts: list[tuple[float, bool]], seconds: float
) -> None:
    gate = learned(*[turn("make", seconds)] * 20)
    gate.reading_seconds = reading
    for stated, exact in drafts:
        gate.calibration.learn("model", stated, exact)
    for _ in range(500):  # The server is as busy as ever.
        gate.admits(bet(0.5, "make", running=running))
    least = gate.least("model", "make")
    for stated in (0.999 * least, 1.001 * least + 1e-6):
        if 0 < stated <= 1 and int(10 * stated) == int(10 * least):
            probability = gate.probability(Draft("", stated, "model"), "make", 0.0)
            assert gate.admits(bet(probability, "make", running=running)) == (stated > least)
    below = [number * least / 20 for number in range(20)]
    likeliest = max(gate.probability(Draft("", stated, "model"), "make", 0.0) for stated in below) if least else 0.0
    assert not gate.admits(bet(0.999 * likeliest, "make", running=running))


def test_an_idle_server_asks_for_no_likelihood_and_a_full_one_for_much() -> None:
    gate = learned(*[turn("make", 5.0)] * 20)
    assert gate.least("model", "make") < 0.01
    for _ in range(500):
        gate.admits(bet(0.5, "make", running=64))
    assert gate.least("model", "make") > 0.7
    for _ in range(200):
        gate.calibration.learn("modest", 0.35, True)
    assert gate.least("modest", "make") == pytest.approx(0.3), "it is right whenever it says so"


class FairlySure:
    """Proposes the truth at once, and is fairly sure of it."""

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        propose(Draft("out", 0.8, "fairly sure"))

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


class Busy(ExpectedValue):
    """That of a server on which many others run."""

    def admits(self, bet: Bet) -> bool:
        return super().admits(replace(bet, running=20, seats=48))


def run(seconds: float) -> Trajectory:
    """A kind of command that is over in an instant, but for one time in a hundred."""
    gate = Busy()
    for number in range(200):
        gate.learn(turn("make", 60.0 if number % 100 == 0 else 0.001, 0.5))
    texts = ("make", "done")
    policy = ScriptedPolicy(lambda context, seed: texts[decode(context).count("\n") // 2])
    environment = ScriptedEnvironment(lambda executed: Observation("out", seconds, 0))
    speculator = Speculator(policy, ScriptedChat(), FairlySure(), Settings(gate=gate))

    async def main() -> Trajectory:
        return await rollout(speculator, Task("task", "go"), environment.open)

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_draft_that_was_held_back_gets_its_branch_when_the_tool_turns_out_slow() -> None:
    assert run(seconds=0.001).turns[0].outcome == "gated"
    slow = run(seconds=60.0).turns[0]
    assert slow.outcome == "hit"
    assert slow.hidden_seconds == pytest.approx(0.5)
    assert slow.drafts[0].seconds == 0.0
