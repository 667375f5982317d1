"""A world model on several servers, which break down, hang and come back. Stand-ins, on real sockets."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import anyio
import pytest

from http_server import Exchange, serve, until
from obsspec.background import background
from obsspec.context import Context
from obsspec.errors import InputError
from obsspec.policies.replicas import Replicas
from obsspec.types import Chunk, Generation, PolicyError, Request, Sampling

ROLLOUTS = [f"rollout {number}" for number in range(100)]


class FakeServer:
    """A vLLM server whose model says the same token again and again."""

    def __init__(self) -> None:
        self.state: Literal["there", "away", "hung", "refusing"] = "there"
        self.url = ""
        self.longest = 4096
        self.asked = 0
        """Requests of any kind."""
        self.served: list[str] = []
        """Of every completion, the rollout."""
        self.go = anyio.Event()
        """What it waits for after the first token."""
        self.go.set()

    async def __call__(self, exchange: Exchange) -> None:
        self.asked += 1
        if self.state == "hung":
            await anyio.sleep_forever()
        elif self.state == "away":
            return  # The connection closes.
        elif exchange.path == "/v1/models":
            await exchange.json({"data": [{"id": "model", "max_model_len": self.longest}]})
        elif self.state == "refusing":
            await exchange.json({"error": {"message": "too long"}}, 400)
        else:
            await self._complete(exchange)

    async def _complete(self, exchange: Exchange) -> None:
        self.served.append(unquote(exchange.headers["x-session-id"]))
        for left in reversed(range(exchange.body["max_tokens"])):
            choice = {"token_ids": [1], "logprobs": {"token_logprobs": [0.0]}}
            await exchange.event({"choices": [choice | {"finish_reason": None if left else "length"}]})
            if left:
                await self.go.wait()
            if self.state == "away":
                return
        await exchange.end()


@asynccontextmanager
async def serving(count: int) -> AsyncIterator[list[FakeServer]]:
    fakes = [FakeServer() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            fake.url = await stack.enter_async_context(serve(fake))
        yield fakes


@asynccontextmanager
async def connected(*fakes: FakeServer) -> AsyncIterator[Replicas]:
    async with Replicas.connect([fake.url for fake in fakes], every=0.02) as replicas:
        yield replicas


def request(rollout: str, max_tokens: int = 1) -> Request:
    return Request(Context.of((5, 6)), Sampling(), max_tokens, (), seed=0, turn=0, rollout=rollout)


def ignore(chunk: Chunk) -> None:
    pass


async def homes(replicas: Replicas, *fakes: FakeServer) -> dict[str, FakeServer]:
    """Where each rollout is served now."""
    found: dict[str, FakeServer] = {}
    for rollout in ROLLOUTS:
        before = [len(fake.served) for fake in fakes]
        await replicas.generate(request(rollout), ignore)
        (found[rollout],) = (fake for fake, count in zip(fakes, before, strict=True) if rollout in fake.served[count:])
    return found


@pytest.mark.anyio
async def test_rollouts_spread_and_each_stays_where_it_is_in_every_process() -> None:
    async with serving(3) as fakes, connected(*fakes) as replicas:
        first = await homes(replicas, *fakes)
        assert min(Counter(first.values()).values()) >= 3 and len(set(first.values())) == 3
        assert await homes(replicas, *fakes) == first
        for fake in fakes:
            fake.served.clear()
        program = (
            "import sys, anyio, test_replicas as here\n"
            "async def main():\n"
            "    async with here.Replicas.connect(sys.argv[1:]) as replicas:\n"
            "        for rollout in here.ROLLOUTS:\n"
            "            await replicas.generate(here.request(rollout), here.ignore)\n"
            "anyio.run(main)"
        )
        environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parent)}
        urls = [fake.url for fake in reversed(fakes)]
        await anyio.run_process([sys.executable, "-c", program, *urls], env=environment, stderr=None)
        assert {rollout: fake for fake in fakes for rollout in fake.served if rollout} == first


@pytest.mark.anyio
async def test_the_rollouts_of_a_server_that_goes_away_spread_and_come_back(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(3) as fakes, connected(*fakes) as replicas:
        first = await homes(replicas, *fakes)
        leaving, *others = fakes
        leaving.state = "away"
        moved = await homes(replicas, *fakes)
        assert all(moved[rollout] is home for rollout, home in first.items() if home is not leaving)
        assert {moved[rollout] for rollout, home in first.items() if home is leaving} == set(others)
        asked = leaving.asked
        await until(lambda: leaving.asked >= asked + 5)  # It is tried again and again, and spoken of once.
        (message,) = caplog.messages
        assert message.startswith(f"world model server {leaving.url} is away") and "\n" not in message
        leaving.state = "there"
        await until(lambda: len(caplog.messages) == 2)
        assert caplog.messages[1] == f"world model server {leaving.url} is there now"
        assert await homes(replicas, *fakes) == first


@pytest.mark.anyio
async def test_a_request_that_has_tokens_is_resumed_elsewhere() -> None:
    async with serving(2) as fakes, connected(*fakes) as replicas:
        for fake in fakes:
            fake.go = anyio.Event()
        chunks: list[Chunk] = []

        async def break_down() -> None:
            await until(lambda: bool(chunks))
            (home,) = (fake for fake in fakes if "rollout" in fake.served)
            home.state = "away"
            for fake in fakes:
                fake.go.set()

        async with background() as tasks:
            tasks.start_soon(break_down)
            with pytest.raises(PolicyError):
                await replicas.generate(request("rollout", 3), chunks.append)
        assert [chunk.tokens for chunk in chunks] == [(1,)]
        resumed = replace(request("rollout", 3), resume=Generation((1,), (0.0,), (0,)))
        assert await replicas.generate(resumed, chunks.append) == "length"
        assert len(chunks) == 3
        assert sorted(fake.served.count("rollout") for fake in fakes) == [1, 1]


@pytest.mark.anyio
async def test_a_server_that_hangs_loses_its_requests_to_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("obsspec.policies.http._ANSWER_SECONDS", 2.0)
    async with serving(2) as fakes, connected(*fakes) as replicas:
        first = await homes(replicas, *fakes)
        hung, other = fakes
        hung.state = "hung"
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:  # All are on their way before it is known.
                for rollout in ROLLOUTS:
                    tasks.start_soon(replicas.generate, request(rollout), ignore)
        assert Counter(other.served) == Counter(ROLLOUTS + [each for each in first if first[each] is other] + [""])
        assert [message.partition(": ")[0] for message in caplog.messages] == [
            f"world model server {hung.url} is away, and tried again until it is there"
        ]
        hung.state = "there"
        await until(lambda: len(caplog.messages) == 2)
        assert await homes(replicas, *fakes) == first


@pytest.mark.anyio
async def test_where_none_is_there_requests_fail_until_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(2) as fakes:
        _, other = fakes
        for fake in fakes:
            fake.state = "away"
        urls = [fake.url for fake in fakes]
        async with Replicas.connect(urls, every=0.02) as replicas:
            with pytest.raises(PolicyError, match="no world model server is there"):
                await replicas.generate(request("rollout"), ignore)
            assert len(caplog.messages) == 2
            other.state = "there"
            await until(lambda: len(caplog.messages) == 3)
            assert await replicas.generate(request("rollout"), ignore) == "length"
            assert other.served[-1] == "rollout"
            # The last that is there fails: that is what the request says, and then again that none is there.
            other.state = "away"
            with pytest.raises(PolicyError, match=other.url):
                await replicas.generate(request("rollout"), ignore)
            with pytest.raises(PolicyError, match="no world model server is there"):
                await replicas.generate(request("rollout"), ignore)


@pytest.mark.anyio
async def test_what_is_not_fit_is_an_error_only_where_there_is_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(2) as fakes:
        fit, unfit = fakes
        unfit.longest = 100
        urls = [fake.url for fake in fakes]
        async with Replicas.connect(urls, max_context=101, every=0.02) as replicas:
            assert await replicas.generate(request("rollout"), ignore) == "length"
            assert fit.served[-1] == "rollout"
        assert "contexts of 100 tokens, not 101" in "".join(caplog.messages)
        fit.state = "away"
        with pytest.raises(InputError, match="contexts of 100 tokens, not 101"):
            async with Replicas.connect(urls, max_context=101, every=0.02):
                pass


@pytest.mark.anyio
async def test_what_a_server_refuses_says_nothing_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(2) as fakes, connected(*fakes) as replicas:
        for fake in fakes:
            fake.state = "refusing"
        asked = [fake.asked for fake in fakes]
        with pytest.raises(ValueError, match="400 too long"):
            await replicas.generate(request("rollout"), ignore)
        await until(lambda: all(fake.asked > before + 3 for fake, before in zip(fakes, asked, strict=True)))
        for fake in fakes:
            fake.state = "there"
        assert await replicas.generate(request("rollout"), ignore) == "length"
        assert caplog.messages == []
