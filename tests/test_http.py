"""What the clients of all servers share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from http_server import Exchange, serve, until
from obsspec.policies.http import NotFound, Server
from obsspec.types import PolicyError


@dataclass
class Connections:
    url: str = ""
    made: int = 0
    open: int = 0


@asynccontextmanager
async def keeping_alive(seconds: float) -> AsyncIterator[Connections]:
    """A server that answers every request after so many seconds, and closes no connection."""
    connections = Connections()

    async def handle(stream: anyio.abc.SocketStream) -> None:
        connections.made += 1
        connections.open += 1
        async with stream:
            receiver = BufferedByteReceiveStream(stream)
            with suppress(anyio.IncompleteRead, anyio.BrokenResourceError):
                while True:
                    await receiver.receive_until(b"\r\n\r\n", 65536)
                    await anyio.sleep(seconds)
                    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7")
        connections.open -= 1

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handle)
        connections.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        yield connections
        group.cancel_scope.cancel()


async def ask(server: Server, times: int) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(times):
            group.start_soon(server.ask, "GET", "/")


def test_requests_share_connections_and_those_that_are_idle_are_closed() -> None:
    async def main() -> None:
        async with keeping_alive(seconds=0.1) as connections:
            async with Server(connections.url) as server:
                await ask(server, times=5)
                await ask(server, times=5)
                assert (connections.made, connections.open) == (5, 5)
                await until(lambda: connections.open == 0)  # After a while.
                await ask(server, times=1)
                assert (connections.made, connections.open) == (6, 1)
            await until(lambda: connections.open == 0)

    anyio.run(main)


def test_a_request_that_is_cancelled_takes_its_connection_with_it() -> None:
    async def main() -> None:
        async with keeping_alive(seconds=0.3) as connections, Server(connections.url) as server:
            await ask(server, times=1)
            with anyio.move_on_after(0.1):
                await server.ask("GET", "/")
            await until(lambda: connections.open == 0)
            await ask(server, times=1)
            assert (connections.made, connections.open) == (2, 1)

    anyio.run(main)


@pytest.mark.anyio
async def test_a_request_that_waits_fails_when_the_connections_are_closed() -> None:
    asked = anyio.Event()

    async def refuse(exchange: Exchange) -> None:
        await exchange.json({"error": "Paused"}, 503, **{"Retry-After": "1"})
        asked.set()

    async def wait(server: Server) -> None:
        with pytest.raises(PolicyError, match="has been closed"):
            await server.ask("GET", "/")

    async with serve(refuse) as url, anyio.create_task_group() as group, Server(url) as server:
        group.start_soon(wait, server)
        await asked.wait()


def test_of_an_error_page_only_its_number_is_said() -> None:
    """As of whatever else listens there, such as a server of files or a proxy."""

    async def main(url: str) -> None:
        async with Server(url) as server:
            with pytest.raises(NotFound, match=rf"^server {url}: 404 \(an HTML page\)$"):
                await server.ask("GET", "/v1/models")

    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as files:
        Thread(target=files.serve_forever).start()
        anyio.run(main, f"http://127.0.0.1:{files.server_port}")
        files.shutdown()
