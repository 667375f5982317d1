"""What the policies behind a server share: a pool of connections, what its failures mean, and checks at the start."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import anyio.lowlevel
import orjson
import yarl

from obsspec.background import background
from obsspec.errors import InputError
from obsspec.types import Finish, PolicyError, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SILENCE = 20.0
"""Seconds without a token after which a server is asked whether it is there."""
_ANSWER_SECONDS = 20.0
"""In which a server that is there answers what it need not generate for."""
_TELL_SECONDS = 600.0
"""In which it has done what it is told, such as to load the weights of a large model."""
_IDLE_SECONDS = 2.0
"""Servers close what is idle for 5 s. A request on a connection that is just being closed would fail."""


class NotFound(ValueError):  # noqa: N818 -- what the server says
    """The server has no such route, or no such model: it was unloaded, or never there."""


class Unreachable(InputError):  # noqa: N818 -- as above
    """Nobody answers there, or only that it does not work now."""


class Server:
    """A server of models, and as many connections to it as there are requests. An async context manager.

    What may pass raises PolicyError: a connection that is refused or breaks, a server that hangs, and the statuses 429
    and 5xx. A refusal that says ``Retry-After`` is waited out instead, however often it comes: a server that is paused
    for new weights speaks so. Every other refusal raises ValueError with the server's message, 404 its subclass
    NotFound. All of these are one line.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """``headers`` go with every request, for instance ``Authorization``. Raises InputError for what is no URL."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = headers
        try:
            if yarl.URL(self.url).origin().scheme not in ("http", "https"):
                raise ValueError("neither http nor https")
        except ValueError as error:
            raise InputError(f"server {url}: {error}; give a URL like http://localhost:8000") from None

    async def __aenter__(self) -> Server:
        # A thousand streams at once: of the clients that we tried, this one takes the least for each.
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            json_serialize=lambda body: orjson.dumps(body).decode(),  # A body has thousands of token ids.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            # Between tokens there is no limit: the server may be full, or paused.
            timeout=_within(None),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=True,  # for proxies, as most programs do
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._session.close()

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of one reply; None where it is empty."""
        async with self._reply(method, path, json=body, timeout=_within(_ANSWER_SECONDS)) as response:
            content = await response.read()
            return orjson.loads(content) if content else None

    async def tell(self, path: str, body: Any = None) -> None:
        """Posts ``body`` where the reply, which may be text, says no more than that it is done."""
        async with self._reply("POST", path, json=body, timeout=_within(_TELL_SECONDS)) as response:
            await response.read()

    async def metrics(self, *names: str) -> list[float]:
        """The values of Prometheus gauges, each summed over its labels."""
        async with self._reply("GET", "/metrics") as response:
            lines = (await response.text()).splitlines()
        return [sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[{{ ]", line)) for name in names]

    async def stream(self, path: str, body: Any, headers: Mapping[str, str], take: Callable[[Any], None]) -> None:
        """Posts ``body`` and calls ``take`` with each event of the reply as it comes. Cancelled, it closes the
        connection."""
        async with self._alive() as heard, self._reply("POST", path, json=body, headers=headers) as response:
            rest = b""
            async for data in response.content.iter_any():
                heard()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        # Not kept in a variable until the next one: the first may hold the whole prompt.
                        take(self._event(line[5:]))
                        await anyio.lowlevel.checkpoint_if_cancelled()

    @asynccontextmanager
    async def _alive(self) -> AsyncIterator[Callable[[], None]]:
        """Raises PolicyError in a block that has heard nothing for long where the server takes no other request either.

        One that shuts down ends its engine first, and then waits for the streams that the engine no longer feeds.
        """
        failure: PolicyError | None = None
        heard_at = anyio.current_time()

        def heard() -> None:
            nonlocal heard_at
            heard_at = anyio.current_time()

        async def watch() -> None:
            nonlocal failure
            while failure is None:
                await anyio.sleep_until(heard_at + _SILENCE)
                if anyio.current_time() >= heard_at + _SILENCE:
                    heard()
                    try:
                        with suppress(ValueError):  # It answers.
                            await self.ask("GET", "/health")
                    except PolicyError as error:
                        failure = error
            watching.cancel_scope.cancel()

        async with background() as watching:
            watching.start_soon(watch)
            yield heard
        if failure is not None:
            raise failure

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the requests of a check at the start: there, whatever fails is an InputError."""
        try:
            yield
        except PolicyError as error:
            raise Unreachable(f"{error}; is it running, and is this its URL?") from error
        except ValueError as error:
            raise InputError(f"{error}; check the URL, the model and the server's settings") from error
        except (LookupError, TypeError) as error:  # It gives JSON, of another shape.
            raise InputError(f"server {self.url}: not of the expected kind ({error!r}); check the URL") from error

    async def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model: str | None = None) -> None:
        """Raises InputError unless the server reads text from all over the tokenizer's vocabulary as it does."""
        size = len(tokenizer)
        ids = [*range(0, size, size // 256 + 1), *tokenizer.get_added_vocab().values()]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        body = {"prompt": text, "add_special_tokens": False} | ({"model": model} if model else {})
        theirs = (await self.ask("POST", "/tokenize", body))["tokens"]
        ours = tokenizer.encode(text, add_special_tokens=False)
        if ours != theirs:
            place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
            raise InputError(
                f"server {self.url}: its tokenizer is not {tokenizer.name_or_path or 'the one given'}: "
                f"{tokenizer.decode(ours[place])!r} is {ours[place]} here, {theirs[place]} there; "
                "load the tokenizer of the model that is served"
            )

    def ended(self, request: Request, sampled: int, reason: str | None) -> Finish:
        """How a generation of so many tokens ended whose server gave ``reason``, or, with None, fell silent."""
        if reason == "stop":
            return "stop"
        if reason != "length":
            raise PolicyError(f"server {self.url}: the generation broke off ({reason or 'no reason given'})")
        if sampled < request.max_tokens:
            raise ValueError(
                f"server {self.url}: a generation was cut at {sampled} tokens where {request.max_tokens} were "
                "allowed; lower max_context to the length that the model is served with"
            )
        return "length"

    @asynccontextmanager
    async def _reply(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            while True:
                if self._session.closed:  # While the request waited.
                    raise PolicyError(f"server {self.url}: the connection has been closed")
                async with self._session.request(method, self.url + path, allow_redirects=False, **request) as response:
                    if response.status == 200:
                        yield response
                        return
                    content = await response.read()
                if response.status == 404:
                    raise NotFound(self._says(404, content))
                seconds = response.headers.get("Retry-After", "")
                if response.status not in (429, 503) or not seconds.isdecimal():
                    raise self._failure(response.status, content)
                await anyio.sleep(max(1, int(seconds)))
        except aiohttp.ClientConnectorError as error:
            raise PolicyError(f"server {self.url}: {error.os_error.strerror or error.os_error}") from error
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError, orjson.JSONDecodeError) as error:
            reason = " ".join(f"{type(error).__name__} {error}".split())
            raise PolicyError(f"server {self.url}: {reason}") from error

    def _event(self, content: bytes) -> Any:
        event = orjson.loads(content)
        if "error" in event:
            raise self._failure(_code(event["error"]), content)
        return event

    def _failure(self, status: int, content: bytes) -> PolicyError | ValueError:
        message = self._says(status, content)
        return PolicyError(message) if status == 429 or status >= 500 else ValueError(message)

    def _says(self, status: int, content: bytes) -> str:
        return f"server {self.url}: {status} {_message(content)}"


def _within(seconds: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=10.0)


def seed_of(*numbers: int) -> int:
    """63 bits, the most that servers take, that are a function of ``numbers``."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()) >> 1


def _code(error: Any) -> int:
    """The status of an error that comes when a stream has begun."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _message(content: bytes) -> str:
    """What an error says, in one line, in whichever of their forms."""
    text: Any = content.decode(errors="replace")
    try:
        text = orjson.loads(text)
    except ValueError:
        pass
    else:
        for key in ("error", "message", "error_message", "detail"):
            text = text.get(key, text) if isinstance(text, dict) else text
    line = " ".join(str(text).split())
    return "(an HTML page)" if line.startswith("<") else line[:500].rstrip(".")
