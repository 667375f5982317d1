"""A co-training in a process of its own, beside one that trains a policy on the same rollouts."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from obsspec.errors import InputError
from obsspec.training.versions import current_version

_END_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_NICENESS = 19
"""It takes what time the policy leaves of the cores, as it does while tools run. With equal rights to them both crawl:
threads of PyTorch wait for one another, busily, and so for whichever has no core just then."""
_PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h: what a process is sent when its parent dies."""


@dataclass(slots=True)
class CoTrainer:
    """``obsspec world-model serve``, started again where it ends before it is told to."""

    directory: Path
    """Where it publishes."""
    log: Path
    _command: list[str]
    _process: subprocess.Popen[bytes]

    @classmethod
    @contextmanager
    def start(cls, store: Path, world_model: str, directory: Path, publish_seconds: float) -> Iterator[CoTrainer]:
        """On the transitions in ``store``, until the block ends. It goes on where one before it ended.

        ``world_model``: what it begins with, as for ``--world-model``.
        """
        command = [sys.executable, "-m", "obsspec", "world-model", "serve", str(store), "--output", str(directory)]
        command += ["--world-model", world_model, "--publish-seconds", str(publish_seconds)]
        log = directory.with_suffix(".log")
        trainer = cls(directory, log, command, _started(command, log))
        try:
            yield trainer
        finally:
            trainer._process.terminate()
            try:
                trainer._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                trainer._process.kill()
                trainer._process.wait()

    def wait_for_version(self) -> None:
        """Until there is one. Raises InputError where the process ends before."""
        while current_version(self.directory) is None:
            if self._process.poll() is not None:
                raise InputError(f"co-training: {self._last_words()}")
            time.sleep(_LOOK_SECONDS)

    def keep_up(self, notes: Callable[[str], None]) -> None:
        """Starts it again where it has ended. Rollouts meanwhile use the version that it published last."""
        if self._process.poll() is not None:
            notes(f"co-training ended ({self._last_words()}); starting it again")
            self._process = _started(self._command, self.log)

    def about(self) -> dict[str, Any]:
        """What is known of the current version."""
        try:
            about = json.loads((self.directory / "current.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return {name: value for name, value in about.items() if name != "base"}

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1].removeprefix('obsspec: ') if lines else 'without a word'}; its output is in {self.log}"


def _started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        # Ctrl-C is for the policy's training, which ends this in the end; and it ends with that, however that ends.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            process_group=0,  # Not a session: Linux may share cores out by session, then niceness counts within one.
            preexec_fn=_beside,
        )


_LIBC = ctypes.CDLL(None)


def _beside() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.nice(_NICENESS)
