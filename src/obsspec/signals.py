"""Ctrl-C while libraries are imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Around imports of PyTorch: what SIGINT and SIGTERM do, they do when the block has ended.

    PyTorch ends the whole process where its import is interrupted, and some libraries swallow the interruption.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Signals are for the main thread.
        return
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if held:
        signal.raise_signal(held[0])
