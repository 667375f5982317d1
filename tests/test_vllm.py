"""The vLLM policy: against a real vLLM on the CPU, and, for what that does not do when asked, against a stand-in.

The model is a tiny Llama that has learnt one conversation by heart. So it writes real commands, and what it writes is
likely enough that it does not depend on whose float32 arithmetic it is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch.nn import functional

from http_server import Exchange, serve, until
from obsspec.background import background
from obsspec.budget import Seats
from obsspec.chat import ChatFormat, TerminalChat, WorldModelChat
from obsspec.context import Context, Tokens
from obsspec.errors import InputError
from obsspec.models import load_model
from obsspec.policies.following import FollowingPolicy
from obsspec.policies.http import Server
from obsspec.policies.local import LocalPolicy
from obsspec.policies.networks import HubNetwork
from obsspec.policies.vllm import Served as ServedModel
from obsspec.policies.vllm import VllmPolicy, find_model
from obsspec.predictors import LanguageModel
from obsspec.reports.records import TrajectoryLine, read_trajectories
from obsspec.reports.training import read_records
from obsspec.rollout import Failure, rollout
from obsspec.runs import Means, Plan
from obsspec.runs import run as carry_out
from obsspec.speculation import Settings, Speculator
from obsspec.testing import ScriptedEnvironment
from obsspec.training.cotraining import CoTraining, Pace
from obsspec.training.finetune import Recipe, load_trainable
from obsspec.training.publishing import VllmAdapters, VllmWeights
from obsspec.training.service import Service, run_service
from obsspec.training.transitions import Transitions
from obsspec.types import Chunk, Draft, Generation, Observation, PolicyError, Query, Request, Sampling, Task
from tiny import llama, tokenizer

torch.set_num_threads(1)

PYTHON = Path(__file__).parents[1] / ".venv-vllm/bin/python"
LONGEST = 4096
ADAPTERS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
INSTRUCTION = "Find the word."
EXCHANGES = (("ls", "a.txt\nb.txt\n"), ("cat a.txt", "see b.txt\n"), ("cat b.txt", "done?\n"), ("wc a.txt", "1 2 10\n"))
GREEDY = Sampling(temperature=0, max_tokens=48)
CHAT = TerminalChat(ChatFormat(tokenizer()))


@dataclass
class Served:
    """A server in processes of its own."""

    url: str
    model: Any
    directory: Path
    _command: list[str | Path]
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",  # for /pause and whole new weights
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for half a minute
        }
        log = self.directory.with_name(f"log {self.url.rpartition(':')[2]}")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | settings,
                stdout=output,
                stderr=subprocess.STDOUT,
                # So that all its processes can be killed. In a session of its own niceness might count for nothing.
                process_group=0,
            )
        deadline = time.monotonic() + 400
        while not healthy(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("vLLM did not start:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))
            time.sleep(0.5)

    def end(self, how: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, how)
        self._process.wait(60)


@contextmanager
def serving(directory: Path, model: Any, *options: str) -> Iterator[Served]:
    """A server of the model in ``directory``, with more ``options`` of vLLM's."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run make test, or scripts/vllm_environment.sh .venv-vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "nice",  # so that the test is not kept waiting by what it waits for
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", directory, "--dtype", "float32"),
        *("--served-model-name", "tiny", "alias", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", str(LONGEST), "--max-num-seqs", "4", "--scheduling-policy", "priority"),
        *("--logprobs-mode", "processed_logprobs", *options),
    ]
    server = Served(f"http://127.0.0.1:{port}", model, directory, command)
    try:
        server.start()
        yield server
    finally:
        server.end(signal.SIGTERM)


@pytest.fixture(scope="session")
def learnt_by_heart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with a model, and the model."""
    directory = tmp_path_factory.mktemp("vllm") / "model"
    model = learnt()
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory, model


@pytest.fixture(scope="session")
def served(learnt_by_heart: tuple[Path, Any]) -> Iterator[Served]:
    """One server for the whole run."""
    with serving(*learnt_by_heart, *ADAPTERS) as server:
        yield server


@pytest.fixture
def killable(learnt_by_heart: tuple[Path, Any]) -> Iterator[Served]:
    """One of its own for a test that kills it. On the one that others use, a request that was under way when the next
    adapter was loaded has been seen to change weights after such a test."""
    with serving(*learnt_by_heart, *ADAPTERS) as server:
        yield server


@pytest.fixture(scope="session")
def drafting(learnt_by_heart: tuple[Path, Any]) -> Iterator[Served]:
    """One that speculates as well, on tokens: it looks up in the prompt how what was written last went on before."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with serving(*learnt_by_heart, "--speculative-config", json.dumps(drafts)) as server:
        yield server


@pytest.fixture(params=["served", "drafting"])
def either(request: pytest.FixtureRequest) -> Iterator[Served]:
    """One of the two; by the second some drafts of tokens must have been taken."""
    server: Served = request.getfixturevalue(request.param)
    accepted = counted(server.url, "spec_decode_num_accepted_tokens_total")
    yield server
    if request.param == "drafting":
        assert counted(server.url, "spec_decode_num_accepted_tokens_total") > accepted


@pytest.fixture(autouse=True)
def no_adapters_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test has loaded on the server is not there for the next one."""
    yield
    if "served" in request.fixturenames:
        url = request.getfixturevalue("served").url
        for card in httpx.get(f"{url}/v1/models").json()["data"]:
            if card.get("parent"):
                httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": card["id"]})


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def models(url: str) -> list[str]:
    return [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]


def counted(url: str, name: str) -> int:
    """One of the server's figures."""
    metrics = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in metrics if line.startswith(f"vllm:{name}{{"))


def learnt() -> Any:
    """A model that has learnt EXCHANGES by heart."""
    model = llama(
        vocab_size=len(tokenizer()),
        hidden_size=128,  # heads of 32, the smallest that vLLM has
        max_position_embeddings=LONGEST,
        initializer_range=0.1,
        eos_token_id=CHAT.stop[0],
    )
    tokens, labels = list(CHAT.start(INSTRUCTION)), [-100] * len(CHAT.start(INSTRUCTION))
    for command, observation in (*EXCHANGES, ("", "")):
        written = CHAT.action_tokens(command) if command else CHAT.done_tokens()
        read = CHAT.observe(Generation(written), observation)
        tokens += written + read
        labels += [*written, *(-100 for _ in read)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(400):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
        loss = functional.cross_entropy(logits, torch.tensor(labels[1:]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 2e-3:
            return model.eval()
    raise AssertionError(f"the loss is still {loss}")


def context(turns: int = 0) -> Context:
    """The conversation that the model knows, after so many observations."""
    known = Context.of(CHAT.start(INSTRUCTION))
    for command, observation in EXCHANGES[:turns]:
        written = CHAT.action_tokens(command)
        known = known.sampled(written, (0.0,) * len(written)).given(CHAT.observe(Generation(written), observation))
    return known


def given(length: int, seed: int = 0) -> Tokens:
    """Tokens that mean nothing to the model, so that what follows varies."""
    return tuple((11 * i + 17 * seed + i * i) % 250 + 8 for i in range(length))


def request(**changes: Any) -> Request:
    settings = {
        "context": Context.of(given(40)),
        "sampling": Sampling(temperature=0.9, top_p=0.95),
        "max_tokens": 12,
        "stop": (),
        "seed": 3,
        "turn": 0,
        "rollout": "naïve\n#3",
    }
    return Request(**settings | changes)


async def run(policy: Any, asked: Request, then: Callable[[int], None] = lambda count: None) -> Generation:
    """The generation as its caller has it, ``resume`` included. ``then`` is told how many tokens came so far."""
    tokens, logprobs = list(asked.resume.tokens), list(asked.resume.logprobs)
    finish = None
    with anyio.CancelScope() as scope:

        def emit(chunk: Chunk) -> None:
            assert len(chunk.tokens) == len(chunk.logprobs) > 0
            assert not scope.cancel_called, "emitted after cancellation"
            tokens.extend(chunk.tokens)
            logprobs.extend(chunk.logprobs)
            if then(len(tokens)) is False:
                scope.cancel()

        with suppress(PolicyError):
            finish = await policy.generate(asked, emit)
    return Generation(tuple(tokens), tuple(logprobs), (), finish)


def expected_logprobs(model: Any, before: Context, tokens: Tokens, temperature: float = 1.0) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([before.tokens + tokens])).logits[0, before.length - 1 : -1]
    of_all = (logits.double() / temperature).log_softmax(-1)
    return of_all[range(len(tokens)), tokens].tolist()


def running(url: str) -> int:
    return counted(url, "num_requests_running")


@pytest.mark.anyio
async def test_the_same_request_gives_the_same_tokens(served: Served) -> None:
    async with VllmPolicy.connect(served.url, tokenizer=tokenizer()) as policy:
        first = await run(policy, request())
        assert (len(first.tokens), len(first.logprobs), first.finish) == (12, 12, "length")
        assert (await run(policy, request())).tokens == first.tokens
        policy.model = "alias"
        assert (await run(policy, request())).tokens == first.tokens
        others = [await run(policy, request(seed=seed, turn=turn)) for seed, turn in ((4, 0), (3, 1), (-(2**70), 0))]
        assert len({generation.tokens for generation in (first, *others)}) == 4
        assert all(logprob <= 0 for generation in others for logprob in generation.logprobs)


@pytest.mark.anyio
@pytest.mark.parametrize("turns", range(len(EXCHANGES) + 1))
async def test_greedy_is_what_the_local_policy_gives(served: Served, turns: int) -> None:
    asked = request(context=context(turns), sampling=GREEDY, max_tokens=48, stop=CHAT.stop)
    local = await run(LocalPolicy(HubNetwork(served.model)), asked)
    async with VllmPolicy.connect(served.url) as policy:
        remote = await run(policy, asked)
    assert remote.tokens == local.tokens
    assert remote.tokens[-1:] == CHAT.stop  # emitted like any other
    assert remote.finish == local.finish == "stop"
    assert remote.logprobs == pytest.approx(local.logprobs, abs=1e-4)


@pytest.mark.anyio
async def test_runners_up_are_what_the_local_policy_gives(served: Served) -> None:
    asked = request(context=context(2), sampling=GREEDY, max_tokens=48, stop=CHAT.stop, runners_up=True)
    local: list[Chunk] = []
    await LocalPolicy(HubNetwork(served.model)).generate(asked, local.append)
    remote: list[Chunk] = []
    async with VllmPolicy.connect(served.url) as policy:
        await policy.generate(asked, remote.append)
        sampled: list[Chunk] = []
        await policy.generate(request(runners_up=True), sampled.append)
    expected = [pair for chunk in local for pair in chunk.runners_up]
    runners_up = [pair for chunk in remote for pair in chunk.runners_up]
    assert len(runners_up) == sum(len(chunk.tokens) for chunk in remote)
    assert [token for token, _ in runners_up] == [token for token, _ in expected]
    assert [logprob for _, logprob in runners_up] == pytest.approx([logprob for _, logprob in expected], abs=1e-3)
    assert not any(chunk.runners_up for chunk in sampled)


@pytest.mark.anyio
async def test_logprobs_are_of_the_distribution_sampled_from(served: Served) -> None:
    asked = request(sampling=Sampling(temperature=0.7), max_tokens=32)
    async with VllmPolicy.connect(served.url) as policy:
        generation = await run(policy, asked)
    expected = expected_logprobs(served.model, asked.context, generation.tokens, temperature=0.7)
    assert generation.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.anyio
async def test_ends(served: Served) -> None:
    async with VllmPolicy.connect(served.url) as policy:
        free = await run(policy, request())
        middle = free.tokens[5]
        stopped = await run(policy, request(stop=(1, middle)))
        assert stopped.finish == "stop"
        assert stopped.tokens == free.tokens[: free.tokens.index(middle) + 1]
        assert await run(policy, request(stop=(1, middle), resume=stopped)) == stopped
        # Only what is named ends a generation, not what the model's own settings say.
        written = await run(policy, request(context=context(), sampling=GREEDY, max_tokens=48))
        assert CHAT.stop[0] in written.tokens[:-1] and written.finish == "length"
        with pytest.raises(ValueError, match="maximum context length is 4096 tokens"):
            await policy.generate(request(context=Context.of(given(LONGEST + 1))), lambda chunk: None)
        with pytest.raises(ValueError, match=r"^server http://127[^\n]*Token id 999 is out of vocabulary[^\n]*$"):
            await policy.generate(request(context=Context.of((999,))), lambda chunk: None)


@pytest.mark.anyio
async def test_suspended_and_resumed(either: Served) -> None:
    """Greedy, so that the draws after the resumption are the same: nothing is lost, repeated or beyond the budget."""
    asked = request(context=context(1), sampling=GREEDY, max_tokens=9)
    async with VllmPolicy.connect(either.url) as policy:
        plain = await run(policy, asked)
        pieces = Generation()
        while pieces.finish is None:
            upto = len(pieces.tokens) + 2
            resumed = request(context=context(1), sampling=GREEDY, max_tokens=9, resume=pieces)
            pieces = await run(policy, resumed, lambda count, upto=upto: count < upto)
    assert pieces.tokens == plain.tokens
    assert pieces.finish == plain.finish == "length"
    assert pieces.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.anyio
async def test_cancellation_aborts_the_request(served: Served) -> None:
    async with VllmPolicy.connect(served.url) as policy, anyio.create_task_group() as group:
        started = [anyio.Event() for _ in range(3)]
        for seed, event in enumerate(started):
            long = request(seed=seed, max_tokens=4000)
            group.start_soon(run, policy, long, lambda count, event=event: event.set())
        for event in started:
            await event.wait()
        await until(lambda: running(served.url) == 3)
        group.cancel_scope.cancel()
    await until(lambda: not running(served.url))  # Left alone they would take far longer.


@pytest.mark.anyio
async def test_others_requests_are_seen(served: Served) -> None:
    """One process speculates on a server that others use: it keeps off their seats, and knows when they have gone."""
    seats = Seats(4)
    async with (
        VllmPolicy.connect(served.url) as policy,
        VllmPolicy.connect(served.url) as others,
        anyio.create_task_group() as group,
    ):
        group.start_soon(policy.report, seats, 0.1)
        async with anyio.create_task_group() as their_requests:
            for seed in range(2):
                their_requests.start_soon(run, others, request(seed=seed, max_tokens=3000))
            await until(lambda: seats.running == 2)
            their_requests.cancel_scope.cancel()
        await until(lambda: seats.running == 0)
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_more_than_there_are_seats(served: Served) -> None:
    """Real work that comes last overtakes speculative requests that wait."""
    order: list[int] = []
    async with VllmPolicy.connect(served.url) as policy, anyio.create_task_group() as group:
        for number in range(12):
            asked = request(seed=number, max_tokens=100, priority=0 if number == 11 else 1 + number)
            # A busy server may send more than one token first.
            group.start_soon(run, policy, asked, lambda count, n=number: None if n in order else order.append(n))
            if number < 4:
                await until(lambda n=number: n in order)
    assert sorted(order) == list(range(12))
    assert order.index(11) < order.index(10)


@pytest.mark.anyio
async def test_paused_for_new_weights(served: Served) -> None:
    asked = request(context=context(), sampling=GREEDY, max_tokens=800)
    results: list[Generation] = []

    async def one(begun: anyio.Event) -> None:
        results.append(await run(policy, asked, lambda count: begun.set()))

    async with VllmPolicy.connect(served.url) as policy, Server(served.url) as server:
        plain = await run(policy, asked)

        # Whoever pauses the server may keep what is in flight: then requests wait, old ones and new ones,
        begun = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(one, begun)
            await begun.wait()
            await server.ask("POST", "/pause?mode=keep")
            try:
                group.start_soon(one, begun)
                await anyio.sleep(1)
                assert len(results) <= 1  # On busy cores the first may have ended before it was known to have begun.
            finally:
                await server.ask("POST", "/resume")
        assert [generation.tokens for generation in results] == [plain.tokens] * 2

        # or have it aborted: then the request has failed, and what came of it stands.
        asked = request(context=context(), sampling=GREEDY, max_tokens=3800)
        begun = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(one, begun)
            await begun.wait()
            await server.ask("POST", "/pause?mode=abort")
            await server.ask("POST", "/resume")
        cut = results[-1]
        assert cut.finish is None and 0 < len(cut.tokens) < 3800
        upto = len(cut.tokens) + 20
        again = await run(policy, request(context=context(), sampling=GREEDY, max_tokens=upto, resume=cut))
        assert again.finish == "length"
        assert again.logprobs == pytest.approx(expected_logprobs(served.model, asked.context, again.tokens), abs=1e-2)


@pytest.mark.anyio
async def test_connect(served: Served) -> None:
    async def refused(**arguments: Any) -> str:
        with pytest.raises(InputError) as error:
            async with VllmPolicy.connect(**{"url": served.url} | arguments):
                pass
        assert "\n" not in str(error.value)
        return str(error.value)

    async with VllmPolicy.connect(f"{served.url}/v1/", "alias", tokenizer(), max_context=LONGEST) as policy:
        assert (policy.model, policy.processed_logprobs) == ("alias", True)
    assert await refused(model="other") == f"server {served.url}: no model 'other'; it serves alias, tiny"
    assert "--max-model-len 4097, or lower max_context" in await refused(max_context=LONGEST + 1)
    more = tokenizer()
    more.add_tokens(["<more>"], special_tokens=True)
    assert "'<more>' is 300 here" in await refused(tokenizer=more)
    unreachable = await refused(url="http://127.0.0.1:9")
    assert unreachable.startswith("server http://127.0.0.1:9: Connect call failed")
    assert unreachable.endswith("; is it running, and is this its URL?")
    assert "give a URL like http://localhost:8000" in await refused(url="localhost:8000")


class Guess:
    """Right about all but the second command, one branch wide and, on branches, ahead of the tools."""

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        observation = dict(EXCHANGES).get(query.command, "?")
        propose(Draft("wrong" if query.command == "cat a.txt" else observation, 0.9))

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


@pytest.mark.anyio
async def test_speculation_changes_nothing(either: Served) -> None:
    environment = ScriptedEnvironment(lambda commands: Observation(dict(EXCHANGES)[commands[-1]], seconds=0.5))
    async with VllmPolicy.connect(either.url, tokenizer=tokenizer(), max_context=LONGEST) as policy:

        async def trajectory(depth: int) -> Any:
            environment.executed = ()
            settings = Settings(GREEDY, depth=depth, max_turns=8, max_context=LONGEST)
            speculator = Speculator(policy, CHAT, Guess(), settings, Seats(4))
            return await rollout(speculator, Task("word", INSTRUCTION), environment.open, seed=1)

        plain, speculative = await trajectory(0), await trajectory(2)
    assert environment.executed == tuple(command for command, _ in EXCHANGES)
    assert plain.end == speculative.end == "done"
    assert speculative.context.tokens == plain.context.tokens
    assert speculative.context.mask == plain.context.mask
    assert speculative.context.logprobs == pytest.approx(plain.context.logprobs, abs=1e-4)
    assert [turn.outcome for turn in plain.turns] == ["off"] * 5
    assert [turn.outcome for turn in speculative.turns] == ["hit", "miss", "hit", "hit", "off"]
    assert not running(either.url)


# New weights. The server is left as it was.


def adapter(model: Any, directory: Path, seed: int, rank: int = 4) -> Any:
    """Saves an adapter on a model that changes what it writes; returns the model with it."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # PEFT uses a name that has been replaced.
        adapted = get_peft_model(deepcopy(model), config)
    adapted.save_pretrained(directory)
    return adapted.merge_and_unload()


async def written(policy: Any, model: Any | None = None) -> Tokens:
    """What it writes greedily, or what ``model`` would."""
    asked = request(context=context(), sampling=GREEDY, max_tokens=24)
    return (await run(policy if model is None else LocalPolicy(HubNetwork(model)), asked)).tokens


@pytest.mark.anyio
async def test_what_is_cotrained_is_foretold_by_the_server(served: Served, tmp_path: Path) -> None:
    """From the store of transitions to the drafts of a world model on a server, while both run."""
    recipe = Recipe(rows_per_step=2, learning_rate=0.01, rank=4)
    query = Query("task", "Make a file.", (), "touch file")
    drafts: list[str] = []
    with Transitions.open(tmp_path / "store.sqlite") as transitions:
        transitions.add("rollout", query, Observation("it is there"))
        trainable = load_trainable(str(served.directory), recipe)
        training = CoTraining(transitions, tmp_path / "model", trainable, recipe, Pace(passes=100))
        service = Service(tmp_path / "store.sqlite", tmp_path / "model", 1.0, vllm=(served.url,))
        with anyio.fail_after(200):
            async with (
                FollowingPolicy.connect(served.url, None, tokenizer(), every=0.2) as policy,
                background() as tasks,
            ):
                tasks.start_soon(run_service, service, training, False, Console(quiet=True))
                predictor = LanguageModel(policy, WorldModelChat(ChatFormat(tokenizer())), floor=0.0)
                while drafts != ["it is there"]:
                    await anyio.sleep(0.2)
                    drafts.clear()
                    await predictor.predict(query, lambda draft: drafts.append(draft.text))
                assert policy.model.startswith("world-model-v")


def test_a_policy_on_the_server_is_trained(killable: Served, tmp_path: Path) -> None:
    """Rollouts come from the server, each step's by the weights of the step before, and their log-probabilities too;
    though the server is killed while the second step's are on their way, and comes back without them."""
    pytest.importorskip("trl")
    from obsspec.training.policy import train
    from obsspec.training.settings import read_settings

    task, run = tmp_path / "task", tmp_path / "run"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "instruction.md").write_text(INSTRUCTION)
    # Whatever is rewarded, no two rollouts alike: so that there is something to learn.
    (task / "tests/test.sh").write_text("echo 0.$RANDOM > /logs/verifier/reward.txt\n")
    chosen = {
        "tasks": str(task),
        "held_out": "",
        "policy": str(killable.directory),
        "server": killable.url,
        "rank": 4,
        "tasks_per_step": 1,
        "group": 8,
        "temperature": 2.0,  # At 1 the model, which knows its text by heart, says the same again and again.
        "max_turns": 3,
        "max_tokens": 24,
        "max_context": 1024,
        "threads": 1,
        "steps": 2,
        "checkpoint_every": 2,
        "learning_rate": 0.02,
    }

    def kill_in_second_step() -> None:
        deadline = time.monotonic() + 120
        while not ("policy-v2" in models(killable.url) and running(killable.url)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killable.end(signal.SIGKILL)
        killable.start()

    with ThreadPoolExecutor() as beside:
        killed = beside.submit(kill_in_second_step)
        train(read_settings(None, chosen), run, False, Console(quiet=True))
        killed.result()
    assert [step["rollouts"]["broken"] for step in read_records(run / "steps.jsonl")] == [0, 0]
    lines = {line.seed: line for line in read_trajectories(run / "rollouts")}
    assert len({tuple(lines[seed].tokens) for seed in range(8)}) > 1
    assert len({lines[seed].reward for seed in range(8)}) > 1
    assert {
        seed: {version for turn in line.turns for version in turn.weight_versions} for seed, line in lines.items()
    } == {seed: {seed // 8} for seed in range(16)}

    def difference(line: TrajectoryLine, version: int) -> float:
        """The largest, of the log-probabilities of what the policy wrote, to those by a version's weights."""
        model, _ = load_model(str(killable.directory), run / f"policy/v{version:06}")
        with torch.inference_mode():
            logprobs = model(torch.tensor([line.tokens])).logits[0].double().div(2.0).log_softmax(-1)
        written = [place for place, sampled in enumerate(line.mask) if sampled]
        return max(abs(float(logprobs[place - 1, line.tokens[place]]) - line.logprobs[place]) for place in written)

    assert difference(lines[0], 1) < 0.01
    assert difference(lines[8], 2) < 0.01 < 0.1 < difference(lines[8], 1)


@pytest.mark.anyio
async def test_new_adapters_are_followed(served: Served, tmp_path: Path) -> None:
    models = [adapter(served.model, tmp_path / f"{seed}", seed) for seed in range(3)]
    expected = [await written(None, model) for model in (served.model, *models)]
    assert len(set(expected)) == 4
    async with Server(served.url) as server:
        publisher = VllmAdapters(server, "shell")
        # The model itself while there is nothing newer.
        connection = FollowingPolicy.connect(served.url, "tiny", tokenizer(), max_context=LONGEST)
        async with connection as policy:
            assert (policy.model, await written(policy)) == ("tiny", expected[0])
        await publisher.publish(1, tmp_path / "0")
        async with FollowingPolicy.connect(served.url, "shell", tokenizer(), every=0.05) as policy:
            assert (policy.model, await written(policy)) == ("shell-v1", expected[1])

            # A request keeps the version with which it began.
            begun, results = anyio.Event(), []
            asked = request(context=context(), sampling=GREEDY, max_tokens=400)
            plain = await run(LocalPolicy(HubNetwork(models[0])), asked)

            async def one() -> None:
                results.append(await run(policy, asked, lambda count: begun.set()))

            async with anyio.create_task_group() as group:
                group.start_soon(one)
                await begun.wait()
                await publisher.publish(2, tmp_path / "1")
                await until(lambda: policy.model == "shell-v2")
                assert await written(policy) == expected[2]
                await publisher.publish(3, tmp_path / "2")
            assert results[0].tokens == plain.tokens
            await until(lambda: policy.model == "shell-v3")
            assert await written(policy) == expected[3]

            # A trainer that was restarted publishes the same version once more. Who looks in between sees the second.
            await publisher.publish(3, tmp_path / "0")
            async with FollowingPolicy.connect(served.url, "shell", tokenizer()) as another:
                assert (another.model, await written(another)) == ("shell-v3", expected[1])
        listed = [card["id"] for card in (await server.ask("GET", "/v1/models"))["data"]]
        assert listed == ["tiny", "alias", "shell-v2", "shell-v3"]

        # One that was unloaded since the last look.
        async with FollowingPolicy.connect(served.url, "shell", every=1000) as policy:
            await server.tell("/v1/unload_lora_adapter", {"lora_name": "shell-v3"})
            assert (policy.model, await written(policy)) == ("shell-v3", expected[2])
            assert policy.model == "shell-v2"

        with pytest.raises(InputError, match=r"404 [^\n]*; start it with --enable-lora, [^\n]*/missing$"):
            await publisher.publish(4, tmp_path / "missing")
        adapter(served.model, tmp_path / "wide", 3, rank=16)
        with pytest.raises(InputError, match="LoRA rank 16 is greater than max_lora_rank 8"):
            await publisher.publish(4, tmp_path / "wide")


@pytest.mark.anyio
async def test_whole_new_weights(served: Served, tmp_path: Path) -> None:
    model = adapter(served.model, tmp_path / "adapter", 1)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    async with Server(served.url) as server, VllmPolicy.connect(served.url) as policy:
        before = await written(policy)
        publisher = VllmWeights(server)
        try:
            await publisher.publish(1, tmp_path / "model")
            assert await written(policy) == await written(None, model) != before
        finally:
            await publisher.publish(2, served.directory)
        assert await written(policy) == before


# The command line. Its policy is the server's, so it has to do without PyTorch.

OBSSPEC = (sys.executable, "-c", "import sys; sys.modules['torch'] = None; from obsspec.cli import main; main()")


def rollout_command(served: Served, output: Path, *options: str) -> list[str]:
    tasks = ("--tasks", "generated:text/easy/0-1", "--output", str(output), "--policy", f"{served.url}/v1")
    return [*OBSSPEC, "rollout", *tasks, "--concurrency", "1", *options]


def obsspec(command: list[str]) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    assert all(line.startswith("rollouts: ") for line in finished.stderr.splitlines()), finished.stderr
    return finished.stdout


def test_command_line(served: Served, tmp_path: Path) -> None:
    options = ("--temperature", "0", "--max-turns", "3", "--max-tokens", "24", "--gate", str(tmp_path / "gate.json"))
    obsspec(rollout_command(served, tmp_path / "off", "--depth", "0", *options))
    turns = [json.loads((tmp_path / "gate.json").read_text())["turns"]]
    obsspec(rollout_command(served, tmp_path / "on", "--depth", "2", "--seats", "4", "--model", "tiny", *options))
    turns.append(json.loads((tmp_path / "gate.json").read_text())["turns"])
    assert turns[1] == 2 * turns[0] > 0  # The second run began with what the first had learned.
    settings = json.loads((tmp_path / "on" / "run.json").read_text())
    assert settings["model"] == "tiny"
    assert settings["policy"] == settings["tokenizer"] == str(served.directory)
    world_model = ("--predictor", "language_model", "--world-model", served.url, "--world-model-name", "alias")
    obsspec(rollout_command(served, tmp_path / "served", *world_model, *options))
    settings = json.loads((tmp_path / "served" / "run.json").read_text())
    assert (settings["world_model"], settings["world_model_name"]) == (str(served.directory), "alias")
    obsspec([*OBSSPEC, "compare", str(tmp_path / "off"), str(tmp_path / "served")])
    compared = obsspec([*OBSSPEC, "compare", str(tmp_path / "off"), str(tmp_path / "on")])
    assert compared.rstrip().endswith("trajectories identical: 2 of 2")


@pytest.mark.anyio
async def test_command_line_interrupted(served: Served, tmp_path: Path) -> None:
    endless = rollout_command(served, tmp_path / "run", "--max-tokens", "3000")
    async with await anyio.open_process(endless, stdout=None, stderr=subprocess.PIPE) as child:
        await until(lambda: running(served.url) == 1, 60)
        child.send_signal(signal.SIGINT)
        stderr = b"".join([data async for data in child.stderr]).decode()
    assert child.returncode == 130
    assert stderr.startswith("obsspec: interrupted; ") and "--resume" in stderr and len(stderr.splitlines()) == 1
    await until(lambda: not running(served.url))


# What a server does only when it is in trouble, from a stand-in.


class FakeVllm:
    """Writes 100, 101, ... after whatever prompt, one token an event."""

    def __init__(self) -> None:
        self.answers: list[Callable[[Exchange], Any]] = []
        """To the next requests, before the usual ones."""
        self.exchanges: list[Exchange] = []

    async def __call__(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if self.answers:
            await self.answers.pop(0)(exchange)
        elif exchange.path == "/v1/models":
            await exchange.json({"data": [{"id": "fake"}]})
        else:
            await self.write(exchange, exchange.body["max_tokens"])
            await exchange.end()

    async def write(self, exchange: Exchange, count: int) -> None:
        for left in reversed(range(exchange.body["max_tokens"])[-count:]):
            token = 100 + len(exchange.body["prompt"]) - 2 + exchange.body["max_tokens"] - 1 - left
            choice = {"text": "a\u2028b\x85", "token_ids": [token], "logprobs": {"token_logprobs": [-0.5]}}
            await exchange.event({"choices": [choice | {"finish_reason": None if left else "length"}]})


@pytest.mark.anyio
async def test_trouble_passes_without_a_token_lost_or_repeated() -> None:
    fake = FakeVllm()
    asked = {"context": Context.of((5, 6)), "max_tokens": 6, "sampling": Sampling()}

    async def half(exchange: Exchange) -> None:
        await fake.write(exchange, 3)
        await exchange.data(b'data: {"choices": [{"token_ids"')  # and breaks

    def refuse(status: int, **headers: str) -> Callable[[Exchange], Any]:
        return lambda exchange: exchange.json({"error": {"message": "Not\nnow"}}, status, **headers)

    async def silent(exchange: Exchange) -> None:
        pass

    async with serve(fake) as url, Server(url) as server:
        policy = VllmPolicy(server, "fake")
        policy.weight_version = 4
        for answer in (half, refuse(429), refuse(503), refuse(500), silent):
            fake.answers = [answer]
            chunks: list[Chunk] = []
            with pytest.raises(PolicyError, match=r"^server http://[^\n]*$"):
                await policy.generate(request(**asked), chunks.append)
            before = tuple(token for chunk in chunks for token in chunk.tokens)
            assert before == ((100, 101, 102) if answer is half else ())
            resume = Generation(before, (-0.5,) * len(before), (4,) * len(before))
            assert await policy.generate(request(resume=resume, **asked), chunks.append) == "length"
            assert tuple(token for chunk in chunks for token in chunk.tokens) == tuple(range(100, 106))
            assert {chunk.weight_version for chunk in chunks} == {4}

        # A server that says when it is back is waited for.
        fake.answers = [refuse(503, **{"Retry-After": "1"})] * 2
        began = anyio.current_time()
        assert (await run(policy, request(**asked))).tokens == tuple(range(100, 106))
        assert 2 <= anyio.current_time() - began < 10

        fake.answers = [refuse(422)]
        with pytest.raises(ValueError, match=r"^server http://127[^\n]*: 422 Not now$"):
            await policy.generate(request(**asked), lambda chunk: None)
    with pytest.raises(PolicyError, match="Connect call failed"):
        async with Server(url) as server:
            await VllmPolicy(server, "fake").generate(request(**asked), lambda chunk: None)
    seeds = [exchange.body["seed"] for exchange in fake.exchanges]
    assert len(set(seeds)) == 2  # from the start, and from three tokens on
    ids = [exchange.headers["x-request-id"] for exchange in fake.exchanges]
    assert len(set(ids)) == len(ids) - 2  # the one that was told to wait was sent three times
    assert {exchange.headers["x-session-id"] for exchange in fake.exchanges} == {"na%C3%AFve%0A%233"}
    assert {exchange.body["priority"] for exchange in fake.exchanges} == {0}


@pytest.mark.anyio
async def test_silence_is_waited_out_while_the_server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("obsspec.policies.http._SILENCE", 0.05)
    asked = request(context=Context.of((5, 6)), max_tokens=3, sampling=Sampling())
    there, questions = True, 0

    async def answer(exchange: Exchange) -> None:
        nonlocal questions
        if exchange.path == "/health":
            questions += 1
            await exchange.json({}, 404 if there else 503)
        else:
            await until(lambda: questions >= 2)
            await FakeVllm().write(exchange, 3)
            if there:
                await until(lambda: questions >= 4)
                await exchange.end()
            else:
                await anyio.sleep_forever()

    async with serve(answer) as url, Server(url) as server:
        policy = VllmPolicy(server, "fake")
        assert (await run(policy, asked)).tokens == (100, 101, 102)
        there = False
        with pytest.raises(PolicyError, match=r"^server http://[^\n]*: 503 "):
            await policy.generate(asked, lambda chunk: None)


@pytest.mark.anyio
async def test_servers_that_cannot_be_used() -> None:
    fake = FakeVllm()
    models = {"data": [{"id": "fake", "max_model_len": None}]}
    async with serve(fake) as url:

        async def refused(*answers: Any, **arguments: Any) -> str:
            fake.answers = [lambda exchange, value=value: exchange.json(value) for value in answers]
            with pytest.raises(InputError) as error:
                async with VllmPolicy.connect(url, **arguments):
                    pass
            assert "\n" not in str(error.value)
            return str(error.value)

        assert "not of the expected kind" in await refused({"models": []})
        assert "no model ''; it serves" in await refused({"data": []})

        async def without_ids(exchange: Exchange) -> None:
            await exchange.event({"choices": [{"text": "a", "finish_reason": None}]})

        fake.answers = [lambda exchange: exchange.json(models), without_ids]
        with pytest.raises(InputError, match=r"sends no token ids; use vLLM 0\.10\.2 or newer$"):
            async with VllmPolicy.connect(url):
                pass

        # Its log-probability of the one token in the nucleus is not 0: they are those of the whole vocabulary.
        async with VllmPolicy.connect(url, headers={"Authorization": "Bearer key"}) as policy:
            assert fake.exchanges[-1].headers["authorization"] == "Bearer key"
            with pytest.raises(InputError, match="start it with --logprobs-mode processed_logprobs"):
                await policy.generate(request(), lambda chunk: None)
            asked = request(context=Context.of((5, 6)), sampling=Sampling())
            assert (await run(policy, asked)).finish == "length"


@pytest.mark.anyio
async def test_what_a_server_says_of_its_models() -> None:
    fake = FakeVllm()
    cards = [
        {"id": "base", "root": "org/model", "parent": None, "max_model_len": 4096},
        {"id": "v1", "root": "/adapters/v1", "parent": "base"},
        {"id": "v2", "root": "/adapters/v2", "parent": "org/other"},
        {"id": "bare"},
        {"id": "sglang", "owned_by": "sglang"},
    ]

    async def models(exchange: Exchange) -> None:
        await exchange.json({"data": cards})

    async with serve(fake) as url, Server(url) as server:
        fake.answers = [models] * 6
        assert await find_model(server) == ServedModel("base", "org/model", "org/model", 4096)
        assert await find_model(server, "v1") == ServedModel("v1", "/adapters/v1", "org/model", 4096)
        assert (await find_model(server, "v2")).base == "org/other"
        assert (await find_model(server, "bare")).base == "bare"
        with pytest.raises(InputError, match=r"no model 'v3'; it serves bare, base, sglang, v1, v2$"):
            await find_model(server, "v3")
        with pytest.raises(InputError, match=r"is SGLang; use obsspec\.policies\.sglang"):
            await find_model(server, "sglang")


@pytest.mark.anyio
async def test_a_server_that_refuses_priorities_gets_none() -> None:
    fake = FakeVllm()

    async def write(exchange: Exchange) -> None:
        if "priority" in exchange.body:
            await exchange.json({"error": {"message": "Priority scheduling is not enabled"}}, 400)
        else:
            await fake.write(exchange, exchange.body["max_tokens"])
            await exchange.end()

    async with serve(fake) as url:
        fake.answers = [lambda exchange: exchange.json({"data": [{"id": "fake"}]}), *[write] * 3]
        async with VllmPolicy.connect(url) as policy:
            asked = request(context=Context.of((5, 6)), sampling=Sampling())
            assert (await run(policy, asked)).finish == "length"


@pytest.mark.anyio
async def test_runs_on_servers_that_cannot_be_used(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    broken = False

    async def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await exchange.json({"data": [{"id": "fake", "root": "/elsewhere"}]})
        elif exchange.path == "/tokenize":
            await exchange.json({"tokens": tokenizer().encode(exchange.body["prompt"], add_special_tokens=False)})
        elif exchange.path == "/metrics":
            await exchange.json({}, 404)
        elif exchange.body["max_tokens"] > 1 and broken:
            await exchange.json({"message": "EngineDead"}, 400)
        else:
            await FakeVllm().write(exchange, exchange.body["max_tokens"])
            await exchange.end()

    async def carried_out(**changes: Any) -> list[Failure]:
        plan = Plan("generated:text/easy/0-1", url, **{"tokenizer": str(tmp_path / "tokenizer")} | changes)
        arguments = (tmp_path / "run", True, Means(), Console(quiet=True))
        return await anyio.to_thread.run_sync(carry_out, plan, *arguments)

    async with serve(answer) as url:
        with pytest.raises(InputError, match="tokenizer /elsewhere: no such directory; give --tokenizer the one of"):
            await carried_out(tokenizer=None)
        with pytest.raises(InputError, match="no model 'other'; it serves fake"):
            await carried_out(model="other")
        with pytest.raises(InputError, match="start it with --logprobs-mode processed_logprobs"):
            await carried_out(temperature=0.5)
        assert not read_trajectories(tmp_path / "run")

        broken = True
        failures = await carried_out(max_turns=2, max_tokens=8)
        assert [failure.error for failure in failures] == [f"ValueError: server {url}: 400 EngineDead"] * 2
        assert (tmp_path / "run" / "failures.jsonl").read_text().count("EngineDead") == 2
        broken = False
        assert await carried_out(max_turns=2, max_tokens=8) == []
    assert len(read_trajectories(tmp_path / "run")) == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["policy"] == "/elsewhere"

    async with serve(answer) as url:  # The same model in another place: nothing is left to be done.
        assert await carried_out(max_turns=2, max_tokens=8) == []
