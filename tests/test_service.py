"""Co-training as a service, with real sockets: transitions come in, versions go out, and figures can be read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("peft")

import httpx
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from http_server import Exchange as Http
from http_server import serve, until
from obsspec.background import background
from obsspec.errors import InputError
from obsspec.policies.versions import WORLD_MODEL, versions
from obsspec.predictors import LanguageModel
from obsspec.runs import Plan, Servers
from obsspec.training.cotraining import CoTraining
from obsspec.training.posting import PostedTransitions
from obsspec.training.service import Service, application, bind, cotrain, listening, run_service, status
from obsspec.training.transitions import Transitions, posted_line
from obsspec.types import Draft, Exchange, Observation, PolicyError, Query
from test_cotraining import add, cotraining
from test_publishing import FakeServer

QUIET = Console(quiet=True)


@contextmanager
def service(root: Path, base: str) -> Iterator[tuple[Transitions, CoTraining, str]]:
    with (
        cotraining(root, base) as (transitions, training),
        listening(application(training, transitions), bind("127.0.0.1:0")) as url,
    ):
        yield transitions, training, url


def query(place: int) -> Query:
    history = tuple(Exchange(f"touch {i}", "file") for i in range(place))
    return Query("task", "Make files.", history, f"touch {place}")


def test_rollouts_elsewhere_are_learned_from(base: str, tmp_path: Path) -> None:
    with service(tmp_path, base) as (transitions, training, url):
        with PostedTransitions.open(url) as posted:
            for place in range(300):  # More than goes at once.
                posted.add("far", query(place), Observation("file", 1.0))
        assert posted.lost == 0
        assert len(transitions) == 300
        training.turn()
        figures = httpx.get(f"{url}/status").json()
        assert (figures["seen"], figures["steps"], figures["version"]) == (300, 1, 1)
        assert figures["exact_rate"] == status(training)["exact_rate"] == 0.0
        metrics = httpx.get(f"{url}/metrics").text
        assert "obsspec_world_model_seen_total 300.0" in metrics
        assert "obsspec_world_model_exact_rate 0.0" in metrics


def test_what_is_posted_twice_or_is_nothing_adds_nothing(base: str, tmp_path: Path) -> None:
    lines = [posted_line("far", query(place), Observation("file")) for place in range(3)]
    with service(tmp_path, base) as (transitions, _, url):
        post = lambda content: httpx.post(f"{url}/transitions", content=content)  # noqa: E731
        assert post(b"".join(lines[:2])).json() == {"added": 2, "without_beginning": 0}
        assert post(b"".join(lines)).json() == {"added": 1, "without_beginning": 0}
        other = posted_line("other", query(2), Observation("file"))
        assert post(other).json() == {"added": 0, "without_beginning": 1}
        refused = post(lines[0].replace(b'"far"', b'"new"') + b'{"rollout": 3}\n')
        assert refused.status_code == 400 and "line 2: rollout" in refused.json()["error"]
        assert len(transitions) == 3


def test_posting_outlives_a_restart_of_the_service(base: str, tmp_path: Path) -> None:
    with cotraining(tmp_path, base) as (transitions, training):
        app = application(training, transitions)
        with listening(app, bind("127.0.0.1:0")) as url:
            opened = PostedTransitions.open(url)
            posted = opened.__enter__()
            posted.add("far", query(0), Observation("file"))
        posted.add("far", query(1), Observation("file"))
        with listening(app, bind(url.removeprefix("http://"))):
            opened.__exit__(None, None, None)
        assert posted.lost == 0 and len(transitions) == 2


def test_where_no_service_is(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="is `obsspec world-model serve --listen` running there"),
        PostedTransitions.open("http://127.0.0.1:9"),
    ):
        pass
    for url in ("http://", "https://", "http:///x", "http://h:abc", "http://h:99999"):
        message = f"--transitions {url}: .*; give the URL of an `obsspec world-model serve --listen`"
        with pytest.raises(InputError, match=message), PostedTransitions.open(url):
            pass
    for nowhere in (
        "nowhere",
        "8100",
        ":8100",
        "127.0.0.1:70000",
        "127.0.0.1:x",
        "nowhere.invalid:80",
        f"{'x' * 99}:1",
    ):
        with pytest.raises(InputError, match=rf"--listen {nowhere}: .*give HOST:PORT"):
            bind(nowhere)


@pytest.mark.parametrize("answer", [(200, "<html>"), (200, "[]"), (307, ""), (404, "no"), (200, "{}")])
def test_an_answer_that_makes_no_sense_is_a_loss_and_no_more(answer: tuple[int, str]) -> None:
    async def refuse(request: Any) -> Response:
        return Response(answer[1], answer[0])

    async def status(request: Any) -> Response:
        return JSONResponse({"exact_rate": None})

    app = Starlette(routes=[Route("/transitions", refuse, methods=["POST"]), Route("/status", status)])
    with listening(app, bind("[::1]:0")) as url, PostedTransitions.open(url) as posted:
        posted.add("far", query(0), Observation("file"))
    assert posted.lost == 1


class Taking:
    """A server for new versions. The first time that it is asked for one, it is away."""

    def __init__(self, until: anyio.Event, most: int) -> None:
        self.versions: list[int] = []
        self._until = until
        self._most = most
        self._away = True

    async def publish(self, version: int, directory: Path) -> None:
        assert (directory / "adapter_model.safetensors").is_file()
        if self._away:
            self._away = False
            raise PolicyError("away")
        self.versions.append(version)
        if len(self.versions) == self._most:
            self._until.set()


@pytest.mark.anyio
async def test_versions_reach_a_server_that_was_away(base: str, tmp_path: Path) -> None:
    with cotraining(tmp_path, base) as (transitions, training):
        add(transitions, "first", ["file", "done"])
        server = Taking(anyio.Event(), 2)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cotrain, training, [server], 0.0, QUIET)
                await server._until.wait()
                tasks.cancel_scope.cancel()
        assert server.versions == sorted(server.versions)
        steps = training.figures.steps
    with cotraining(tmp_path, base) as (_, training):
        assert training.figures.steps == steps  # It saved when it was told to end.


@pytest.mark.anyio
async def test_servers_take_a_version_one_after_the_other_and_wait_for_none_that_is_away(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("obsspec.training.service._RETRY_SECONDS", 0.05)
    fakes = [FakeServer(), FakeServer(), FakeServer()]
    loading = most = 0

    def slow(fake: FakeServer) -> Callable[[Http], Awaitable[None]]:
        async def answer(exchange: Http) -> None:
            nonlocal loading, most
            loading += 1
            most = max(most, loading)
            await anyio.sleep(0.02)  # Time for others to come between.
            loading -= 1
            await fake(exchange)

        return answer

    def newest(fake: FakeServer) -> int:
        return max(versions(WORLD_MODEL, fake.adapters), default=0)

    first, away, last = fakes
    away.refusals = {"/v1/models": (503, {"error": "Restarting"})}
    said = StringIO()
    with cotraining(tmp_path, base) as (transitions, training):
        add(transitions, "first", ["file", "done"])
        async with AsyncExitStack() as stack:
            urls = tuple([await stack.enter_async_context(serve(slow(fake))) for fake in fakes])
            service = Service(tmp_path, tmp_path / "model", 0.0, vllm=urls[:2], sglang=urls[2:])
            tasks = await stack.enter_async_context(background())
            tasks.start_soon(run_service, service, training, False, Console(file=said))
            await until(lambda: newest(first) >= 2 and newest(last) >= 2, 60)
            assert away.adapters == {}
            assert f"not taken, trying again: server {urls[1]}: 503 Restarting" in said.getvalue()
            away.refusals = {}
            await until(lambda: newest(first) == newest(away) == newest(last) == training.figures.version, 60)
    assert most == 1


@pytest.mark.anyio
async def test_a_server_that_never_takes_a_version_is_known_before_training(base: str, tmp_path: Path) -> None:
    fakes = [FakeServer(), FakeServer()]
    fakes[1].refusals = {"/v1/load_lora_adapter": (404, {"detail": "Not Found"})}
    with cotraining(tmp_path, base) as (transitions, training):
        add(transitions, "first", ["file", "done"])
        async with serve(fakes[0]) as url, serve(fakes[1]) as other:
            service = Service(tmp_path, tmp_path / "model", 0.0, vllm=(url, other))
            with pytest.raises(InputError, match=rf"server {other}: 404 Not Found; start it with"):
                await run_service(service, training, False, QUIET)
        assert training.figures.steps == 0


@pytest.mark.anyio
async def test_a_world_model_in_this_process_follows(base: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The rollouts' world model foretells what was learned while it was in use."""
    import obsspec.loading

    monkeypatch.setattr(obsspec.loading, "_LOOK_SECONDS", 0.01)
    with cotraining(tmp_path, base) as (transitions, training):
        plan = Plan("", world_model=str(tmp_path / "model"), predictor="language_model", precision="float32")
        open_world_model, chat = obsspec.loading._world_model(plan, Servers())
        async with open_world_model() as policy:
            predictor = LanguageModel(policy, chat, floor=0.0)

            async def drafts() -> list[str]:
                found: list[Draft] = []
                await predictor.predict(query(0), found.append)
                return [draft.text for draft in found]

            assert await drafts() != ["file"]
            add(transitions, "first", ["file", "done"])
            while training.turn():
                pass
            assert training.publish() is not None
            with anyio.fail_after(30):
                while await drafts() != ["file"]:  # noqa: ASYNC110 -- it says nothing when it has changed
                    await anyio.sleep(0.05)
