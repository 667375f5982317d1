"""A small HTTP server in the test's own event loop, which does exactly what a test says, disconnecting included."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream


class Exchange:
    """One request, and the means to answer it: whole with `json`, or by any number of `event` and one `end`."""

    def __init__(self, stream: anyio.abc.SocketStream, path: str, headers: Mapping[str, str], body: Any) -> None:
        self.path = path
        self.headers = headers
        """With lower-case names."""
        self.body = body
        self._stream = stream
        self._streaming = False

    async def json(self, value: Any, status: int = 200, **headers: str) -> None:
        content = json.dumps(value).encode()
        await self._head(status, {"Content-Length": str(len(content))} | headers)
        await self._stream.send(content)

    async def event(self, value: Any) -> None:
        """One event of a stream, with what is not ASCII as it is."""
        await self.data(f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode())

    async def data(self, content: bytes) -> None:
        if not self._streaming:
            self._streaming = True
            await self._head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        await self._stream.send(b"%x\r\n%s\r\n" % (len(content), content))

    async def end(self) -> None:
        """The proper end of a stream; without it, the connection just breaks."""
        await self.data(b"data: [DONE]\n\n")
        await self._stream.send(b"0\r\n\r\n")

    async def _head(self, status: int, headers: Mapping[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers.items())]
        await self._stream.send("\r\n".join([*lines, "Connection: close", "", ""]).encode())


@asynccontextmanager
async def serve(answer: Callable[[Exchange], Awaitable[None]]) -> AsyncIterator[str]:
    """Runs `answer` on every request, and gives the server's URL."""

    async def handle(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead):
                receiver = BufferedByteReceiveStream(stream)
                head = (await receiver.receive_until(b"\r\n\r\n", 65536)).decode()
                (_, path, _), *fields = (line.split(" ", 2) for line in head.split("\r\n"))
                headers = {name.rstrip(":").lower(): " ".join(value) for name, *value in fields}
                content = await receiver.receive_exactly(int(headers.get("content-length", 0)))
                await answer(Exchange(stream, path, headers, json.loads(content) if content else None))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", backlog=2048)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handle)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        group.cancel_scope.cancel()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits until something that the other side does has happened."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)
