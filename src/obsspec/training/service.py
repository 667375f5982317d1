"""Co-training as a service: it trains while rollouts run, publishes, takes transitions in and says how it goes.

POST /transitions    lines of JSON, from `training.posting`
GET /status          the figures as JSON
GET /metrics         the same for Prometheus
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import anyio.to_thread
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from obsspec.background import background
from obsspec.errors import InputError, host_and_port
from obsspec.policies.http import Server
from obsspec.training.cotraining import CoTraining, Pace
from obsspec.training.finetune import Recipe, load_trainable
from obsspec.training.publishing import Publisher, SglangAdapters, SglangWeights, VllmAdapters, VllmWeights
from obsspec.training.transitions import Transitions
from obsspec.training.versions import current_version, publishing_alone
from obsspec.types import PolicyError

_IDLE_SECONDS = 1.0
_SAVE_SECONDS = 120.0
_RETRY_SECONDS = 5.0
_NOTE_SECONDS = 30.0
_CLOSE_SECONDS = 2
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Service:
    """Where a co-training's transitions come from, and where its versions go."""

    store: Path
    directory: Path
    publish_seconds: float
    listen: str | None = None
    """HOST:PORT"""
    vllm: tuple[str, ...] = ()
    """The URLs of servers, as the next ones."""
    sglang: tuple[str, ...] = ()


def serve(service: Service, base: str, adapter: str | None, recipe: Recipe, pace: Pace, notes: Console) -> None:
    """Co-trains the model ``base``, from ``adapter`` on, until Ctrl-C. Raises InputError as `cotrain` does, and for
    places that cannot be used, before anything is trained."""
    if not service.publish_seconds >= 0:
        raise InputError(f"--publish-seconds {service.publish_seconds}: must be 0 or more")
    with ExitStack() as stack:
        bound = None if service.listen is None else stack.enter_context(bind(service.listen))
        stack.enter_context(publishing_alone(service.directory))
        transitions = stack.enter_context(Transitions.open(service.store))
        with notes.status("loading the model"):
            trainable = load_trainable(base, recipe, adapter)
            training = CoTraining(transitions, service.directory, trainable, recipe, pace)
        notes.print(f"version {training.figures.version} in {service.directory}: {_said(training)}", soft_wrap=True)
        if bound is not None:
            url = stack.enter_context(listening(application(training, transitions), bound))
            notes.print(f"listening at {url}: /transitions, /status, /metrics", soft_wrap=True)
        anyio.run(run_service, service, training, recipe.rank is None, notes)


async def run_service(service: Service, training: CoTraining, whole: bool, notes: Console) -> None:
    """Co-trains until it is cancelled, for the servers of ``service``. ``whole``: whether versions are whole models,
    rather than adapters."""
    async with AsyncExitStack() as stack:
        publishers: list[Publisher] = []
        for url in service.vllm:
            server = await stack.enter_async_context(Server(url))
            publishers.append(VllmWeights(server) if whole else VllmAdapters(server))
        for url in service.sglang:
            server = await stack.enter_async_context(Server(url))
            publishers.append(SglangWeights(server) if whole else SglangAdapters(server))
        await cotrain(training, publishers, service.publish_seconds, notes)


async def cotrain(
    training: CoTraining, publishers: Sequence[Publisher], publish_seconds: float, notes: Console
) -> None:
    """Trains until it is cancelled, and publishes a version every so many seconds, where there is something new.

    Cancelled, it ends after the step that it is at, and saves. Raises InputError where a server will take no version,
    or the disk no checkpoint.
    """
    newest = current_version(training.directory)
    async with background() as tasks:
        done = dict.fromkeys(publishers, 0)
        for publisher in publishers:
            if newest is not None:  # What a server will never take is better known before anything is trained.
                with suppress(PolicyError):
                    await publisher.publish(newest.number, newest.directory)
                    done[publisher] = newest.number
        tasks.start_soon(_keep_up, done, training.directory, notes)
        published = saved = noted = time.monotonic()
        try:
            while True:
                busy = await anyio.to_thread.run_sync(training.turn)
                now = time.monotonic()
                if now - published >= publish_seconds:
                    rollbacks = training.figures.rollbacks
                    version = await anyio.to_thread.run_sync(training.publish)
                    published = now
                    if version is not None:
                        saved = now
                        notes.print(f"version {version.number}: {_said(training)}", soft_wrap=True)
                    elif training.figures.rollbacks > rollbacks:
                        notes.print(
                            f"what was learned since version {training.figures.version} is worse: back to that",
                            soft_wrap=True,
                        )
                if now - saved >= _SAVE_SECONDS:
                    await anyio.to_thread.run_sync(training.save)
                    saved = now
                if now - noted >= _NOTE_SECONDS and busy:
                    notes.print(_said(training), soft_wrap=True)
                    noted = now
                if not busy:
                    await anyio.sleep(_IDLE_SECONDS)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(training.save)


async def _keep_up(done: dict[Publisher, int], directory: Path, notes: Console) -> None:
    """Brings each new version to one server after the other, beside the training, so that all others serve; where a
    newer one has come meanwhile, that one. One that fails is tried again after the others. ``done``: the version that
    each has."""
    while True:
        pause = _IDLE_SECONDS / 2
        for publisher in done:
            try:
                version = current_version(directory)
                if version is not None and version.number != done[publisher]:
                    await publisher.publish(version.number, version.directory)
                    done[publisher] = version.number
            except (PolicyError, InputError) as error:
                notes.print(f"the newest version was not taken, trying again: {error}", soft_wrap=True)
                pause = _RETRY_SECONDS
        await anyio.sleep(pause)


def _said(training: CoTraining) -> str:
    figures = training.figures
    count = len(training.scored)
    rates = training.rates()
    exact, frozen = rates["exact_rate"], rates["exact_rate_frozen"]
    rate = f"{exact:.1%} of the last {count} observations exact, frozen {frozen:.1%}" if count else "nothing scored yet"
    loss = "" if math.isnan(figures.loss) else f", loss {figures.loss:.3f}"
    return f"{rate}; {figures.seen:,} transitions seen, {figures.steps:,} steps{loss}"


def status(training: CoTraining) -> dict[str, Any]:
    """What the service says of itself. Rates are null until something was scored."""
    figures = {name: None if value != value else value for name, value in asdict(training.figures).items()}
    return {**figures, "scored": len(training.scored), **training.rates()}


class _Collector:
    """The status in Prometheus's terms."""

    def __init__(self, training: CoTraining) -> None:
        self._training = training

    def collect(self) -> Iterator[Metric]:
        for name, value in status(self._training).items():
            full, what = f"obsspec_world_model_{name}", _METRICS[name]
            known = math.nan if value is None else value
            counts = name in ("seen", "steps", "tokens", "learned", "rollbacks")
            yield (CounterMetricFamily if counts else GaugeMetricFamily)(full, what, value=known)


_METRICS = {
    "seen": "Transitions read from the store.",
    "steps": "Steps of the optimizer.",
    "tokens": "Tokens trained on.",
    "learned": "Observations trained on, every time counted.",
    "loss": "Of the latest steps, in nats a token.",
    "rollbacks": "Times that training went on from the published weights, because those in training foretold less.",
    "version": "Number of the version published last.",
    "scored": "Observations that the rates are of.",
    "exact_rate": "Share of the latest observations that the weights in training foretold before training on them.",
    "exact_rate_published": "The same of the weights that were published at the time.",
    "exact_rate_frozen": "The same of the weights with which the co-training began.",
    "exact_rate_of_seconds": "Share of the tools' seconds that the commands took whose observations were foretold.",
}


def application(training: CoTraining, transitions: Transitions) -> Starlette:
    """The three routes."""
    registry = CollectorRegistry()
    registry.register(_Collector(training))

    async def receive(request: Request) -> Response:
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > _MOST_BYTES:
                return JSONResponse({"error": f"more than {_MOST_BYTES} bytes; send fewer lines at once"}, 413)
        try:
            added, homeless = await anyio.to_thread.run_sync(transitions.receive, bytes(content))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        except InputError as error:
            return JSONResponse({"error": str(error)}, 503)
        return JSONResponse({"added": added, "without_beginning": homeless})

    async def say(request: Request) -> Response:
        return JSONResponse(status(training))

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/transitions", receive, methods=["POST"]),
            Route("/status", say),
            Route("/metrics", metrics),
        ]
    )


def bind(where: str) -> socket.socket:
    """A socket at ``HOST:PORT``; port 0 takes any that is free. Raises InputError where that is none, or taken."""
    try:
        host, port = host_and_port(where)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:  # The latter also for a name that can be none.
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--listen {where}: {reason}; give HOST:PORT of this machine, and a free port") from None


@contextmanager
def listening(app: Starlette, bound: socket.socket) -> Iterator[str]:
    """Serves ``app`` in a thread of its own until the block ends, and yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_CLOSE_SECONDS))
    # In the main thread it would take Ctrl-C for itself.
    thread = Thread(target=server.run, args=([bound],), name="http", daemon=True)
    thread.start()
    host, port, *_ = bound.getsockname()
    try:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(2.0 * _CLOSE_SECONDS)
