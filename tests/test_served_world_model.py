"""A world model on a server, from the command line's settings to the drafts, with stand-ins.

What a real vLLM does with the requests is in test_vllm.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from http_server import Exchange, serve, until
from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.context import Context
from obsspec.errors import InputError
from obsspec.loading import Models
from obsspec.policies.following import FollowingPolicy
from obsspec.policies.replicas import Replicas
from obsspec.predictors import Cascade, LanguageModel
from obsspec.reports.records import TrajectoryLine, read_trajectories
from obsspec.rollout import Failure
from obsspec.runs import Means, Plan, Servers
from obsspec.runs import run as carry_out
from obsspec.types import Chunk, Draft, Query, Request, Sampling
from tiny import tokenizer

COMMANDS = ("echo one two", "echo three; exit 3", "cat nothing", "true")
PRINTED = ("one two", "three\n[exit code 3]", "a guess", "(no output)")
"""What the world model says; only the third is not so."""


class FakeModel:
    """A vLLM server whose model reads text and writes text, in its own tokens."""

    def __init__(self, directory: Path, vocab_size: int, write: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer(vocab_size=vocab_size)
        self.tokenizer.save_pretrained(directory)
        self.names = ["model"]
        self.exchanges: list[Exchange] = []
        self.broken = False
        self._directory = directory
        self._write = write

    @property
    def completions(self) -> list[Exchange]:
        """Those of rollouts."""
        return [each for each in self.exchanges if each.path == "/v1/completions" and len(each.body["prompt"]) > 1]

    async def __call__(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if exchange.path == "/v1/models":
            base = {"root": str(self._directory), "parent": None, "max_model_len": 4096}
            adapter = {"root": "/adapter", "parent": "model"}
            cards = [{"id": name} | (adapter if place else base) for place, name in enumerate(self.names)]
            await exchange.json({"data": cards})
        elif exchange.path == "/tokenize":
            await exchange.json({"tokens": self.tokenizer.encode(exchange.body["prompt"], add_special_tokens=False)})
        elif exchange.path == "/metrics":
            await exchange.json({}, 404)
        elif self.broken:
            await exchange.json({"error": {"message": "EngineDead"}}, 500)
        elif exchange.body["model"] not in self.names:
            await exchange.json({"error": {"message": f"no {exchange.body['model']}"}}, 404)
        else:
            await self._complete(exchange)

    async def _complete(self, exchange: Exchange) -> None:
        text = self._write(self.tokenizer.decode(exchange.body["prompt"])) + "<|im_end|>"
        tokens = self.tokenizer.encode(text, add_special_tokens=False)[: exchange.body["max_tokens"]]
        for place, token in enumerate(tokens):
            ended = "stop" if token in exchange.body["stop_token_ids"] else "length"
            likeliest = {f"token_id:{token}": -0.001, f"token_id:{token + 1}": -7.0}
            choice = {"token_ids": [token], "logprobs": {"token_logprobs": [-0.001], "top_logprobs": [likeliest]}}
            await exchange.event({"choices": [choice | {"finish_reason": ended if place == len(tokens) - 1 else None}]})
        await exchange.end()


def command(prompt: str) -> str:
    """What the policy writes next."""
    turn = prompt.count("<|im_start|>assistant") - 1
    return f"```bash\n{COMMANDS[turn]}\n```" if turn < len(COMMANDS) else "done"


def printed(prompt: str) -> str:
    """What the world model writes next."""
    asked = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return dict(zip(COMMANDS, PRINTED, strict=True)).get(asked, "?")


@pytest.fixture
def policy(tmp_path: Path) -> FakeModel:
    return FakeModel(tmp_path / "policy", 330, command)


@pytest.fixture
def world_model(tmp_path: Path) -> FakeModel:
    """Its tokens are not the policy's."""
    return FakeModel(tmp_path / "world-model", 290, printed)


async def carried_out(directory: Path, policy_url: str, world_model_url: str, **changes: Any) -> list[Failure]:
    settings = {"predictor": "language_model", "world_model": world_model_url, "max_turns": 6, "depth": 2}
    plan = Plan("generated:text/easy/0-1", policy_url, **settings | changes)
    return await anyio.to_thread.run_sync(carry_out, plan, directory, True, Means(), Console(quiet=True))


def exact(line: TrajectoryLine) -> list[bool]:
    """Of every command in turn, whether the world model's draft was."""
    drafts = [turn.drafts for turn in line.turns if turn.command]
    assert {draft.predictor for each in drafts for draft in each} == {"language_model"}
    return [any(draft.exact for draft in each) for each in drafts]


@pytest.mark.anyio
async def test_drafts_come_from_the_server(policy: FakeModel, world_model: FakeModel, tmp_path: Path) -> None:
    async with serve(policy) as policy_url, serve(world_model) as url:
        assert await carried_out(tmp_path / "run", policy_url, f"{url}/v1", latency="0.3") == []
    lines = read_trajectories(tmp_path / "run")
    assert [exact(line) for line in lines] == [[True, True, False, True]] * 2
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (settings["policy"], settings["world_model"]) == (str(tmp_path / "policy"), str(tmp_path / "world-model"))

    # All that a rollout asks goes to the same server, and behind what the policy asks.
    sessions: dict[str, set[str]] = {}
    for asked in world_model.completions:
        instruction = world_model.tokenizer.decode(asked.body["prompt"]).split("<|im_end|>")[1]
        sessions.setdefault(instruction, set()).add(asked.headers["x-session-id"])
    assert len(sessions) == 2 == len(set.union(*sessions.values()))
    assert min(asked.body["priority"] for asked in world_model.completions) > 2
    assert max(asked.body["priority"] for asked in policy.completions) <= 2

    # A run goes on with the same model in another place: nothing is left to be done.
    async with serve(policy) as policy_url, serve(world_model) as url:
        assert await carried_out(tmp_path / "run", policy_url, url, latency="0.3") == []
        with pytest.raises(InputError, match=r"has world_model = '[^']*/world-model', now it is '[^']*/policy'"):
            await carried_out(tmp_path / "run", policy_url, policy_url, latency="0.3")


@pytest.mark.anyio
async def test_a_run_may_go_on_with_a_newer_version(policy: FakeModel, world_model: FakeModel, tmp_path: Path) -> None:
    async with serve(policy) as policy_url, serve(world_model) as url:
        for names in (["model"], ["model", "world-model-v9", "world-model-v10", "other"]):
            world_model.names = names
            assert await carried_out(tmp_path / "run", policy_url, url) == []
        assert await carried_out(tmp_path / "newer", policy_url, url) == []
        assert await carried_out(tmp_path / "other", policy_url, url, world_model_name="other") == []
        with pytest.raises(InputError, match="no model 'another'; it serves model, other, world-model-v10, world"):
            await carried_out(tmp_path / "another", policy_url, url, world_model_name="another")
    asked = [each.body["model"] for each in world_model.completions]
    assert list(dict.fromkeys(asked)) == ["model", "world-model-v10", "other"]
    assert json.loads((tmp_path / "newer" / "run.json").read_text())["world_model"] == str(tmp_path / "world-model")


@pytest.mark.anyio
async def test_rollouts_go_on_without_it(
    policy: FakeModel, world_model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(policy) as policy_url, serve(world_model) as url:

        async def break_down() -> None:
            await until(lambda: bool(world_model.completions))
            world_model.broken = True

        async with anyio.create_task_group() as group:
            group.start_soon(break_down)
            assert await carried_out(tmp_path / "run", policy_url, url, latency="0.2") == []
    lines = read_trajectories(tmp_path / "run")
    assert [line.end for line in lines] == ["done"] * 2
    assert "predictor language_model failed; the rollouts go on without it" in caplog.text


@pytest.mark.anyio
async def test_what_cannot_be_used_is_said_in_one_line(
    policy: FakeModel, world_model: FakeModel, tmp_path: Path
) -> None:
    async with serve(policy) as policy_url:
        with pytest.raises(InputError, match="builtin: is no URL of a server, and --world-model-name is for those"):
            await carried_out(tmp_path / "run", policy_url, "builtin", world_model_name="model")
        async with serve(world_model) as url:
            (tmp_path / "world-model").rename(tmp_path / "elsewhere")
            with pytest.raises(InputError, match=r"no such directory; start the server at http://127[^\n]* known here"):
                await carried_out(tmp_path / "run", policy_url, url)
        with pytest.raises(InputError, match=r"Connect call failed[^\n]*; is it running, and is this its URL\?$"):
            await carried_out(tmp_path / "run", policy_url, url)
        with pytest.raises(InputError, match=r"only language_model uses it; add that to --predictor rules,memory$"):
            await carried_out(tmp_path / "run", policy_url, url, predictor="rules,memory")
        # Without speculation it need not be there.
        assert await carried_out(tmp_path / "off", policy_url, url, depth=0) == []


@pytest.mark.anyio
async def test_whoever_says_where_the_tokenizer_is_says_it_once(policy: FakeModel, tmp_path: Path) -> None:
    """Policy and world model are adapters on the same base."""
    policy.names += ["world-model-v1"]
    (tmp_path / "policy").rename(tmp_path / "tokenizer")
    async with serve(policy) as url:
        assert await carried_out(tmp_path / "run", url, url, tokenizer=str(tmp_path / "tokenizer")) == []
    assert {each.body["model"] for each in policy.completions} == {"model", "world-model-v1"}


@pytest.mark.anyio
async def test_one_server_of_several_is_enough(
    policy: FakeModel, world_model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(policy) as policy_url, serve(world_model) as url:
        async with serve(world_model) as gone:
            pass
        for urls in (f"{gone},{url}", f"{url},{gone}"):
            assert await carried_out(tmp_path / "run", policy_url, urls, latency="0.3") == []
        (message,) = caplog.messages  # Nothing was left to be done in the second run.
        assert message.startswith(f"world model server {gone} is away")
        assert [exact(line) for line in read_trajectories(tmp_path / "run")] == [[True, True, False, True]] * 2
        settings = json.loads((tmp_path / "run" / "run.json").read_text())
        assert settings["world_model"] == str(tmp_path / "world-model")

        with pytest.raises(InputError, match=rf"server {url}: no model 'other'"):
            await carried_out(tmp_path / "other", policy_url, f"{gone},{url}", world_model_name="other")
        with pytest.raises(InputError, match=rf"server {gone}: Connect call failed[^\n]*is this its URL\?$"):
            await carried_out(tmp_path / "other", policy_url, f"{gone},{gone}")
        options = ("--tasks", "generated:text/easy/0", "--output", str(tmp_path / "other"), "--policy", policy_url)
        options += ("--predictor", "language_model", "--world-model", f"{url},{policy_url}")
        command = [sys.executable, "-c", "from obsspec.cli import main; main()", "rollout", *options]
        finished = await anyio.run_process(command, check=False)
        assert (finished.returncode, finished.stderr.decode()) == (
            2,
            f"obsspec: --world-model {url},{policy_url}: these are different models, {tmp_path}/world-model at {url}, "
            f"{tmp_path}/policy at {policy_url}; give servers of one\n",
        )


@pytest.mark.anyio
async def test_a_hung_server_holds_no_start_up(
    policy: FakeModel, world_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("obsspec.policies.http._ANSWER_SECONDS", 2.0)

    async def hang(exchange: Exchange) -> None:
        await anyio.sleep_forever()

    async with serve(policy) as policy_url, serve(world_model) as url, serve(hang) as hung:
        assert await carried_out(tmp_path / "run", policy_url, f"{hung},{url}", latency="0.3") == []
        assert [exact(line) for line in read_trajectories(tmp_path / "run")] == [[True, True, False, True]] * 2
        with pytest.raises(InputError, match=rf"server {hung}: TimeoutError; is it running"):
            await carried_out(tmp_path / "other", policy_url, hung)


@pytest.mark.anyio
async def test_drafts_come_back_with_the_server(world_model: FakeModel, caplog: pytest.LogCaptureFixture) -> None:
    query = Query("task", "Print.", (), COMMANDS[0])
    chat = WorldModelChat(ChatFormat(world_model.tokenizer))
    async with (
        serve(world_model) as url,
        Replicas.connect([url], None, world_model.tokenizer, max_context=4096, every=0.02) as policy,
    ):
        predictor = Cascade({"language_model": LanguageModel(policy, chat)})

        async def drafts() -> list[str]:
            found: list[Draft] = []
            await predictor.predict(query, found.append)
            return [draft.text for draft in found]

        assert await drafts() == [PRINTED[0]]
        world_model.broken = True
        assert [await drafts() for _ in range(2)] == [[], []]
        world_model.broken = False
        await until(lambda: f"world model server {url} is there now" in caplog.messages)
        assert await drafts() == [PRINTED[0]]


def test_a_world_model_on_the_policys_own_server_costs_it_time(policy: FakeModel, tmp_path: Path) -> None:
    own, other = "http://own", "http://other"
    plan = Plan("", predictor="language_model", tokenizer=str(tmp_path / "policy"))
    for urls, together in (((own,), True), ((other,), False), ((own, other), False)):
        models = Models.load(plan, Servers(own, urls, str(tmp_path / "policy")))
        assert (models.asking_price is None) == together


@pytest.mark.anyio
async def test_versions_come_and_go(world_model: FakeModel) -> None:
    asked = Request(Context.of((5, 6)), Sampling(), 1, (), seed=0, turn=0)
    chunks: list[Chunk] = []
    async with serve(world_model) as url, FollowingPolicy.connect(url, every=0.01) as policy:
        for names, expected in (
            (["model", "world-model-v1"], "world-model-v1"),
            (["model", "world-model-v1", "world-model-v2"], "world-model-v2"),
            (["model"], "model"),
        ):
            world_model.names = names
            await until(lambda expected=expected: policy.model == expected)
    async with serve(world_model) as url, FollowingPolicy.connect(url, every=1000) as policy:
        await until(lambda: [each.path for each in world_model.exchanges[-2:]] == ["/v1/completions", "/v1/models"])
        world_model.names = ["model", "world-model-v1"]
        await policy.generate(asked, chunks.append)
        assert world_model.exchanges[-1].body["model"] == "model"  # which is still there
        # It was unloaded: whatever is there takes its place. Where nothing does, that is said.
        world_model.names = ["another"]
        await policy.generate(asked, chunks.append)
        assert world_model.exchanges[-1].body["model"] == "another"
        world_model.names = []
        with pytest.raises(ValueError, match="404 no another"):
            await policy.generate(asked, chunks.append)
    assert len(chunks) == 2
