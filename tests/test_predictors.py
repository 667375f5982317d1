"""Cascade, language model and oracle, in virtual time where time matters."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio
import pytest
import trio
import trio.testing

from obsspec.chat import WorldModelChat
from obsspec.context import Tokens
from obsspec.errors import InputError
from obsspec.predictors import Cascade, LanguageModel, Limits, Memory, Oracle, Prompts, Rules, recorded
from obsspec.predictors.language_model import abridge
from obsspec.testing import STOP, decode, encode
from obsspec.types import Chunk, Draft, Exchange, Finish, Observation, Predictor, Query, Request

QUERY = Query("task", "Do it.", (Exchange("mkdir d", "(no output)"),), "ls")


class Scripted:
    """Proposes ``drafts`` after ``seconds``; raises afterwards if ``fails``."""

    def __init__(self, *drafts: Draft, seconds: float = 0.0, fails: bool = False) -> None:
        self.drafts, self.seconds, self.fails = drafts, seconds, fails
        self.asked = 0
        self.learnt: list[str] = []

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        self.asked += 1
        await anyio.sleep(self.seconds)
        for draft in self.drafts:
            propose(draft)
        if self.fails:
            raise RuntimeError("broken")

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        self.learnt.append(observation.text)
        if self.fails:
            raise RuntimeError("broken")


def in_virtual_time(body: Callable[[], Awaitable[None]]) -> None:
    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))


async def drafts_of(predictor: Predictor, query: Query = QUERY, limit: float = math.inf) -> list[tuple[float, Draft]]:
    """Every draft with the second it came at, until the predictor returns or ``limit`` seconds have passed."""
    found: list[tuple[float, Draft]] = []
    start = anyio.current_time()
    with anyio.move_on_after(limit):
        await predictor.predict(query, lambda draft: found.append((anyio.current_time() - start, draft)))
    return found


def test_a_cascade_gives_each_predictor_its_turn() -> None:
    async def body() -> None:
        quick, slow, last = Scripted(Draft("a", 0.5)), Scripted(Draft("b", 0.6), seconds=9), Scripted(Draft("c", 0.7))
        cascade = Cascade({"quick": quick, "slow": slow, "last": last}, patience=2)
        assert await drafts_of(cascade) == [(0, Draft("a", 0.5)), (2, Draft("c", 0.7)), (9, Draft("b", 0.6))]

    in_virtual_time(body)


def test_a_cascade_asks_nobody_else_once_it_is_sure() -> None:
    async def body() -> None:
        costly = Scripted(Draft("b", 0.99))
        cascade = Cascade({"cheap": Scripted(Draft("a", 0.97)), "costly": costly}, enough=0.95)
        assert await drafts_of(cascade) == [(0, Draft("a", 0.97))]
        assert costly.asked == 0

    in_virtual_time(body)


def test_a_cascade_proposes_a_text_again_only_when_surer() -> None:
    async def body() -> None:
        predictors = [Scripted(Draft("a", p, name)) for name, p in (("x", 0.5), ("y", 0.3), ("z", 0.8))]
        cascade = Cascade(dict(zip("xyz", predictors, strict=True)))
        assert [draft for _, draft in await drafts_of(cascade)] == [Draft("a", 0.5, "x"), Draft("a", 0.8, "z")]

    in_virtual_time(body)


def test_failures_in_a_cascade_stay_where_they_are() -> None:
    async def body() -> None:
        raising, good = Scripted(Draft("a", 0.1), fails=True), Scripted(Draft("b", 0.2))
        cascade = Cascade({"raising": raising, "hanging": Scripted(seconds=math.inf), "good": good}, patience=1)
        assert await drafts_of(cascade, limit=100) == [(0, Draft("a", 0.1)), (1, Draft("b", 0.2))]
        cascade.learn(QUERY, Observation("b"))
        assert good.learnt == ["b"]
        assert cascade.counts["raising"].failures == 2
        assert cascade.counts["good"].failures == 0

    in_virtual_time(body)


def test_a_cascade_counts_committed_queries() -> None:
    async def body() -> None:
        both, never = Scripted(Draft("a", 0.4), Draft("b", 0.3)), Scripted()
        cascade = Cascade({"both": both, "never": never})
        other = Query("task", "Do it.", (), "pwd")
        for query in (QUERY, other):
            await drafts_of(cascade, query)
        cascade.learn(QUERY, Observation("b"))
        cascade.learn(QUERY, Observation("c"))
        cascade.learn(Query("task", "Do it.", (), "never asked"), Observation("a"))
        counts = cascade.counts
        assert (counts["both"].asked, counts["both"].drafted, counts["both"].exact) == (2, 2, 1)
        assert (counts["never"].asked, counts["never"].drafted, counts["never"].exact) == (2, 0, 0)

    in_virtual_time(body)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_cascade_of_rules_and_memory() -> None:
    cascade = Cascade({"rules": Rules(), "memory": Memory()})
    cascade.learn(QUERY, Observation("d"))
    remembered = [(draft.text, draft.predictor) for _, draft in await drafts_of(cascade) if draft.probability >= 0.5]
    assert remembered == [("d", "memory")]
    silent = Query("task", "Do it.", (), "mkdir d")
    assert [(draft.text, draft.predictor) for _, draft in await drafts_of(cascade, silent)] == [
        ("(no output)", "rules")
    ]


def test_a_cascade_needs_predictors() -> None:
    with pytest.raises(InputError, match="at least one"):
        Cascade({})


class ByteFormat:
    """A chat format of one token a byte, with a line for each message."""

    end: Tokens = (STOP,)

    def open(self, system: str, user: str) -> Tokens:
        return encode(f"{user}\n")

    def reply(self, user: str) -> Tokens:
        return encode(f"\n$ {user}\n")

    def encode(self, text: str) -> Tokens:
        return encode(text)

    def decode(self, tokens: Tokens) -> str:
        return decode(tokens)


CHAT = WorldModelChat(ByteFormat())  # type: ignore[arg-type]


class Writes:
    """A policy that writes ``text`` with the same log-probability for every token, one a second."""

    def __init__(self, text: str, logprob: float = -0.01) -> None:
        self.tokens, self.logprob = (*encode(text), STOP), logprob
        self.requests: list[Request] = []
        self.written = 0

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        self.requests.append(request)
        for token in self.tokens[: request.max_tokens]:
            await anyio.sleep(1)
            self.written += 1
            emit(Chunk((token,), (self.logprob,)))
        return "stop" if len(self.tokens) <= request.max_tokens else "length"


def test_a_language_model_proposes_what_it_writes() -> None:
    async def body() -> None:
        policy = Writes("d\ne")
        ((second, draft),) = await drafts_of(LanguageModel(policy, CHAT))
        assert second == 4
        assert (draft.text, draft.predictor) == ("d\ne", "language_model")
        assert math.isclose(draft.probability, math.exp(4 * -0.01))
        (request,) = policy.requests
        assert request.sampling.temperature == 0
        assert request.context.tokens == Prompts(CHAT, Limits()).before(QUERY).tokens + CHAT.ask(QUERY.command)

    in_virtual_time(body)


class Knows:
    """A policy that gives each of some texts its probability, and of all that begin alike writes the likeliest on."""

    def __init__(self, texts: dict[str, float], tells: bool = True) -> None:
        self.texts = {(*encode(text), STOP): probability for text, probability in texts.items()}
        self.tells = tells
        self.requests: list[Request] = []

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        self.requests.append(request)
        written = request.resume.tokens
        while written[-1:] != (STOP,):
            await anyio.sleep(1)
            known = {text: p for text, p in self.texts.items() if text[: len(written)] == written}
            chances: dict[int, float] = {}
            for text, probability in known.items():
                token = text[len(written)]
                chances[token] = chances.get(token, 0.0) + probability / sum(known.values())
            (token, logprob), *others = sorted(
                ((t, math.log(c)) for t, c in chances.items()), key=lambda pair: -pair[1]
            )
            second = others[0] if others else (token + 1, -100.0)
            emit(Chunk((token,), (logprob,), runners_up=(second,) if request.runners_up and self.tells else ()))
            written += (token,)
        return "stop"


def test_a_second_draft_departs_where_that_is_likeliest() -> None:
    async def body() -> None:
        policy = Knows({"ab": 0.5, "ac": 0.3, "xy": 0.2})
        drafts = await drafts_of(LanguageModel(policy, CHAT, drafts=2))
        assert [(second, draft.text) for second, draft in drafts] == [(3, "ab"), (4, "ac")]
        assert [draft.probability for _, draft in drafts] == [pytest.approx(0.5), pytest.approx(0.3)]
        policy = Knows({"ab": 0.5, "a": 0.15, "xy": 0.2, "xz": 0.15})
        drafts = await drafts_of(LanguageModel(policy, CHAT, drafts=2))
        assert [draft.text for _, draft in drafts] == ["ab", "xy"], "x is likelier than the end after a"
        policy = Knows({"a": 0.6, "ab": 0.4})
        drafts = await drafts_of(LanguageModel(policy, CHAT, drafts=2))
        assert [draft.text for _, draft in drafts] == ["a", "ab"]
        policy = Knows({"ab": 0.6, "a": 0.4})
        drafts = await drafts_of(LanguageModel(policy, CHAT, drafts=2))
        assert [draft.text for _, draft in drafts] == ["ab", "a"]

    in_virtual_time(body)


def test_a_second_draft_may_be_likely_where_the_first_was_not() -> None:
    """The first token is almost even, and what follows the likelier one is anybody's guess."""

    async def body() -> None:
        guesses = {f"a{letter}": 0.05 for letter in "0123456789"} | {"a0": 0.06}
        drafts = await drafts_of(LanguageModel(Knows(guesses | {"xyz": 0.45}), CHAT, drafts=2))
        assert [draft.text for _, draft in drafts] == ["xyz"]

    in_virtual_time(body)


def test_there_is_no_second_draft_where_it_is_improbable_or_not_asked_for_or_the_policy_does_not_tell() -> None:
    async def body() -> None:
        policy = Knows({"ab": 0.95, "ac": 0.05})
        assert len(await drafts_of(LanguageModel(policy, CHAT, drafts=2))) == 1
        assert len(policy.requests) == 1, "that is known without writing it"
        policy = Knows({"ab": 0.6, "ac": 0.4})
        assert len(await drafts_of(LanguageModel(policy, CHAT))) == 1
        assert not policy.requests[0].runners_up
        assert len(await drafts_of(LanguageModel(Knows({"ab": 0.6, "ac": 0.4}, tells=False), CHAT, drafts=2))) == 1

    in_virtual_time(body)


def test_a_language_model_prepares_by_reading_the_history() -> None:
    async def body() -> None:
        policy = Writes("x")
        await LanguageModel(policy, CHAT).prepare(replace(QUERY, command=""))
        (request,) = policy.requests
        assert request.context.tokens == Prompts(CHAT, Limits()).before(QUERY).tokens
        assert request.max_tokens == 1

    in_virtual_time(body)


def test_a_cascade_prepares_all_of_its_predictors() -> None:
    read: list[str] = []

    class Reads(Scripted):
        def __init__(self, name: str, fails: bool = False) -> None:
            super().__init__(fails=fails)
            self.name = name

        async def prepare(self, query: Query) -> None:
            if self.fails:
                raise RuntimeError("broken")
            await anyio.sleep(1)
            read.append(self.name)

    async def body() -> None:
        cascade = Cascade({"a": Reads("a"), "b": Reads("b", fails=True), "c": Reads("c")})
        await cascade.prepare(QUERY)
        assert sorted(read) == ["a", "c"]
        assert cascade.counts["b"].failures == 1

    in_virtual_time(body)


def test_a_language_model_gives_up_on_what_is_improbable() -> None:
    async def body() -> None:
        policy = Writes("a long text", logprob=-1.0)
        assert await drafts_of(LanguageModel(policy, CHAT, floor=0.05)) == []
        assert policy.written == 3, "exp(-3) is the first below 0.05"

    in_virtual_time(body)


def test_a_language_model_gives_up_on_what_would_get_no_branch() -> None:
    """Of tokens of 0.37 each, where the gate asks for 0.2 of make and nothing of ls; but for one query in twenty."""

    def least(predictor: str, command: str) -> float:
        assert predictor == "language_model"
        return 0.2 if command.startswith("make") else 0.0

    async def body() -> None:
        written = []
        for number in range(200):
            policy = Writes("a long text", logprob=-1.0)
            model = LanguageModel(policy, CHAT, floor=0.0001, least=least)
            await drafts_of(model, replace(QUERY, command=f"make {number}"))
            written.append(policy.written)
            await drafts_of(model, replace(QUERY, command=f"ls {number}"))
            assert policy.written == written[-1] + 10, "0.0001 is reached after ten"
        assert set(written) == {2, 10}, "0.2 is reached after two"
        assert 2 <= written.count(10) <= 20

    in_virtual_time(body)


def test_a_language_model_proposes_nothing_that_was_cut_off() -> None:
    async def body() -> None:
        limits = Limits(draft_tokens=8)
        assert await drafts_of(LanguageModel(Writes("12345678"), CHAT, limits)) == []
        assert len(await drafts_of(LanguageModel(Writes("1234567"), CHAT, limits))) == 1
        long_command = Query("task", "Do it.", (), "123456789")
        assert await drafts_of(LanguageModel(Writes("1"), CHAT, limits), long_command) == []

    in_virtual_time(body)


def test_a_language_model_that_is_cancelled_proposes_nothing() -> None:
    async def body() -> None:
        policy = Writes("0123456789")
        assert await drafts_of(LanguageModel(policy, CHAT), limit=3.5) == []
        assert policy.written == 3

    in_virtual_time(body)


def test_prompts_grow_until_they_start_again() -> None:
    limits = Limits(context_tokens=400, draft_tokens=40, observation_characters=60)
    prompts = Prompts(CHAT, limits)
    history: tuple[Exchange, ...] = ()
    before: Tokens = ()
    restarts = 0
    for number in range(40):
        history += (Exchange(f"command {number}", "x" * (number * 17 % 90)),)
        query = Query("task", "Do it.", history, "ls")
        prompt = prompts.of(query)
        assert prompt is not None
        assert prompt.length + limits.draft_tokens <= limits.context_tokens
        assert prompt.tokens == Prompts(CHAT, limits).of(query).tokens, "it depends on the query alone"
        assert decode(prompt.tokens).startswith("Do it.\n")
        assert f"$ command {number}\n" in decode(prompt.tokens)
        grown = prompt.tokens[: -len(CHAT.ask("ls"))]
        restarts += grown[: len(before)] != before
        before = grown
    assert 1 <= restarts < 20


def test_prompts_that_cannot_fit() -> None:
    limits = Limits(context_tokens=400, draft_tokens=40)
    assert Prompts(CHAT, limits).of(Query("task", "x" * 400, (), "ls")) is None
    huge = Exchange("cat > f <<EOF\n" + "x" * 1000 + "\nEOF", "(no output)")
    prompt = Prompts(CHAT, limits).of(Query("task", "Do it.", (huge,), "ls"))
    assert prompt is not None
    assert decode(prompt.tokens) == "Do it.\nready\n$ ls\n"


def test_abridged_texts_keep_their_ends() -> None:
    assert abridge("x" * 100, 100) == "x" * 100
    assert abridge("a" * 60 + "b" * 60, 100) == "a" * 50 + "\n[20 characters]\n" + "b" * 50


def test_limits_that_leave_no_room() -> None:
    with pytest.raises(InputError, match="draft_tokens"):
        Limits(context_tokens=100, draft_tokens=50)


def test_an_oracle_is_as_right_and_as_slow_as_it_is_told() -> None:
    async def body() -> None:
        queries = [Query("task", "", (), f"command {number}") for number in range(1000)]
        truth = recorded((query, query.command.upper()) for query in queries)
        oracle = Oracle(truth, accuracy=0.7, seconds=2.5, seed=3)
        outcomes = []
        for query in queries:
            ((second, draft),) = await drafts_of(oracle, query)
            assert (second, draft.probability) == (2.5, 0.7)
            outcomes.append(draft.text == query.command.upper())
        assert 0.65 < sum(outcomes) / len(outcomes) < 0.75
        again = Oracle(truth, accuracy=0.7, seed=3)
        assert outcomes == [(await drafts_of(again, q))[0][1].text == q.command.upper() for q in queries]
        other_seed = Oracle(truth, accuracy=0.7, seed=4)
        assert outcomes != [(await drafts_of(other_seed, q))[0][1].text == q.command.upper() for q in queries]
        assert await drafts_of(oracle, Query("another task", "", (), "command 1")) == []

    in_virtual_time(body)
