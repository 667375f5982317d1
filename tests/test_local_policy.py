"""The local policy on a tiny random Llama: exact whatever was remembered, interrupted or running beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest
import torch
import transformers

from obsspec.context import Context, Tokens
from obsspec.errors import InputError
from obsspec.policies.local import LocalPolicy, draw, pieces
from obsspec.policies.networks import HubNetwork, Int8Llama, Network
from obsspec.types import Chunk, Generation, Request, Sampling
from tiny import llama

torch.set_num_threads(1)

VOCABULARY = llama().config.vocab_size
STOP = (7,)


NETWORKS: dict[str, Callable[[], Network]] = {
    "float32": lambda: HubNetwork(llama()),
    "int8": lambda: Int8Llama(llama()),
}


@pytest.fixture(params=sorted(NETWORKS))
def network(request: pytest.FixtureRequest) -> Network:
    return NETWORKS[request.param]()


def given(length: int, seed: int = 0) -> Tokens:
    """Tokens that a policy might read, none of them a stop token."""
    return tuple((11 * i + 17 * seed + i * i) % (VOCABULARY - 8) + 8 for i in range(length))


def request(context: Context, **changes: object) -> Request:
    settings = {
        "context": context,
        "sampling": Sampling(temperature=0.9, top_p=0.95),
        "max_tokens": 12,
        "stop": STOP,
        "seed": 3,
        "turn": 0,
    }
    return Request(**settings | changes)


async def run(policy: LocalPolicy, asked: Request, cancel_after: int | None = None) -> Generation:
    """The generation as its caller has it, ``resume`` included; cancelled after so many new tokens."""
    tokens, logprobs = list(asked.resume.tokens), list(asked.resume.logprobs)
    new = 0
    finish = None
    with anyio.CancelScope() as scope:

        def emit(chunk: Chunk) -> None:
            nonlocal new
            assert not scope.cancel_called, "emitted after cancellation"
            tokens.extend(chunk.tokens)
            logprobs.extend(chunk.logprobs)
            new += len(chunk.tokens)
            if new == cancel_after:
                scope.cancel()

        finish = await policy.generate(asked, emit)
    return Generation(tuple(tokens), tuple(logprobs), (), finish)


async def rollout(policy: LocalPolicy, seed: int, turns: int = 3, interrupt: int | None = None) -> list[Generation]:
    """Turns of one rollout, in order; with ``interrupt``, each is suspended every so many tokens and resumed."""
    context = Context.of(given(150, seed))
    generations = []
    for turn in range(turns):
        asked = request(context, seed=seed, turn=turn, rollout=f"rollout {seed}")
        generation = await run(policy, asked, interrupt)
        while generation.finish is None:
            generation = await run(policy, request(context, seed=seed, turn=turn, resume=generation), interrupt)
        generations.append(generation)
        context = context.sampled(generation.tokens, generation.logprobs).given(given(70 + turn, turn))
    return generations


@pytest.mark.anyio
async def test_what_was_remembered_changes_nothing(network: Network) -> None:
    plain = await rollout(LocalPolicy(network), seed=1)
    assert len({generation.tokens for generation in plain}) == 3

    forgetful = LocalPolicy(network, cache_bytes=0)
    assert await rollout(forgetful, seed=1) == plain

    used = LocalPolicy(network)
    await run(used, request(Context.of(given(100, 1)), seed=9))
    await rollout(used, seed=2)
    assert await rollout(used, seed=1) == plain
    assert await rollout(used, seed=1) == plain


@pytest.mark.anyio
@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
async def test_suspended_at_every_token_and_resumed(network: Network, cache_bytes: int) -> None:
    plain = await rollout(LocalPolicy(network), seed=4)
    policy = LocalPolicy(network, cache_bytes=cache_bytes)
    for interval in (1, 4):
        assert await rollout(policy, seed=4, interrupt=interval) == plain


@pytest.mark.anyio
async def test_side_by_side_changes_nothing(network: Network) -> None:
    alone = [await rollout(LocalPolicy(network), seed) for seed in range(4)]
    policy = LocalPolicy(network, workers=2, cache_bytes=300_000)
    together: list[list[Generation]] = [[] for _ in range(4)]

    async def one(seed: int) -> None:
        together[seed] = await rollout(policy, seed, interrupt=None if seed % 2 else 4)

    async with anyio.create_task_group() as group:
        for seed in range(4):
            group.start_soon(one, seed)
    assert together == alone


@pytest.mark.anyio
async def test_branches_share_their_prefix(network: Network) -> None:
    """A branch on the right draft continues as the committed context would; one on a wrong draft harms nobody."""
    context = Context.of(given(150))
    first = await run(LocalPolicy(network), request(context))
    trunk = context.sampled(first.tokens, first.logprobs)
    expected = await run(LocalPolicy(network), request(trunk.given(given(30, 5)), turn=1))

    policy = LocalPolicy(network, workers=2)
    assert await run(policy, request(context)) == first
    results = {}

    async def branch(draft: int) -> None:
        results[draft] = await run(policy, request(trunk.given(given(30, draft)), turn=1, priority=1))

    async with anyio.create_task_group() as group:
        for draft in (4, 5, 6):
            group.start_soon(branch, draft)
    assert results[5] == expected
    assert results[4] != expected


class CountingNetwork:
    """Counts the tokens that it reads."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.memory = network.memory
        self.tokens = 0

    def read(self, tokens: Tokens, memory: object) -> object:
        self.tokens += len(tokens)
        return self._network.read(tokens, memory)


@pytest.mark.anyio
async def test_only_new_tokens_are_read() -> None:
    network = CountingNetwork(NETWORKS["float32"]())
    policy = LocalPolicy(network)
    context = Context.of(given(256))
    first = await run(policy, request(context))
    assert network.tokens == 256 + len(first.tokens) - 1  # nothing follows the last token

    network.tokens = 0
    follow_up = context.sampled(first.tokens, first.logprobs).given(given(20))
    second = await run(policy, request(follow_up, turn=1))
    assert network.tokens == 1 + 20 + len(second.tokens) - 1

    network.tokens = 0
    await run(policy, request(context, seed=8, max_tokens=1))
    assert network.tokens <= 64  # another rollout of the same task reads the last piece again


@pytest.mark.anyio
async def test_memory_is_bounded() -> None:
    network = NETWORKS["float32"]()
    memory = network.memory()
    network.read(given(200), memory)
    counting = CountingNetwork(network)
    policy = LocalPolicy(counting, cache_bytes=2 * memory.bytes)
    for seed in (0, 1, 2):
        await run(policy, request(Context.of(given(180, seed)), max_tokens=1))
    counting.tokens = 0
    await run(policy, request(Context.of(given(180, 2)), max_tokens=1))
    assert counting.tokens < 64  # still remembered
    counting.tokens = 0
    await run(policy, request(Context.of(given(180, 0)), max_tokens=1))
    assert counting.tokens == 180  # the oldest was forgotten


def test_pieces_depend_on_the_context_alone() -> None:
    context = Context.of(given(130)).sampled((1, 2, 3), (0.0, 0.0, 0.0)).given(given(65))
    assert [len(piece) for piece in pieces(context)] == [64, 64, 2, 1, 1, 1, 64, 1]
    assert sum(pieces(context), ()) == context.tokens


class SlowNetwork:
    """Logits that favour no token; each read takes a moment, and may be made to wait or to fail."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0
        self.before_read: Callable[[Tokens], None] = lambda tokens: None

    def memory(self) -> object:
        return NETWORKS["float32"]().memory()

    def read(self, tokens: Tokens, memory: object) -> object:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            self.before_read(tokens)
        finally:
            self.running -= 1
        return torch.zeros(VOCABULARY)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_the_most_urgent_run_first_and_take_over() -> None:
    network = SlowNetwork()
    policy = LocalPolicy(network, workers=1)
    order: list[str] = []

    async def one(name: str, priority: int, then: Callable[[], None] = lambda: None) -> None:
        def emit(chunk: Chunk) -> None:
            order.append(name)
            then()

        await policy.generate(request(Context.of((1,)), priority=priority, max_tokens=3, stop=()), emit)

    async with anyio.create_task_group() as group:

        def more_arrive() -> None:
            if order == ["draft"]:
                group.start_soon(one, "deeper draft", 2)
                group.start_soon(one, "other draft", 1)
                group.start_soon(one, "real", 0)

        group.start_soon(one, "draft", 1, more_arrive)
    assert [name for name in order if name != "draft"] == ["real"] * 3 + ["other draft"] * 3 + ["deeper draft"] * 3
    # The real request takes the seat over while the draft is under way; the draft goes on before later ones.
    assert order.index("real") < 3
    assert order.index("other draft") == 6


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_so_many_run_at_once_and_seats_come_back() -> None:
    network = SlowNetwork()
    policy = LocalPolicy(network, workers=2)
    for _ in range(5):
        async with anyio.create_task_group() as group:
            for seed in range(6):
                group.start_soon(run, policy, request(Context.of((1,)), seed=seed, stop=()), seed or None)
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert network.running == 0
    finished = await run(policy, request(Context.of((1,)), stop=()))
    assert finished.finish == "length"
    assert network.most_running <= 2


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_failed_read_is_reported_and_leaves_the_seat() -> None:
    network = SlowNetwork()
    policy = LocalPolicy(network)

    def fail(tokens: Tokens) -> None:
        raise RuntimeError("broken")

    network.before_read = fail
    with pytest.raises(RuntimeError, match="broken"):
        await run(policy, request(Context.of((1, 2))))
    network.before_read = lambda tokens: None
    assert (await run(policy, request(Context.of((1, 2)), stop=()))).finish == "length"


@pytest.mark.anyio
async def test_ends(network: Network) -> None:
    policy = LocalPolicy(network)
    context = Context.of(given(20))
    free = await run(policy, request(context, stop=()))
    assert free.finish == "length"
    assert len(free.tokens) == len(free.logprobs) == 12
    stopped = await run(policy, request(context, stop=(free.tokens[3],)))
    first = free.tokens.index(free.tokens[3])
    assert stopped.finish == "stop"
    assert stopped.tokens == free.tokens[: first + 1]
    assert await run(policy, request(context, stop=(free.tokens[3],), resume=stopped)) == stopped
    with pytest.raises(ValueError, match="empty"):
        await run(policy, request(Context()))


@pytest.mark.anyio
async def test_seed_turn_and_position_decide(network: Network) -> None:
    policy = LocalPolicy(network)
    context = Context.of(given(20))
    varied = {
        (seed, turn): await run(policy, request(context, seed=seed, turn=turn)) for seed in (0, 1) for turn in (0, 1)
    }
    assert len({generation.tokens for generation in varied.values()}) == 4
    negative = await run(policy, request(context, seed=-(2**70)))
    assert negative.tokens


@pytest.mark.anyio
async def test_greedy_takes_the_likeliest_at_temperature_one() -> None:
    model = llama()
    generation = await run(
        LocalPolicy(HubNetwork(model)), request(Context.of(given(20)), sampling=Sampling(temperature=0), stop=())
    )
    with torch.inference_mode():
        logits = model(torch.tensor([given(20) + generation.tokens])).logits[0]
    expected = logits[19:-1].double().log_softmax(-1)
    assert generation.tokens == tuple(expected.argmax(-1).tolist())
    chosen = expected.max(-1).values.tolist()
    assert generation.logprobs == pytest.approx(chosen, abs=1e-4)


@pytest.mark.anyio
async def test_runners_up_are_the_second_likeliest_tokens_of_greedy_generations() -> None:
    model = llama()
    asked = request(Context.of(given(20)), sampling=Sampling(temperature=0), stop=(), runners_up=True)
    chunks: list[Chunk] = []
    await LocalPolicy(HubNetwork(model)).generate(asked, chunks.append)
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    with torch.inference_mode():
        logits = model(torch.tensor([given(20) + tokens])).logits[0]
    logprobs, expected = logits[19:-1].double().log_softmax(-1).topk(2)
    assert tokens == tuple(expected[:, 0].tolist())
    runners_up = [pair for chunk in chunks for pair in chunk.runners_up]
    assert [token for token, _ in runners_up] == expected[:, 1].tolist()
    assert [logprob for _, logprob in runners_up] == pytest.approx(logprobs[:, 1].tolist(), abs=1e-4)
    for other in (replace(asked, runners_up=False), replace(asked, sampling=Sampling())):
        chunks.clear()
        await LocalPolicy(HubNetwork(model)).generate(other, chunks.append)
        assert not any(chunk.runners_up for chunk in chunks)


def test_draw_follows_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    uniforms = [(i + 0.5) / 1000 for i in range(1000)]

    def frequencies(sampling: Sampling) -> dict[int, float]:
        drawn = [draw(logits, sampling, uniform) for uniform in uniforms]
        shares = Counter(token for token, _ in drawn)
        for token, logprob in drawn:
            assert math.exp(logprob) == pytest.approx(shares[token] / 1000, abs=2e-3)
        return {token: share / 1000 for token, share in shares.items()}

    assert frequencies(Sampling()) == pytest.approx({0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}, abs=2e-3)
    assert frequencies(Sampling(top_p=0.8)) == pytest.approx({0: 0.625, 1: 0.375}, abs=2e-3)
    assert frequencies(Sampling(top_p=0.81)) == pytest.approx({0: 10 / 19, 1: 6 / 19, 2: 3 / 19}, abs=2e-3)
    assert frequencies(Sampling(top_p=0.01)) == {0: 1.0}
    squared = [p * p / 0.365 for p in (0.5, 0.3, 0.15, 0.05)]
    assert frequencies(Sampling(temperature=0.5)) == pytest.approx(dict(enumerate(squared)), abs=2e-3)
    assert draw(logits, Sampling(), 0.0)[0] == 0
    assert draw(logits, Sampling(), 1 - 2**-53)[0] == 3


def test_int8_is_close_to_the_model() -> None:
    model = llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    )
    network = Int8Llama(model)
    memory = network.memory()
    with torch.inference_mode():
        whole = model(torch.tensor([given(300)])).logits[0].log_softmax(-1)
        read = torch.stack([network.read((token,), memory) for token in given(300)])
        last = network.read(given(300)[236:], memory.fork(236))
    divergence = (whole.exp() * (whole - read.log_softmax(-1))).sum(-1)
    assert divergence.mean() < 0.02  # with seven-bit activations it is 0.055
    assert torch.allclose(last, read[-1], atol=0.2)


def test_int8_says_what_it_cannot_do() -> None:
    with pytest.raises(InputError, match=r"int8.*use float32"):
        Int8Llama(llama(attention_bias=True))
    with pytest.raises(InputError, match=r"int8.*use float32"):
        Int8Llama(llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))


class Interrupted:
    """A network during whose reads the caller cancels."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.memory = network.memory
        self.during_read: Callable[[], None] = lambda: None

    def read(self, tokens: Tokens, memory: object) -> torch.Tensor:
        logits = self._network.read(tokens, memory)
        anyio.from_thread.run_sync(self.during_read)
        return logits


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("kind", ["croppable", "sliding window"])
async def test_cancelled_during_any_read(kind: str) -> None:
    network = NETWORKS["float32"]() if kind == "croppable" else sliding_window()
    context = Context.of(given(150))
    plain = await run(LocalPolicy(network), request(context))
    interrupted = Interrupted(network)
    policy = LocalPolicy(interrupted)
    for reads in range(1, 4 + len(plain.tokens)):
        countdown = reads
        with anyio.CancelScope() as scope:

            def count_down() -> None:
                nonlocal countdown
                countdown -= 1
                if countdown == 0:
                    scope.cancel()

            interrupted.during_read = count_down
            await run(policy, request(context))
        interrupted.during_read = lambda: None
        assert await run(policy, request(context)) == plain
        policy = LocalPolicy(interrupted)


def sliding_window() -> HubNetwork:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=32,
        initializer_range=0.3,
    )
    return HubNetwork(transformers.MistralForCausalLM(config))


@pytest.mark.anyio
async def test_a_model_that_cannot_forget_is_exact_too() -> None:
    """Sliding-window layers cannot drop their last tokens, so only whole memories are taken up again."""
    network = sliding_window()
    assert not network.memory().croppable
    plain = await rollout(LocalPolicy(network, cache_bytes=0), seed=4)
    assert await rollout(LocalPolicy(network), seed=4, interrupt=3) == plain
