"""Commands that run out of time: what is proposed, how likely that is taken to be, and what it hides."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import trio
import trio.testing

from obsspec import Draft, Observation, Query, Sampling, Settings, Speculator, Task, Trajectory, rollout
from obsspec.gate import ExpectedValue, Threshold, ToolTimes
from obsspec.predictors import Cascade, Memory, Rules, TimeOuts
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode

CUT = "(no output)\n[timed out after 30 s]"


def drafts(predictor: TimeOuts, command: str) -> list[Draft]:
    proposed: list[Draft] = []
    anyio.run(predictor.predict, Query("t", "", (), command), proposed.append)
    return proposed


def seen(*observations: tuple[str, str, bool]) -> TimeOuts:
    predictor = TimeOuts()
    for command, text, timed_out in observations:
        predictor.learn(Query("t", "", (), command), Observation(text, 30.0, timed_out=timed_out))
    return predictor


def test_nothing_is_proposed_before_the_first_time_out() -> None:
    assert drafts(seen(("make", "built", False)), "make") == []


def test_what_its_own_kind_printed_when_it_timed_out_is_likelier_than_what_others_did() -> None:
    others = [("find /", f"{n}\n[timed out after 30 s]", True) for n in range(20)]
    predictor = seen(*others, *[("make -j2", CUT, True)] * 5)
    (of_make,) = drafts(predictor, "make all")
    assert (of_make.text, of_make.if_timed_out) == (CUT, True)
    assert of_make.probability > 0.7
    (of_find,) = drafts(predictor, "find .")
    assert of_find.probability < 0.1


def test_it_remembers_a_bounded_number() -> None:
    predictor = seen(*((f"program{n}", f"{n}", True) for n in range(3000)))
    assert len(predictor._kinds) == 1000
    assert drafts(predictor, "program2999 x")[0].text == "2999"


def test_the_longer_a_command_runs_the_likelier_a_time_out() -> None:
    times = ToolTimes()
    for number in range(100):
        slow = number % 10 == 0
        times.learn("pytest", 30.0 if slow else 0.1 * (number % 10), timed_out=slow)
        times.learn("ls", 0.01)
    chances = [times.timing_out("pytest", elapsed) for elapsed in (0.0, 0.5, 1.0, 20.0)]
    assert chances == sorted(chances)
    assert chances[0] < 0.25
    assert chances[2] > 0.8
    assert times.timing_out("ls", 0.0) < 0.05
    assert ToolTimes().timing_out("ls", 5.0) == 0.0


def test_a_gate_keeps_what_it_knows_of_time_outs(tmp_path: Path) -> None:
    gate = ExpectedValue()
    gate.tool_times.learn("make", 30.0, timed_out=True)
    gate.save(tmp_path / "gate.json")
    draft = Draft(CUT, 1.0, "timeouts", if_timed_out=True)
    assert ExpectedValue.load(tmp_path / "gate.json").probability(draft, "make", 1.0) == pytest.approx(0.6)
    assert Threshold(0.1).probability(draft, "make", 1.0) == 0.0


# With the engine, in virtual time.

TURNS = 30


def script(tokens: tuple[int, ...], seed: int) -> str:
    turn = decode(tokens).count("\n") // 2
    return f"work {turn:02}"


def timed_out(commands: tuple[str, ...]) -> bool:
    return len(commands) % 5 == 0


def tool(commands: tuple[str, ...]) -> Observation:
    """Every fifth command hangs, and the others print something new at once."""
    if timed_out(commands):
        return Observation("hung", 30.0, timed_out=True)
    return Observation(f"fine {len(commands) * 7919}", 0.1, 0)


def run(predictor: TimeOuts | Cascade | None, depth: int = 1) -> Trajectory:
    settings = Settings(Sampling(max_tokens=20), depth=depth, max_turns=TURNS, max_context=10**6, gate=ExpectedValue())
    policy = ScriptedPolicy(script, seconds=0.5)  # 4 s each
    speculator = Speculator(policy, ScriptedChat(), predictor, settings)

    async def main() -> Trajectory:
        return await rollout(speculator, Task("t", "go"), ScriptedEnvironment(tool).open, 0)

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_generation_is_hidden_under_a_command_that_hangs(depth: int) -> None:
    alone = TimeOuts()
    plain, speculative = run(None, depth=0), run(alone, depth)
    assert [turn.observation for turn in plain.turns] == [turn.observation for turn in speculative.turns]
    hangs = [turn for turn in speculative.turns if turn.observation and turn.observation.timed_out]
    assert sum(turn.outcome == "hit" for turn in hangs) >= len(hangs) - 2, "all but the first few"
    assert speculative.seconds < plain.seconds - 4.0 * (len(hangs) - 2.5)
    wrong = [draft for turn in speculative.turns for draft in turn.drafts if draft.admitted and not draft.exact]
    assert len(wrong) == 0, "a command that is over at once is not taken for one that hangs"


def test_in_a_cascade_it_takes_nothing_from_the_others() -> None:
    cascade = Cascade({"rules": Rules(), "memory": Memory(), "timeouts": TimeOuts()})
    alone, together = run(TimeOuts()), run(cascade)
    assert together.seconds <= alone.seconds + 1e-6
