"""From what a command printed to what the policy reads: pure functions."""

from __future__ import annotations

from collections import deque

LIMIT = 10_000
"""Characters of output that an observation holds; of more, it holds the first and the last half."""

_KEPT_BYTES = 4 * LIMIT
"""Bytes kept at each end while a command runs: a character has at most four."""


class Capture:
    """What a command printed, in bounded memory: the beginning, the end, and how many bytes were between."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = _KEPT_BYTES - len(self._head)
        self._head += data[:room]
        if rest := data[room:]:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            while self._tail_bytes - len(self._tail[0]) >= _KEPT_BYTES:
                self._tail_bytes -= len(self._tail[0])
                self._dropped += len(self._tail.popleft())

    def text(self) -> str:
        """The output as text, shortened to `LIMIT` characters."""
        head = self._head.decode(errors="replace")
        tail = b"".join(self._tail).decode(errors="replace")
        if not self._dropped:
            return shorten((bytes(self._head) + b"".join(self._tail)).decode(errors="replace").rstrip("\n"))
        left_out = self._dropped + len(head) + len(tail) - LIMIT
        return _joined(head[: LIMIT // 2], left_out, tail.rstrip("\n")[-LIMIT // 2 :])


def shorten(text: str) -> str:
    """``text``, or of a longer one its first and its last half of `LIMIT`."""
    if len(text) <= LIMIT:
        return text
    return _joined(text[: LIMIT // 2], len(text) - LIMIT, text[-LIMIT // 2 :])


def _joined(head: str, left_out: int, tail: str) -> str:
    return f"{head}\n[{left_out} characters left out]\n{tail}"


def render(output: str, exit_code: int | None, timed_out_after: float | None = None) -> str:
    """The observation: the output, or ``(no output)``; then the exit code where it is not 0, or the time-out."""
    lines = [output or "(no output)"]
    if timed_out_after is not None:
        lines.append(f"[timed out after {timed_out_after:g} s]")
    elif exit_code:
        lines.append(f"[exit code {exit_code}]")
    return "\n".join(lines)
