"""The SGLang policy, against a stand-in: SGLang itself needs a GPU.

The stand-in does over real HTTP what SGLang 0.5.23 does in its source: events that repeat the generation so far, or
not; draws that are a function of seed and position; aborts by prefix of the id; errors inside of a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import anyio
import pytest

from http_server import Exchange, serve, until
from obsspec.context import Context, Tokens
from obsspec.errors import InputError
from obsspec.policies.http import Server
from obsspec.policies.sglang import SglangPolicy
from obsspec.rollout import rollout
from obsspec.speculation import Settings, Speculator
from obsspec.testing import STOP, ScriptedChat, ScriptedEnvironment, encode
from obsspec.types import Chunk, Draft, Generation, Observation, PolicyError, Query, Request, Sampling, Task
from tiny import tokenizer


class FakeSglang:
    """``write(tokens before, seed)`` gives the next token."""

    def __init__(self, write: Callable[[Tokens, int], int], incremental: bool = False, step: int = 1) -> None:
        self.write = write
        self.incremental = incremental
        self.step = step
        """Tokens in an event."""
        self.seconds = 0.0
        """Between events."""
        self.most_running = 0
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.bodies: list[Any] = []
        self.answer: Callable[[Exchange], Any] | None = None
        """Instead of everything else."""

    async def __call__(self, exchange: Exchange) -> None:
        if self.answer:
            await self.answer(exchange)
        elif exchange.path == "/generate":
            await self._generate(exchange)
        elif exchange.path == "/abort_request":
            self.aborted.append(exchange.body["rid"])
            self.running = {rid for rid in self.running if not rid.startswith(exchange.body["rid"])}
            await exchange.json(None)
        elif exchange.path == "/tokenize":
            await exchange.json({"tokens": tokenizer().encode(exchange.body["prompt"], add_special_tokens=False)})
        else:
            await exchange.json({"error": {"message": "Not found"}}, 404)

    async def _generate(self, exchange: Exchange) -> None:
        body, sampling = exchange.body, exchange.body["sampling_params"]
        self.bodies.append(body)
        self.running.add(body["rid"])
        self.most_running = max(self.most_running, len(self.running))
        entries: list[tuple[float, int, None]] = []
        finish: dict[str, Any] | None = None
        while finish is None:
            await anyio.sleep(self.seconds)
            first = len(entries)
            while finish is None and len(entries) - first < self.step:
                before = (*body["input_ids"], *(token for _, token, _ in entries))
                entries.append((-len(before) / 8, self.write(before, sampling["sampling_seed"]), None))
                if entries[-1][1] in sampling["stop_token_ids"]:
                    finish = {"type": "stop", "matched": entries[-1][1]}
                elif len(entries) >= sampling["max_new_tokens"]:
                    finish = {"type": "length", "length": len(entries)}
            if body["rid"] not in self.running:
                finish = {"type": "abort", "message": "Abort in decoding stage", "status_code": None}
            shown = entries[first:] if self.incremental else entries
            meta = {"id": body["rid"], "finish_reason": finish, "completion_tokens": len(entries)}
            meta |= {"output_token_logprobs": shown, "weight_version": "3"}
            if body["top_logprobs_num"]:
                meta["output_top_logprobs"] = [
                    [entry, (2 * entry[0], entry[1] + 100, None)] if place % 2 else [(-9.0, 1, None), entry]
                    for place, entry in enumerate(shown)
                ]
            await exchange.event({"text": "\u2028", "output_ids": [token for _, token, _ in shown], "meta_info": meta})
        self.running.discard(body["rid"])
        await exchange.end()


def random_token(before: Tokens, seed: int) -> int:
    """As SGLang draws: by seed and position."""
    return Random(f"{seed}/{len(before)}").randrange(10, 90)


def request(**changes: Any) -> Request:
    settings = {
        "context": Context.of((5, 6, 7)),
        "sampling": Sampling(temperature=0.7, top_p=0.9),
        "max_tokens": 8,
        "stop": (),
        "seed": 3,
        "turn": 1,
    }
    return Request(**settings | changes)


async def run(policy: SglangPolicy, asked: Request, cancel_after: int | None = None) -> Generation:
    """The generation as its caller has it, ``resume`` included; cancelled after so many new tokens."""
    chunks: list[Chunk] = []
    finish = None
    with anyio.CancelScope() as scope:

        def emit(chunk: Chunk) -> None:
            assert not scope.cancel_called, "emitted after cancellation"
            chunks.append(chunk)
            if cancel_after and sum(len(chunk.tokens) for chunk in chunks) >= cancel_after:
                scope.cancel()

        finish = await policy.generate(asked, emit)
    return Generation(
        asked.resume.tokens + tuple(token for chunk in chunks for token in chunk.tokens),
        asked.resume.logprobs + tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        asked.resume.weight_versions + tuple(chunk.weight_version for chunk in chunks for _ in chunk.tokens),
        finish,
    )


@pytest.mark.anyio
@pytest.mark.parametrize("incremental", [False, True])
async def test_runners_up_are_the_likeliest_that_were_not_chosen(incremental: bool) -> None:
    """The fake's second likeliest is a hundred more than the token in odd places, and token 1 in even ones."""
    fake = FakeSglang(lambda before, seed: len(before), incremental, step=2)
    async with serve(fake) as url, Server(url) as server:
        chunks: list[Chunk] = []
        asked = request(sampling=Sampling(temperature=0), runners_up=True)
        await SglangPolicy(server).generate(asked, chunks.append)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        seconds = [token for chunk in chunks for token, _ in chunk.runners_up]
        assert seconds == [token + 100 if place % 2 else 1 for place, token in enumerate(tokens)]
        assert [body["top_logprobs_num"] for body in fake.bodies] == [2]
        await SglangPolicy(server).generate(request(runners_up=True), chunks.append)
        assert fake.bodies[-1]["top_logprobs_num"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("step", [1, 3])
async def test_every_token_once(incremental: bool, step: int) -> None:
    fake = FakeSglang(lambda before, seed: len(before), incremental, step)
    async with serve(fake) as url, Server(url) as server:
        generation = await run(SglangPolicy(server), request())
        assert generation.tokens == tuple(range(3, 11))
        assert generation.logprobs == tuple(-length / 8 for length in range(3, 11))
        assert generation.weight_versions == (3,) * 8
        assert generation.finish == "length"
        stopped = await run(SglangPolicy(server), request(stop=(7, 9)))
        assert (stopped.tokens, stopped.finish) == ((3, 4, 5, 6, 7), "stop")
        assert await run(SglangPolicy(server), request(stop=(7, 9), resume=stopped)) == stopped


@pytest.mark.anyio
async def test_what_is_asked() -> None:
    fake = FakeSglang(random_token)
    async with serve(fake) as url, Server(url) as server:
        policy = SglangPolicy(server, "v1", priority=True)
        await policy.generate(request(stop=(2,), priority=2, rollout="naïve #3"), lambda chunk: None)
        policy.adapter = "v2"
        resume = Generation((8, 9), (-1.0, -1.0), (0, 0))
        await policy.generate(request(resume=resume, seed=-(2**70)), lambda chunk: None)
    first, second = fake.bodies
    assert (first["lora_path"], second["lora_path"]) == ("v1", "v2")
    assert (first["priority"], second["priority"]) == (-2, 0)
    assert first["session_id"] == "naïve #3"
    assert (first["input_ids"], second["input_ids"]) == ([5, 6, 7], [5, 6, 7, 8, 9])
    assert len(first["rid"]) == len(second["rid"]) and first["rid"] != second["rid"]
    assert first["sampling_params"] | {"sampling_seed": 0} == {
        "max_new_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "sampling_seed": 0,
        "stop_token_ids": [2],
    }
    assert second["sampling_params"]["max_new_tokens"] == 6
    seeds = {body["sampling_params"]["sampling_seed"] for body in fake.bodies}
    assert len(seeds) == 2 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.anyio
async def test_suspended_at_every_token_and_resumed() -> None:
    fake = FakeSglang(random_token)
    async with serve(fake) as url, Server(url) as server:
        policy = SglangPolicy(server)
        plain = await run(policy, request())
        generation = Generation()
        while generation.finish is None:
            generation = await run(policy, request(resume=generation), cancel_after=1)
        assert generation.tokens == plain.tokens
        assert not fake.running


@pytest.mark.anyio
async def test_cancellation_aborts_the_request_itself() -> None:
    fake = FakeSglang(random_token)
    fake.seconds = 0.01
    async with serve(fake) as url, Server(url) as server, anyio.create_task_group() as group:
        group.start_soon(run, SglangPolicy(server), request(max_tokens=100_000))
        group.start_soon(run, SglangPolicy(server), request(max_tokens=100_000))
        other = "f" * 31  # of which nothing that is aborted is a prefix
        fake.running.add(other)
        await until(lambda: len(fake.running) == 3)
        group.cancel_scope.cancel()
    assert fake.running == {other}
    assert {len(rid) for rid in fake.aborted} == {32}


@pytest.mark.anyio
async def test_a_server_that_does_not_answer_holds_no_cancellation_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("obsspec.policies.sglang._ABORT_SECONDS", 0.1)
    fake = FakeSglang(random_token)
    fake.answer = lambda exchange: anyio.sleep_forever()
    async with serve(fake) as url, Server(url) as server:
        with anyio.fail_after(5), anyio.move_on_after(0.1):
            await run(SglangPolicy(server), request())


@pytest.mark.anyio
async def test_failures() -> None:
    fake = FakeSglang(random_token)
    async with serve(fake) as url, Server(url) as server:
        policy = SglangPolicy(server)

        async def events(exchange: Exchange, *values: Any, end: bool = True) -> None:
            if exchange.path == "/abort_request":
                return await exchange.json(None)
            for value in values:
                await exchange.event(value)
            return await exchange.end() if end else None

        def aborted(status: int | None) -> Any:
            finish = {"type": "abort", "message": "No more room", "status_code": status}
            return {"meta_info": {"finish_reason": finish, "completion_tokens": 0, "output_token_logprobs": []}}

        for values, error, says in (
            ([{"error": {"message": "Input is\ntoo long", "code": 400}}], ValueError, "400 Input is too long"),
            ([{"error": {"message": "Down", "code": 500}}], PolicyError, "500 Down"),
            ([{"error": "Odd"}], PolicyError, "500 Odd"),
            ([aborted(400)], ValueError, "No more room"),
            ([aborted(503)], PolicyError, "abort"),
            ([aborted(None)], PolicyError, "abort"),
            ([], PolicyError, "broke off"),
        ):
            fake.answer = lambda exchange, values=values: events(exchange, *values)
            with pytest.raises(error, match=says):
                await run(policy, request())
        entry = {
            "finish_reason": {"type": "length"},
            "completion_tokens": 1,
            "output_token_logprobs": [(-1.0, 9, None)],
        }
        fake.answer = lambda exchange: events(exchange, {"meta_info": entry})
        with pytest.raises(ValueError, match="cut at 1 tokens where 8 were allowed"):
            await run(policy, request())

        # A stream that breaks half-way: what came stands, and the rest follows from there.
        fake.answer = None
        plain = await run(policy, request())
        cut = entry | {"finish_reason": None, "output_token_logprobs": [(-0.375, plain.tokens[0], None)]}
        fake.answer = lambda exchange: events(exchange, {"meta_info": cut}, end=False)
        chunks: list[Chunk] = []
        with pytest.raises(PolicyError, match="server http"):
            await policy.generate(request(), chunks.append)
        assert [chunk.tokens for chunk in chunks] == [plain.tokens[:1]]
        fake.answer = None
        resumed = await run(policy, request(resume=Generation(plain.tokens[:1], plain.logprobs[:1], (3,))))
        assert resumed == plain


@pytest.mark.anyio
async def test_connect() -> None:
    fake = FakeSglang(random_token)
    async with serve(fake) as url:
        async with SglangPolicy.connect(f"{url}/v1/", tokenizer=tokenizer()) as policy:
            assert (await run(policy, request())).finish == "length"
        other = tokenizer()
        other.add_tokens(["<more>"], special_tokens=True)
        with pytest.raises(InputError, match=r"'<more>' is 300 here, .* there; load the tokenizer of the model"):
            async with SglangPolicy.connect(url, tokenizer=other):
                pass
    with pytest.raises(InputError, match=r"server http://127.*is it running, and is this its URL\?$"):
        async with SglangPolicy.connect(url):
            pass


@pytest.mark.anyio
async def test_a_thousand_streams_at_once() -> None:
    fake = FakeSglang(random_token)
    release = anyio.Event()

    async def answer(exchange: Exchange) -> None:
        fake.running.add(exchange.body["rid"])
        await release.wait()
        await fake._generate(exchange)

    fake.answer = answer
    done: list[Generation] = []

    async def one(policy: SglangPolicy, seed: int) -> None:
        done.append(await run(policy, request(seed=seed, max_tokens=2)))

    async with serve(fake) as url, Server(url) as server, anyio.create_task_group() as group:
        for seed in range(1000):
            group.start_soon(one, SglangPolicy(server), seed)
        await until(lambda: len(fake.running) == 1000, seconds=60)
        release.set()
    assert len(done) == 1000 and all(generation.finish == "length" for generation in done)


class Guess:
    """Right about every other command."""

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        propose(Draft(f"{len(query.history)}" if len(query.history) % 2 else "wrong", 0.9))

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


@pytest.mark.anyio
async def test_speculation_changes_nothing() -> None:
    def write(before: Tokens, seed: int) -> int:
        """``run``, a random letter, and the end."""
        begun = before[::-1].index(encode("\n")[0])
        script = (*encode("run"), encode("a")[0] + random_token(before, seed) % 26, STOP)
        return script[begun]

    fake = FakeSglang(write)
    environment = ScriptedEnvironment(lambda commands: Observation(f"{len(commands) - 1}", seconds=0.02))
    async with serve(fake) as url, Server(url) as server:

        async def trajectory(depth: int) -> tuple[Tokens, list[str]]:
            settings = Settings(Sampling(max_tokens=16), depth=depth, max_turns=6)
            environment.executed = ()
            speculator = Speculator(SglangPolicy(server), ScriptedChat(), Guess(), settings)
            done = await rollout(speculator, Task("count", "Count."), environment.open, seed=4)
            return done.context.tokens, [turn.outcome for turn in done.turns]

        plain, _ = await trajectory(depth=0)
        speculative, outcomes = await trajectory(depth=2)
    assert speculative == plain
    assert {"hit", "miss"} <= set(outcomes)
    assert not fake.running
