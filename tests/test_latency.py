"""A local shell that stands for a remote one."""

from __future__ import annotations

import json
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import trio
from trio.testing import MockClock

from obsspec import InputError, Observation, Task
from obsspec.environments.latency import Latency, parse_latency, with_latency
from obsspec.types import Environment


def parsed(text: str) -> Latency:
    latency = parse_latency(text)
    assert latency is not None
    return latency


def test_seconds() -> None:
    assert parse_latency("0") is None
    assert {parsed("0.3").sample(place / 10) for place in range(10)} == {0.3}
    assert "0.3 s" in parsed("0.3").description


def test_quantiles(tmp_path: Path) -> None:
    table = {"tool_call": {"slow": {"quantiles": {"0.1": 1.0, "0.5": 10.0, "0.9": 100.0}}}}
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    latency = parsed(f"{file}:slow")
    assert [latency.sample(uniform) for uniform in (0.0, 0.1, 0.5, 0.9, 0.99)] == pytest.approx([1, 1, 10, 100, 100])
    assert latency.sample(0.3) == pytest.approx(10**0.5)
    samples = [latency.sample(place / 1000) for place in range(1000)]
    assert samples == sorted(samples)


def test_recorded(tmp_path: Path) -> None:
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps({"mine": [3, 1, 2, 0]}))
    latency = parsed(f"{file}:mine")
    assert statistics.mean(latency.sample(place / 999) for place in range(999)) == pytest.approx(1.4, abs=0.2)
    assert str(file) in latency.description


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1", "0 or more"),
        ("nan", "0 or more"),
        ("inf", "0 or more"),
        ("soon", "FILE.json:NAME"),
        ("missing.json:name", "missing.json: No such file"),
        ("{dir}/text.json:name", "not JSON"),
        ("{dir}/good.json:other", "'other' is neither"),
        ("{dir}/good.json:word", "'word' is neither"),
        ("{dir}/good.json:empty", "'empty' must hold"),
        ("{dir}/good.json:negative", "'negative' must hold"),
        ("{dir}/list.json:name", "'name' is neither"),
        ("{dir}/good.json:huge", "'huge' is neither"),
        ("{dir}/good.json:unlikely", "probabilities from 0 to 1"),
        ("{dir}/good.json:nan", "probabilities from 0 to 1"),
        ("{dir}/deep.json:name", "not JSON"),
    ],
)
def test_bad_input(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    content = {"word": "x", "empty": [], "negative": [1, -1], "huge": [10**400]}
    tables = {"unlikely": {"quantiles": {"1.5": 1}}, "nan": {"quantiles": {"nan": 1}}}
    (tmp_path / "good.json").write_text(json.dumps(content | tables))
    with pytest.raises(InputError, match=message):
        parse_latency(text.format(dir=tmp_path))


class Instant:
    async def execute(self, command: str) -> Observation:
        return Observation(command, seconds=0.0)

    async def score(self) -> float:
        return 1.0


@asynccontextmanager
async def open_instant(task: Task) -> AsyncIterator[Environment]:
    yield Instant()


def delays(seed: int, task: str) -> list[float]:
    """What each of five commands took, in virtual seconds, checked against what its observation says."""

    async def main() -> list[float]:
        latency = Latency(((0.0, 0.1), (1.0, 10.0)), "test")
        seconds = []
        async with with_latency(open_instant, latency, seed)(Task(task, "go")) as environment:
            for number in range(5):
                began = anyio.current_time()
                observation = await environment.execute(f"{number}")
                seconds.append(anyio.current_time() - began)
                assert observation.text == f"{number}"
                assert observation.seconds == pytest.approx(seconds[-1])
            assert await environment.score() == 1.0
        return seconds

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_delay_is_a_function_of_seed_task_and_place() -> None:
    assert delays(1, "a") == pytest.approx(delays(1, "a"))
    assert delays(1, "a") != pytest.approx(delays(2, "a"))
    assert delays(1, "a") != pytest.approx(delays(1, "b"))
    assert len(set(delays(1, "a"))) == 5
