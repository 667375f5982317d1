"""The lab: its simulated server against cases computed by hand, whole simulations against formulas, and its files."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import anyio
import pyarrow.parquet
import pytest
import trio
import trio.testing

from obsspec import Context, Generation, InputError, Request, Sampling, Trajectory, rollouts
from obsspec.lab.report import rows
from obsspec.lab.run import Figures, Point, grid, run, simulate
from obsspec.lab.schedules import SCHEDULES
from obsspec.lab.server import Costs, Scheduling, SimulatedPolicyServer, serving
from obsspec.lab.workload import Distribution, Workload, merged, names, read, validated
from obsspec.lab.world import Opening, World
from obsspec.types import Action, Chunk, Finish

STOP = -1

# The server.


def request(
    seed: int = 0,
    resume: int = 0,
    priority: int = 0,
    context: Context | None = None,
    max_tokens: int = 1000,
    rollout: str | None = None,
) -> Request:
    """A request for the generation of rollout ``seed``, after ``resume`` tokens."""
    resumed = Generation((1,) * resume, (0.0,) * resume, (0,) * resume)
    given = context or Context.of((7,))
    name = rollout or str(seed)
    return Request(given, Sampling(), max_tokens, (STOP,), seed, 0, resumed, priority, name)


@dataclass
class Client:
    """Sends requests to a server and notes what became of each."""

    server: SimulatedPolicyServer
    ended: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    finish: dict[str, Finish] = field(default_factory=dict)
    start: float = field(default_factory=trio.current_time)

    async def send(self, name: str, request: Request, at: float = 0.0, until: float = math.inf) -> None:
        """From one virtual second to another, at which it is aborted."""
        await trio.sleep_until(self.start + at)
        chunks: list[Chunk] = []
        with anyio.CancelScope(deadline=self.start + until):
            self.finish[name] = await self.server.generate(request, chunks.append)
            self.ended[name] = trio.current_time() - self.start
            assert chunks[-1].tokens[-1] == STOP or self.finish[name] == "length"
        self.tokens[name] = sum(len(chunk.tokens) for chunk in chunks)


def served(
    costs: Costs,
    lengths: dict[int, int],
    requests: dict[str, tuple[Request, dict[str, float]]],
    scheduling: Scheduling = "fcfs",
) -> Client:
    """Runs requests, each with its times, against a server whose generations have ``lengths``, by seed."""

    async def run() -> Client:
        server = SimulatedPolicyServer(costs, lambda request: (lengths[request.seed], STOP), scheduling)
        client = Client(server)
        async with serving(server), anyio.create_task_group() as group:
            for name, (each, times) in requests.items():
                group.start_soon(lambda name=name, each=each, times=times: client.send(name, each, **times))
        return client

    return virtually(run)


def virtually(function: Callable[[], Awaitable[Any]]) -> Any:
    return trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))


def test_two_requests_share_steps() -> None:
    """Ten steps of 1 + 2 * 0.5 s together, then ten more of 1 + 0.5 s for the longer one."""
    client = served(Costs(1.0, 0.5), {0: 10, 1: 20}, {"short": (request(0), {}), "long": (request(1), {})})
    assert client.ended == {"short": pytest.approx(20.0), "long": pytest.approx(35.0)}
    assert client.tokens == {"short": 10, "long": 20}
    assert client.server.busy_seconds == pytest.approx(35.0)
    assert client.server.tokens == 30


def test_who_comes_during_a_step_joins_at_its_end() -> None:
    """Alone until 3.0 (two steps of 1.5), both until the second has its two tokens at 7.0, then one step alone."""
    client = served(Costs(1.0, 0.5), {0: 5, 1: 2}, {"first": (request(0), {}), "second": (request(1), {"at": 2.0})})
    assert client.ended == {"first": pytest.approx(8.5), "second": pytest.approx(7.0)}


def test_first_come_first_served_or_by_priority() -> None:
    requests = {
        "running": (request(0), {}),
        "speculative": (request(1, priority=1), {"at": 0.1}),
        "real": (request(2), {"at": 0.2}),
    }
    lengths = {0: 4, 1: 4, 2: 4}
    assert served(Costs(1.0, seats=1), lengths, requests).ended == {"running": 4, "speculative": 8, "real": 12}
    by_priority = served(Costs(1.0, seats=1), lengths, requests, "priority").ended
    assert by_priority == {"running": 4, "real": 8, "speculative": 12}


def test_an_abort_frees_the_seat_at_the_end_of_the_step() -> None:
    requests = {"aborted": (request(0), {"until": 2.5}), "next": (request(1), {"at": 1.0})}
    client = served(Costs(1.0, seats=1, stream_interval=1), {0: 100, 1: 4}, requests)
    assert client.ended == {"next": 7.0}
    assert client.tokens == {"aborted": 2, "next": 4}


def test_an_aborted_request_no_longer_slows_the_others_down() -> None:
    requests = {"aborted": (request(0), {"until": 3.5}), "other": (request(1), {})}
    assert served(Costs(1.0, 0.5), {0: 100, 1: 4}, requests).ended == {"other": pytest.approx(2 * 2.0 + 2 * 1.5)}


def test_one_that_is_aborted_while_it_waits_never_runs() -> None:
    requests = {
        "running": (request(0), {}),
        "aborted": (request(1), {"at": 1.0, "until": 2.0}),
        "next": (request(2), {"at": 1.5}),
    }
    client = served(Costs(1.0, seats=1), {0: 4, 1: 100, 2: 4}, requests)
    assert client.ended == {"running": 4, "next": 8}
    assert client.tokens["aborted"] == 0
    assert client.server.busy_seconds == 8


def test_an_idle_server_is_not_busy() -> None:
    requests = {"aborted": (request(0), {"until": 2.5}), "later": (request(1), {"at": 50.0})}
    client = served(Costs(1.0), {0: 100, 1: 4}, requests)
    assert client.ended == {"later": 54}
    assert client.server.busy_seconds == 3 + 4


def test_only_what_the_rollout_has_not_read_is_prefilled() -> None:
    """At 10 tokens a second: 100 tokens, then an observation's 20, and nothing for what the server wrote itself."""
    prompt = Context.of((7,) * 100)
    first = prompt.sampled((1, 1, 1, STOP), (0.0,) * 4).given((8,) * 20)
    again = prompt.sampled((1, 1, 1, STOP), (0.0,) * 4).given((8,) * 20)  # Another object, the same tokens.
    other = prompt.sampled((1, 1, 1, STOP), (0.0,) * 4).given((9,) * 30)
    requests = {
        "prompt": (request(0, context=prompt), {}),
        "observation": (request(0, context=first), {"at": 100.0}),
        "again": (request(0, context=again), {"at": 200.0}),
        "other": (request(0, context=other), {"at": 300.0}),
        "other rollout": (request(0, context=prompt, rollout="x"), {"at": 400.0}),
    }
    client = served(Costs(1.0, prefill_tokens_per_second=10), {0: 4}, requests)
    assert client.ended == {"prompt": 14, "observation": 106, "again": 204, "other": 307, "other rollout": 414}


def test_decoding_stands_still_while_another_request_is_prefilled() -> None:
    requests = {
        "running": (request(0, context=Context.of((7,) * 10)), {}),
        "arriving": (request(1, context=Context.of((7,) * 30)), {"at": 3.5}),
    }
    client = served(Costs(1.0, prefill_tokens_per_second=10), {0: 5, 1: 2}, requests)
    assert client.ended == {"running": pytest.approx(1 + 3 + 3 + 2), "arriving": pytest.approx(4 + 3 + 2)}


def test_a_resumed_request_goes_on_where_it_was() -> None:
    """Aborted in its sixth step, with the tokens of four streamed; it needs six more, and prefills nothing again."""
    context = Context.of((7,) * 10)
    requests = {
        "suspended": (request(0, context=context), {"until": 6.5}),
        "resumed": (request(0, resume=4, context=context), {"at": 10.0}),
    }
    client = served(Costs(1.0, prefill_tokens_per_second=10, stream_interval=4), {0: 10}, requests)
    assert client.tokens == {"suspended": 4, "resumed": 6}
    assert client.ended == {"resumed": 16}


def test_a_generation_ends_with_its_token_budget() -> None:
    client = served(Costs(1.0), {0: 10}, {"cut": (request(0, max_tokens=3), {})})
    assert (client.finish, client.tokens, client.ended) == ({"cut": "length"}, {"cut": 3}, {"cut": 3})


# Whole simulations.


def workload(**changes: Any) -> Workload:
    content = {
        "turns": 6,
        "rollouts": 8,
        "groups": 2,
        "tool": {"seconds": {"mean": 1.0, "sigma": 1.0}, "overhead": 0.1},
        "generation": {"seconds": {"mean": 0.5, "sigma": 0.6}},
        "predictor": {"accuracy": 0.7, "delay_fraction": 0.1},
        "server": {"step_seconds": 0.01},
    }
    return validated(merged(content, changes), "test")


def trajectories(workload: Workload) -> list[Trajectory]:
    schedule = SCHEDULES[workload.schedule]
    world = World(schedule.settle(workload))

    async def run() -> Any:
        async with serving(schedule.server(world)) as server:
            return await rollouts(schedule.speculator(world, server), world.jobs(), Opening(world), workload.active)

    return virtually(run)


def generated(trajectory: Trajectory) -> list[float]:
    """Seconds of each generation on a server whose steps take 0.01 s."""
    return [0.01 * len(turn.generation.tokens) for turn in trajectory.turns]


def tools(trajectory: Trajectory) -> list[float]:
    return [turn.executing.seconds for turn in trajectory.turns if turn.executing is not None]


def test_sequential_latency_is_the_sum_of_its_parts() -> None:
    for each in trajectories(workload(schedule="sequential", concurrency=1)):
        assert each.seconds == pytest.approx(sum(generated(each)) + sum(tools(each)))
        assert len(each.turns) == 6
    figures = simulate(workload(schedule="sequential", concurrency=1))
    assert figures.makespan == pytest.approx(8 * figures.mean_latency)
    assert figures.busy_seconds == pytest.approx(0.01 * figures.kept_tokens)
    assert (figures.attempted, figures.hits, figures.hidden_seconds, figures.wasted_tokens) == (0, 0, 0, 0)


def test_the_sequential_schedule_does_not_speculate_whatever_depth_a_workload_has() -> None:
    assert simulate(workload(schedule="sequential", depth=2)) == replace(
        simulate(workload(schedule="sequential")), cpu_seconds=ANY
    )
    assert simulate(workload(schedule="sequential", depth=2)).hidden_seconds == 0


def test_clairvoyance_at_depth_1_hides_the_smaller_of_generation_and_tool() -> None:
    sequential = trajectories(workload(schedule="sequential", concurrency=1))
    clairvoyant = trajectories(workload(schedule="clairvoyant", concurrency=1, depth=1))
    for one, other in zip(sequential, clairvoyant, strict=True):
        assert one.context.tokens == other.context.tokens
        assert [turn.outcome for turn in other.turns] == ["hit"] * 5 + ["off"]
        hidden = sum(map(min, generated(one)[1:], tools(one)[:-1]))
        assert one.seconds - other.seconds == pytest.approx(hidden)


def test_every_schedule_collects_the_same_trajectories() -> None:
    tight = {"server": {"seats": 3, "step_seconds_per_sequence": 0.002, "prefill_tokens_per_second": 5000}}
    expected = [each.context.tokens for each in trajectories(workload(schedule="sequential", **tight))]
    for schedule in SCHEDULES:
        collected = trajectories(workload(schedule=schedule, breadth=2, predictor={"further": [0.1]}, **tight))
        assert [each.context.tokens for each in collected] == expected


def test_gate_and_budget_may_be_others_than_the_schedules() -> None:
    full = {"rollouts": 32, "server": {"seats": 4, "step_seconds_per_sequence": 0.002}, "predictor": {"accuracy": 0.3}}
    own = simulate(workload(**full))
    unguarded = simulate(workload(**full, gate="everything", budget=False, depth=1))
    reference = simulate(workload(**full, schedule="reference"))
    assert unguarded.wasted_tokens > own.wasted_tokens
    as_reference = merged(full, {"server": {"scheduling": "fcfs"}})
    again = simulate(workload(**as_reference, gate="everything", budget=False, depth=1))
    assert replace(again, cpu_seconds=0.0) == replace(reference, cpu_seconds=0.0)


def test_the_same_workload_gives_the_same_figures() -> None:
    shared = {"predictor": {"server": "shared"}, "server": {"seats": 3, "step_seconds_per_sequence": 0.002}}
    for changes in ({}, shared, {"rollouts": 32, "server": {"seats": 4}}):
        first, second = (replace(simulate(workload(**changes)), cpu_seconds=0.0) for _ in range(2))
        assert first == second
    assert replace(simulate(workload(seed=1)), cpu_seconds=0.0) != replace(simulate(workload()), cpu_seconds=0.0)


def test_the_predictor_is_right_as_often_as_it_says() -> None:
    figures = simulate(workload(rollouts=200, concurrency=4, predictor={"accuracy": 0.7, "delay_seconds": 0.0}))
    assert figures.hits / figures.attempted == pytest.approx(0.7, abs=0.03)
    slow_are_hard = simulate(workload(predictor={"accuracy": [[0.0, 1.0], [0.5, 0.0]], "delay_seconds": 0.0}))
    quick = sum(each < 0.5 for one in trajectories(workload(schedule="sequential")) for each in tools(one)[:-1])
    assert slow_are_hard.hits == quick > 0
    assert simulate(workload(schedule="harmful")).hits == 0


def test_a_world_model_that_is_sure_knows_which_of_its_drafts_are_exact() -> None:
    """As many are exact, whatever it says of each; of those that it is sure of, as many as it says."""
    for concentration in (math.inf, 1.0, 0.1):
        changes = {"accuracy": 0.6, "further": [0.2], "concentration": concentration, "delay_seconds": 0.0}
        world = World(workload(rollouts=400, predictor=changes))
        drafts = [world.drafts(task.id, turn) for task, _ in world.jobs() for turn in range(6)]
        assert sum(exact for (_, exact), _ in drafts) / len(drafts) == pytest.approx(0.6, abs=0.03)
        assert sum(exact for _, (_, exact) in drafts) / len(drafts) == pytest.approx(0.2, abs=0.03)
        sure = [exact for (chance, exact), _ in drafts if chance > 0.9]
        assert len(sure) / len(drafts) == pytest.approx({math.inf: 0.0, 1.0: 0.31, 0.1: 0.57}[concentration], abs=0.03)
        assert sum(sure) >= 0.95 * len(sure)


def test_the_kind_of_a_command_tells_how_long_it_runs_as_far_as_it_is_said_to() -> None:
    spread = {}
    for predictability in (0.0, 0.5, 1.0):
        tool = {"kinds": 4, "predictability": predictability}
        commands: dict[str, list[float]] = {}
        for trajectory in trajectories(workload(rollouts=100, turns=12, schedule="sequential", tool=tool)):
            for turn in trajectory.turns:
                assert isinstance(turn.step, Action) and turn.executing is not None
                commands.setdefault(turn.step.command, []).append(turn.executing.seconds)
        assert all(len(seconds) == pytest.approx(300, abs=60) for seconds in commands.values())
        means = sorted(sum(seconds) / len(seconds) for seconds in commands.values())
        spread[predictability] = means[-1] / means[0]
    assert spread[0.0] < 1.3 < spread[0.5] < spread[1.0]


def test_a_world_model_with_one_seat_answers_one_at_a_time() -> None:
    alone = {"turns": 2, "tool": {"seconds": 1.0, "overhead": 0}, "generation": {"seconds": 0.01}}
    crowded = workload(**alone, predictor={"accuracy": 1.0, "delay_seconds": 0.3, "seats": 1})
    assert simulate(crowded).drafted == 3  # At 0.3, 0.6 and 0.9 s; the other five come too late.


def test_a_world_model_on_the_policys_server_takes_its_time() -> None:
    """The tools leave the server idle but for it: 50 steps for each of the two questions."""
    shared = workload(
        rollouts=1,
        groups=1,
        turns=3,
        schedule="reference",
        tool={"seconds": 2.0},
        predictor={"accuracy": 0.0, "delay_seconds": 0.5, "server": "shared"},
    )
    own = simulate(merged_with(shared, predictor={"server": "own"}))
    assert simulate(shared).busy_seconds == pytest.approx(own.busy_seconds + 2 * 0.5)


def merged_with(workload: Workload, **changes: Any) -> Workload:
    return validated(merged(workload.model_dump(exclude_none=True, exclude_defaults=True), changes), "test")


def test_rollouts_of_one_group_are_slow_together() -> None:
    world = World(workload(tool={"seconds": 1.0, "overhead": 0.0, "group_sigma": 1.0}))
    seconds = [world.tool_seconds(task.id, 0) for task, _ in world.jobs()]
    assert len(set(seconds[:4])) == len(set(seconds[4:])) == 1
    assert seconds[0] != seconds[4]


def test_load_is_a_fraction_of_what_fills_the_seats() -> None:
    """Ten seats, generations of 1 s at a full batch and tools of 3 s: forty rollouts keep ten generating."""
    full = {"generation": {"tokens": 50}, "tool": {"seconds": 3.0, "overhead": 0.0}, "rollouts": 100}
    server = {"server": {"seats": 10, "step_seconds_per_sequence": 0.001}}
    assert workload(**full, **server, load=1.0).active == 40
    assert workload(**full, **server, load=0.5).active == 20


# Configurations.


@pytest.mark.parametrize("name", names())
def test_shipped_workloads_are_sound(name: str) -> None:
    shipped = validated(read(name), name)
    assert shipped.tool.mean_seconds > 0
    figures = simulate(shipped.model_copy(update={"rollouts": 2, "turns": 3}))
    assert figures.tool_calls == 6


def test_distributions(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text('{"tool_call": {"mine": {"quantiles": {"0.1": 1, "0.9": 100}}}}')
    of_file = Distribution.model_validate({"file": str(tmp_path / "times.json"), "name": "mine"})
    of_table = Distribution.model_validate({"quantiles": {"0.1": 1, "0.9": 100}})
    for each in (of_file, of_table):
        assert [each.sample(uniform) for uniform in (0.0, 0.5, 0.95)] == [1, pytest.approx(10), 100]
    assert Distribution.model_validate({"recorded": [3, 1, 2]}).sample(0.5) == 2
    lognormal = Distribution.model_validate({"mean": 2.0, "sigma": 0.5})
    assert lognormal.sample(0.5) == pytest.approx(2.0 * math.exp(-0.125))
    assert sum(lognormal.sample((each + 0.5) / 1000) for each in range(1000)) / 1000 == pytest.approx(2.0, rel=0.01)
    assert Distribution.model_validate(0.3).sample(0.9) == Distribution.model_validate(0.3).average == 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turn": 3}, "turn: no such key; did you mean turns?"),
        ({"predictor": {"acuracy": 0.5}}, "predictor.acuracy: no such key; did you mean accuracy?"),
        ({"tool": {"seconds": {"median": 1.0}}}, "tool.seconds.median: no such key; did you mean mean?"),
        ({"server": {"xyz": 1}}, "server.xyz: no such key; known are step_seconds, "),
        ({"turns": 0}, "turns: "),
        ({"tool": {"seconds": {"mean": 1.0, "recorded": [1.0]}}}, "tool.seconds: give a number, or exactly one of"),
        ({"tool": {"seconds": {"recorded": []}}}, "tool.seconds: there must be at least one number"),
        ({"tool": {"seconds": {"quantiles": {"1.5": 1.0}}}}, "tool.seconds: quantiles must have probabilities"),
        ({"predictor": {"accuracy": 1.5}}, "predictor: accuracy must be within 0 and 1"),
        ({"load": 9.0, "server": {"seats": 9}}, "the workload: load 9 is 259 rollouts at once: give at least as many"),
        ({"load": 0.5}, "the workload: load is a fraction of the server's seats: give server.seats"),
    ],
)
def test_what_is_wrong_with_a_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        workload(**changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("test: ")


# Grids, and the command line.

TINY = """
base = "h100-8b"
turns = 3
rollouts = 4

[grid]
schedule = ["sequential", "obsspec"]
load = [0.01, 0.05]
predictor.accuracy = [0.5, [[0.0, 0.9], [1.0, 0.2]]]
"""


def obsspec(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from obsspec.cli import main; main()", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)


def test_a_grid_is_the_product_of_its_lists(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    points = grid(str(tmp_path / "tiny.toml"))
    assert len(points) == 8
    first, last = points[0], points[-1]
    assert first.keys == {"schedule": "sequential", "load": 0.01, "predictor.accuracy": 0.5}
    assert (last.workload.schedule, last.workload.load, last.workload.concurrency) == ("obsspec", 0.05, None)
    assert last.workload.predictor.chance(2.0) == 0.2
    assert [point.workload.schedule for point in grid("paper-8b")] == list(SCHEDULES)


def test_a_run_writes_a_table_a_file_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    finished = obsspec("lab", "run", tmp_path / "tiny.toml", "--output", tmp_path / "out", "--json")
    assert finished.returncode == 0, finished.stderr
    printed = json.loads(finished.stdout)["points"]
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "points.parquet").to_pylist()
    assert len(rows) == len(printed) == 8
    assert [row["mean_latency"] for row in rows] == [row["mean_latency"] for row in printed]
    assert [row["latency_ratio"] for row in rows[:4]] == [1.0] * 4
    assert {row["predictor.accuracy"] for row in rows} == {"0.5", "[[0.0, 0.9], [1.0, 0.2]]"}
    assert "plotly" in (tmp_path / "out" / "points.html").read_text()
    assert "sequential" in obsspec("lab", "run", tmp_path / "tiny.toml", "--processes", "1").stdout
    listed = obsspec("lab", "list").stdout
    assert all(name in listed for name in (*names(), *SCHEDULES))


def test_what_comes_out_is_not_named_like_what_goes_in() -> None:
    """Else a grid over it could not be told apart, and its points would be compared with one another."""
    assert not Figures.__dataclass_fields__.keys() & Workload.model_fields.keys()
    points = [Point({"rollouts": rollouts}, workload(rollouts=rollouts, schedule="sequential")) for rollouts in (2, 4)]
    assert [row["latency_ratio"] for row in rows(points, run(points, lambda: None))] == [1.0, 1.0]


def test_an_interrupted_grid_goes_on(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    command = ("lab", "run", tmp_path / "tiny.toml", "--output", tmp_path / "out", "--json")
    whole = obsspec(*command)
    kept = tmp_path / "out" / "points.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    assert len(lines) == 6  # Of eight points: sequential rollouts are the same whatever the predictor.
    kept.write_text("".join(lines[:2]) + lines[2][:20])
    assert obsspec(*command).stdout.count('"kept_tokens"') == 8
    assert kept.read_text().splitlines(keepends=True)[:2] == lines[:2]
    again = obsspec(*command)  # All there: not even the CPU seconds change.
    assert [without_cpu(row) for row in rows_of(again)] == [without_cpu(row) for row in rows_of(whole)]
    assert rows_of(again) == rows_of(obsspec(*command))
    kept.write_text("my notes\n")
    refused = obsspec(*command)
    assert (refused.returncode, "points.jsonl, line 1" in refused.stderr) == (2, True)
    assert kept.read_text() == "my notes\n"


def rows_of(finished: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)["points"]


def without_cpu(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "cpu_seconds"}


@pytest.mark.parametrize("above", [{"mean": 3.0}, {"sigma": 0.5}, {"mean": 3.0, "sigma": 0.5}])
def test_a_lognormal_distribution_may_change_in_part(above: dict[str, float]) -> None:
    changed = workload(tool={"seconds": above}).tool.seconds
    assert (changed.mean, changed.sigma) == (above.get("mean", 1.0), above.get("sigma", 1.0))
    assert workload(tool={"seconds": {"recorded": [2.0]}}).tool.seconds.mean is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("turns =", "not TOML"),
        ('base = "paper"', "base: no workload 'paper'; take one of copilot"),
        ('base = "paper-8b"\nschedule = "best"', "schedule: no 'best'; take one of sequential"),
        ('base = "paper-8b"\n[grid]\nturns = 3', "grid.turns: make it a list of values"),
        ('base = "paper-8b"\n[grid]\nserver.seat = [3]', "server.seat: no such key; did you mean seats?"),
        ('base = "paper-8b"\nserver = 3', "server: "),
        ('base = "paper-8b"\ngrid = 3', "grid: make it a table"),
        ('base = "paper-8b"\nserver.seats = 2.5', "server.seats: seats are a whole number"),
        ('base = "paper-8b"\ntool.seconds = {file = "none.json", name = "x"}', "none.json: No such file"),
    ],
)
def test_a_bad_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        grid(str(tmp_path / "bad.toml"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_name_is_one_line_of_the_command() -> None:
    finished = obsspec("lab", "run", "paper-9b")
    assert finished.returncode == 2
    assert finished.stderr.startswith(
        "obsspec: paper-9b: No such file or directory; give a TOML file or one of copilot"
    )


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text('base = "paper-8b"\nrollouts = 10000\n[grid]\nseed = [0, 1]')
    program = [sys.executable, "-c", "from obsspec.cli import main; main()", "lab", "run", tmp_path / "long.toml"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        deadline = time.monotonic() + 60
        while not (busy := workers(running.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        _, complaint = running.communicate(timeout=60)
    assert running.returncode == 130
    assert complaint.startswith("obsspec: interrupted")
    assert busy and not workers(running.pid)


def workers(session: int) -> list[str]:
    """The simulating processes of a session that are alive."""
    command = ["ps", "-ww", "-o", "stat=", "-o", "args=", "-s", str(session)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if "spawn_main" in line and not line.startswith("Z")]
