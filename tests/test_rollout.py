"""What one rollout records and how it behaves, case by case, in virtual time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from obsspec import (
    Action,
    Chunk,
    Draft,
    Failure,
    InputError,
    Observation,
    PolicyError,
    Query,
    Request,
    Sampling,
    Seats,
    Settings,
    Speculator,
    Task,
    Threshold,
    Trajectory,
    rollout,
    rollouts,
)
from obsspec.speculation import Branch
from obsspec.testing import STOP, ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode, encode
from obsspec.types import Finish

TASK = Task("task", "go")


def virtually(function: Callable[[], Awaitable[Any]]) -> Any:
    return trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))


def commands(*texts: str) -> ScriptedPolicy:
    """A policy that writes these, one a turn, at 0.1 s a token. It counts turns by the lines it has read."""
    return ScriptedPolicy(lambda context, seed: texts[decode(context).count("\n") // 2])


@dataclass
class Drafts:
    """Proposes the given (seconds, draft) pairs for every query."""

    drafts: tuple[tuple[float, Any], ...]

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        for seconds, draft in self.drafts:
            await anyio.sleep(seconds)
            propose(draft)

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


def printing(text: str, seconds: float = 1.0) -> ScriptedEnvironment:
    return ScriptedEnvironment(lambda executed: Observation(text, seconds, 0))


def run(policy: ScriptedPolicy, predictor: Any, environment: ScriptedEnvironment, **settings: Any) -> Trajectory:
    speculator = Speculator(policy, ScriptedChat(), predictor, Settings(**settings))
    return virtually(lambda: rollout(speculator, TASK, environment.open))


def test_a_hit_hides_the_generation_under_the_tool() -> None:
    trajectory = run(commands("ls", "done"), Drafts(((0.2, Draft("out", 0.9, "memory")),)), printing("out"))
    first = trajectory.turns[0]
    assert first.outcome == "hit"
    assert first.hidden_seconds == pytest.approx(0.5)  # "done" and its stop token
    assert trajectory.seconds == pytest.approx(0.3 + 1.0)
    assert [(draft.predictor, draft.seconds, draft.exact) for draft in first.drafts] == [
        ("memory", pytest.approx(0.2), True)
    ]


def test_a_miss_wastes_tokens_and_costs_no_time() -> None:
    trajectory = run(commands("ls", "done"), Drafts(((0.25, Draft("other", 0.9)),)), printing("out"))
    assert trajectory.turns[0].outcome == "miss"
    assert trajectory.turns[0].wasted_tokens == 5
    assert trajectory.turns[0].hidden_seconds == 0
    assert trajectory.seconds == pytest.approx(0.3 + 1.0 + 0.5)


@pytest.mark.parametrize(
    ("drafts", "settings", "outcome"),
    [
        (((2.0, Draft("out", 0.9)),), {}, "late"),
        (((0.1, Draft("out", 0.1)),), {"gate": Threshold(0.5)}, "gated"),
        (((0.1, Draft("\ud800", 0.9)),), {}, "failed"),
        (((0.1, Draft("x" * 10_000_000, 0.9)),), {}, "failed"),
        (((0.1, "not a draft"),), {}, "failed"),
        (((0.1, Draft("out", math.nan)),), {}, "failed"),
        ((), {}, "off"),
        (((0.1, Draft("out", 0.9)),), {"depth": 0}, "off"),
        (((0.1, Draft("a", 0.9)), (0.1, Draft("out", 0.9))), {}, "miss"),
        (((0.1, Draft("a", 0.9)), (0.1, Draft("out", 0.9))), {"breadth": 2}, "hit"),
        (((0.1, Draft("a", 0.9)), (0.1, Draft("a", 0.9)), (0.1, Draft("out", 0.9))), {"breadth": 2}, "hit"),
        (((0.1, "not a draft"), (0.1, Draft("out", 0.9))), {}, "hit"),
    ],
)
def test_outcomes(drafts: Any, settings: Any, outcome: str) -> None:
    trajectory = run(commands("ls", "done"), Drafts(drafts), printing("out"), **settings)
    assert trajectory.turns[0].outcome == outcome
    assert [turn.observation and turn.observation.text for turn in trajectory.turns] == ["out", None]


def test_a_draft_that_came_true_no_longer_counts_as_uncertain() -> None:
    policy, drafts = commands(*"abcdef", "done"), Drafts(((0.1, Draft("out", 0.5)),))
    trajectory = run(policy, drafts, printing("out"), gate=Threshold(0.4))
    assert [turn.outcome for turn in trajectory.turns] == ["hit"] * 6 + ["off"]


@pytest.mark.parametrize("length", [1, 12, 40])
def test_new_weights_drop_no_branch_however_long_it_is(length: int) -> None:
    """A branch that is under way when they come is kept, and is generated once: nothing leans towards short ones."""
    plain = commands("ls", "x" * length, "done")
    asked: list[Request] = []

    class Updated:
        async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
            asked.append(request)
            return await plain.generate(request, lambda chunk: emit(replace(chunk, weight_version=version())))

    def version() -> int:
        return int((anyio.current_time() + 0.05) / 2)

    predictor, environment = Drafts(((0.2, Draft("out", 0.9)),)), printing("out", 10.0)
    speculator = Speculator(Updated(), ScriptedChat(), predictor, Settings())
    trajectory = virtually(lambda: rollout(speculator, TASK, environment.open))
    assert [turn.outcome for turn in trajectory.turns] == ["hit", "hit", "off"]
    assert len(asked) == 3
    generated = [0.5 + 0.1 * (place + 1) for place in range(length + 1)]
    assert trajectory.turns[1].generation.weight_versions == tuple(int((time + 0.05) / 2) for time in generated)


def test_a_predictor_that_raises_is_a_failed_turn() -> None:
    class Raising(Drafts):
        async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
            raise ConnectionError("no world model")

    assert run(commands("ls", "done"), Raising(()), printing("out")).turns[0].outcome == "failed"


def test_an_empty_observation_is_an_observation() -> None:
    assert run(commands("ls", "done"), Drafts(((0.1, Draft("", 0.9)),)), printing("")).turns[0].outcome == "hit"


def test_depth_runs_ahead_of_a_slow_tool() -> None:
    slow_then_quick = ScriptedEnvironment(lambda executed: Observation("out", 5.0 if len(executed) == 1 else 0.5))
    policy, drafts = commands("a", "b", "c", "done"), Drafts(((0.0, Draft("out", 1.0)),))
    sequential, one, three = (run(policy, drafts, slow_then_quick_copy(slow_then_quick), depth=d) for d in (0, 1, 3))
    assert sequential.seconds == pytest.approx(6.0 + 1.1)
    assert one.seconds == pytest.approx(0.2 + 5.0 + 0.5 + 0.5)  # Each later generation under the tool before it.
    assert three.seconds == pytest.approx(0.2 + 6.0)
    assert one.context.tokens == three.context.tokens == sequential.context.tokens


def slow_then_quick_copy(environment: ScriptedEnvironment) -> ScriptedEnvironment:
    return ScriptedEnvironment(environment._script)


def test_a_malformed_action_is_observed_without_executing() -> None:
    environment = printing("out")
    trajectory = run(commands("?", "ls", "done"), Drafts(((0.1, Draft("out", 0.9)),)), environment)
    assert environment.executed == ("ls",)
    assert [turn.outcome for turn in trajectory.turns] == ["off", "hit", "off"]
    assert trajectory.turns[0].observation == Observation("malformed")


def test_turn_and_context_limits_end_a_rollout_as_they_would_sequentially() -> None:
    for settings, end in (({"max_turns": 2}, "turns"), ({"max_context": 15}, "length")):
        for depth in (0, 3):
            trajectory = run(
                commands(*"abcdefgh", "done"),
                Drafts(((0.1, Draft("out", 0.9)),)),
                printing("out"),
                depth=depth,
                **settings,
            )
            assert trajectory.end == end
            assert trajectory.context.length <= settings.get("max_context", 4096)
            assert trajectory.context.mask[-1], "a trajectory ends with what the policy wrote"


def test_a_broken_policy_is_tried_again_from_its_tokens_and_then_raised() -> None:
    @dataclass
    class Breaking:
        policy: ScriptedPolicy
        breaks: int
        resumed: list[int]

        async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
            self.resumed.append(len(request.resume.tokens))
            if self.breaks:
                self.breaks -= 1
                emit(Chunk((encode("l") if not request.resume.tokens else encode("s")), (-0.5,)))
                raise PolicyError("connection reset")
            return await self.policy.generate(request, emit)

    def with_breaks(breaks: int) -> tuple[Trajectory, list[int]]:
        policy = Breaking(commands("ls", "done"), breaks, [])
        speculator = Speculator(policy, ScriptedChat(), None, Settings(retries=2))
        return virtually(lambda: rollout(speculator, TASK, printing("out").open)), policy.resumed

    trajectory, resumed = with_breaks(2)
    assert trajectory.turns[0].step == Action("ls")
    assert resumed == [0, 1, 2, 0]
    with pytest.raises(PolicyError, match="connection reset"):
        with_breaks(100)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_policy_that_writes_more_than_it_may_is_found(depth: int) -> None:
    class Verbose:
        async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
            emit(Chunk(encode("x" * (request.max_tokens + 1)), (0.0,) * (request.max_tokens + 1)))
            return "length"

    settings = Settings(Sampling(max_tokens=5), depth=depth)
    speculator = Speculator(Verbose(), ScriptedChat(), Drafts(((0.1, Draft("out", 1.0)),)), settings)
    with pytest.raises(ValueError, match="wrote 6 tokens where max_tokens was 5"):
        virtually(lambda: rollout(speculator, TASK, printing("out").open))


def test_a_policy_that_does_not_say_how_it_ended_is_found() -> None:
    class Silent:
        async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
            return None  # type: ignore[return-value]

    with pytest.raises(ValueError, match="returned None where it must be 'stop' or 'length'"):
        virtually(lambda: rollout(Speculator(Silent(), ScriptedChat()), TASK, printing("out").open))


@pytest.mark.parametrize("text", [None, b"out", 3])
def test_an_observation_is_text(text: Any) -> None:
    with pytest.raises(TypeError, match="takes an Observation of text"):
        virtually(lambda: rollout(Speculator(commands("ls", "done"), ScriptedChat()), TASK, printing(text).open))


def test_a_failure_on_a_branch_is_no_failure_of_the_rollout() -> None:
    @dataclass
    class NeverSpeculative:
        policy: ScriptedPolicy

        async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
            if request.priority > 0:
                raise ValueError("prompt not allowed")
            return await self.policy.generate(request, emit)

    speculator = Speculator(
        NeverSpeculative(commands("ls", "done")), ScriptedChat(), Drafts(((0.0, Draft("out", 0.9)),)), Settings()
    )
    trajectory = virtually(lambda: rollout(speculator, TASK, printing("out").open))
    assert trajectory.end == "done"
    assert trajectory.seconds == pytest.approx(0.3 + 1.0 + 0.5)


def test_predictors_learn_each_committed_observation_once_and_in_order() -> None:
    learned: list[tuple[tuple[str, ...], str, str]] = []

    class Learning(Drafts):
        def learn(self, query: Query, observation: Observation) -> None:
            learned.append((tuple(past.command for past in query.history), query.command, observation.text))

    run(commands("a", "?", "b", "done"), Learning(((0.1, Draft("wrong", 0.5)),)), printing("out"), depth=2, breadth=2)
    assert learned == [((), "a", "out"), (("a",), "b", "out")]


def test_predictors_may_read_while_the_policy_writes() -> None:
    read: list[tuple[float, str, tuple[str, ...]]] = []

    class Reading(Drafts):
        async def prepare(self, query: Query) -> None:
            began = anyio.current_time()
            try:
                await anyio.sleep_forever()
            finally:
                read.append(
                    (anyio.current_time() - began, query.command, tuple(past.command for past in query.history))
                )

    run(commands("ls", "cat x", "done"), Reading(()), printing("out"))
    seconds, asked, known = zip(*read, strict=True)
    assert seconds == pytest.approx((0.3, 0.6, 0.5))
    assert asked == ("", "", "")
    assert known == ((), ("ls",), ("ls", "cat x"))
    read.clear()
    run(commands("ls", "cat x", "done"), Reading(()), printing("out"), depth=0)
    assert read == [], "without speculation there is nothing to prepare for"


def test_three_lines_around_a_tool_call_of_ones_own() -> None:
    async def main() -> tuple[list[str], int]:
        speculator = Speculator(commands("a", "b", "done"), ScriptedChat(), Drafts(((0.1, Draft("out", 0.9)),)))
        called = []
        async with speculator.rollout("go", seed=3) as run:
            while action := await run.act():
                called.append(action.command)
                await anyio.sleep(1.0)
                run.observe(Observation("out"))
        return called, sum(turn.outcome == "hit" for turn in run.turns)

    assert virtually(main) == (["a", "b"], 2)


def test_calls_out_of_order_say_so() -> None:
    async def main() -> None:
        async with Speculator(commands("a", "done"), ScriptedChat()).rollout("go") as run:
            with pytest.raises(RuntimeError, match="call act"):
                run.observe(Observation("out"))
            await run.act()
            with pytest.raises(RuntimeError, match="observation"):
                await run.act()

    virtually(main)


def test_what_the_block_raises_comes_out_as_it_is() -> None:
    async def main() -> None:
        async with Speculator(commands("a", "done"), ScriptedChat()).rollout("go"):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        virtually(main)
    with pytest.raises(InputError, match="max_context"):
        run(commands("a"), None, printing(""), max_context=2)


@pytest.mark.parametrize("wrong", [{"depth": -1}, {"breadth": 0}, {"max_turns": 0}, {"max_context": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


def test_many_rollouts_keep_to_their_concurrency_and_isolate_failures() -> None:
    open_now = most = 0

    @asynccontextmanager
    async def environment(task: Task) -> Any:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            if task.id == "broken":
                raise OSError("no sandbox")
            yield printing("out")
        finally:
            open_now -= 1

    async def main() -> list[Trajectory | Failure]:
        speculator = Speculator(commands("a", "done"), ScriptedChat(), Drafts(((0.1, Draft("out", 0.9)),)))
        jobs = [(replace(TASK, id="broken" if place == 4 else f"task-{place}"), place) for place in range(10)]
        seen: list[Trajectory | Failure] = []
        results = await rollouts(speculator, jobs, environment, concurrency=3, finished=seen.append)
        assert sorted(seen, key=lambda result: result.seed) == results
        return results

    results = virtually(main)
    assert most == 3
    assert open_now == 0
    assert [result.seed for result in results] == list(range(10))
    assert results[4] == Failure("broken", 4, "OSError: no sandbox")


def test_what_a_result_writer_raises_ends_the_run() -> None:
    def full(result: Trajectory | Failure) -> None:
        raise OSError("no space left on device")

    speculator = Speculator(commands("a", "done"), ScriptedChat())
    with pytest.raises(OSError, match="no space left"):
        virtually(lambda: rollouts(speculator, [(TASK, 0), (TASK, 1)], printing("out").open, finished=full))


def test_it_runs_on_asyncio_too() -> None:
    policy = ScriptedPolicy(lambda context, seed: ("a", "done")[decode(context).count("\n") // 2], seconds=0.001)
    speculator = Speculator(policy, ScriptedChat(), Drafts(((0.0, Draft("out", 0.9)),)))
    trajectory = anyio.run(rollout, speculator, TASK, printing("out", 0.05).open)
    assert [turn.outcome for turn in trajectory.turns] == ["hit", "off"]


# Seats.


def test_real_work_never_waits_for_speculative_work() -> None:
    """Two rollouts on one seat: the second's first request arrives while the first rollout's branch is generating."""

    async def main() -> list[float]:
        speculator = Speculator(
            commands("a", "longer command", "done"), ScriptedChat(), Drafts(((0.0, Draft("out", 0.9)),)), seats=Seats(1)
        )
        waits = []

        async def start_after(delay: float) -> None:
            await anyio.sleep(delay)
            async with speculator.rollout("go") as run:
                began = anyio.current_time()
                await run.act()
                waits.append(anyio.current_time() - began)
                await anyio.sleep(10.0)
                run.observe(Observation("out"))
                while await run.act():
                    await anyio.sleep(1.0)
                    run.observe(Observation("out"))
                assert [turn.outcome for turn in run.turns] == ["hit", "hit", "off"]

        async with anyio.create_task_group() as group:
            group.start_soon(start_after, 0.0)
            group.start_soon(start_after, 0.65)
        return waits

    assert virtually(main) == [pytest.approx(0.2), pytest.approx(0.2)]


class RandomLengthPolicy:
    """Samples lengths anew with each request, as a real server does, and goes on where a suspended one stopped.

    Each token ends the generation with probability 1/8, whatever came before.
    """

    def __init__(self) -> None:
        self._random = Random(20261201)

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        for _ in range(len(request.resume.tokens), request.max_tokens):
            await anyio.sleep(0.1)
            token = STOP if self._random.random() < 1 / 8 else encode("a")[0]
            emit(Chunk((token,), (0.0,)))
            if token == STOP:
                return "stop"
        return "length"


def committed_lengths(depth: int) -> list[int]:
    """Lengths of committed generations of rollouts that compete for few seats, all of whose drafts are right."""

    async def main() -> list[int]:
        speculator = Speculator(
            RandomLengthPolicy(),
            ScriptedChat(),
            Drafts(((0.0, Draft("out", 1.0)),)),
            Settings(Sampling(max_tokens=1000), depth=depth, max_turns=12, max_context=100_000),
            Seats(2),
        )
        delays = Random(1)
        environment = ScriptedEnvironment(lambda executed: Observation("out", delays.expovariate(0.5)))
        jobs = [(Task(str(place), "go"), place) for place in range(400)]
        results = await rollouts(speculator, jobs, environment.open, concurrency=6)
        return [len(turn.generation.tokens) for result in results for turn in result.turns]  # type: ignore[union-attr]

    return virtually(main)


def deviations(lengths: list[int], reference: list[int]) -> float:
    """How many standard errors the mean of ``lengths`` lies below that of ``reference``."""
    error = math.sqrt(statistics.variance(lengths) / len(lengths) + statistics.variance(reference) / len(reference))
    return (statistics.mean(reference) - statistics.mean(lengths)) / error


def test_lengths_do_not_depend_on_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    sequential = committed_lengths(depth=0)
    assert abs(deviations(committed_lengths(depth=2), sequential)) < 3

    # The same with branches that are dropped, not suspended: long generations are then sampled anew.
    def drop(branch: Branch) -> None:
        suspend(branch)
        branch.generation = replace(branch.generation, tokens=(), logprobs=(), weight_versions=())

    suspend = Branch.suspend
    monkeypatch.setattr(Branch, "suspend", drop)
    assert deviations(committed_lengths(depth=2), sequential) > 4
