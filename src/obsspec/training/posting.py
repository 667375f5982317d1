"""Transitions that are sent to another machine's co-training over HTTP, as rollouts make them."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import httpx

from obsspec.errors import LAST_PORT, InputError
from obsspec.training.transitions import posted_line
from obsspec.types import Observation, Query

_log = logging.getLogger(__name__)
_MOST_WAITING = 20_000
_BATCH = 200
_IDLE_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_LAST_SECONDS = 20.0
"""For what still waits when the rollouts have ended."""


class PostedTransitions:
    """Sends transitions to ``obsspec world-model serve``. A ``transitions.Recorder``.

    They wait in memory while the service cannot be reached, and rollouts go on meanwhile. So what waits is lost where
    this process is killed, and the oldest where very many wait: for a record that outlives both, write a store.
    """

    def __init__(self, client: httpx.Client, url: str) -> None:
        self.lost = 0
        """Transitions that were not taken."""
        self._client = client
        self._url = url
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._ending = Event()
        self._until = math.inf
        """When it gives up."""
        self._complained = False

    @classmethod
    @contextmanager
    def open(cls, url: str) -> Iterator[PostedTransitions]:
        """To the service at ``url``. When the block ends, what waits is sent, for some seconds.

        Raises InputError where nothing of the kind is there.
        """
        _check_url(url)
        with httpx.Client(timeout=30.0) as client:
            posted = cls(client, url.rstrip("/"))
            posted._check()
            sender = Thread(target=posted._send_all, name="transitions", daemon=True)
            sender.start()
            try:
                yield posted
            finally:
                posted._until = time.monotonic() + _LAST_SECONDS
                posted._ending.set()
                sender.join()
                if posted.lost:
                    _log.warning("%s: %d transitions could not be sent", url, posted.lost)

    def add(self, rollout: str, query: Query, observation: Observation) -> None:
        self.lost += len(self._waiting) == _MOST_WAITING
        self._waiting.append(posted_line(rollout, query, observation))

    def _check(self) -> None:
        remedy = "is `obsspec world-model serve --listen` running there?"
        try:
            status = self._client.get(f"{self._url}/status").raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise InputError(f"--transitions {self._url}: {error}; {remedy}") from None
        if not isinstance(status, dict) or "exact_rate" not in status:
            raise InputError(f"--transitions {self._url}: another kind of server; {remedy}")

    def _send_all(self) -> None:
        while (batch := self._batch()) or not self._ending.is_set():
            while batch and not self._sent(batch):
                if time.monotonic() > self._until:
                    self.lost += len(batch) + len(self._waiting)
                    return
                time.sleep(_RETRY_SECONDS)

    def _batch(self) -> list[bytes]:
        """What waits, a little of it at once."""
        if not self._waiting:
            self._ending.wait(_IDLE_SECONDS)
        return [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]

    def _sent(self, batch: list[bytes]) -> bool:
        """False where it is worth trying again."""
        try:
            response = self._client.post(f"{self._url}/transitions", content=b"".join(batch))
        except httpx.HTTPError as error:
            return self._retry(str(error))
        if response.status_code >= 500:
            return self._retry(response.text)
        try:
            self.lost += int(response.raise_for_status().json()["without_beginning"])
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            self._complain(f"{error} {response.text[:200]}")
            self.lost += len(batch)
        return True

    def _retry(self, reason: str) -> bool:
        self._complain(f"{reason}; trying again until it answers")
        return False

    def _complain(self, reason: str) -> None:
        if not self._complained:
            _log.warning("%s: %s", self._url, reason)
        self._complained = True


def _check_url(url: str) -> None:
    try:
        parsed = httpx.URL(url)
        reason = None if parsed.host and (parsed.port or 0) <= LAST_PORT else "names no host and port"
        reason = reason if parsed.scheme in ("http", "https") else "neither http nor https"
    except httpx.InvalidURL as error:
        reason = str(error)
    if reason is not None:
        raise InputError(
            f"--transitions {url}: {reason}; give the URL of an `obsspec world-model serve --listen`, such as "
            "http://127.0.0.1:8100"
        )
