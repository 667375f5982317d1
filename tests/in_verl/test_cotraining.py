"""A co-training beside verl, as the process that it is: it is killed while samples are made, and started again."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from scripted import TRAINING, Verl, assert_equal, figures

from obsspec.training.transitions import Transitions


@pytest.fixture
def url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def start(base: str, url: str, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the co-training, and waits until it listens."""
    command = [TRAINING / "obsspec", "world-model", "serve", tmp_path / "store.sqlite", "--output", tmp_path / "model"]
    command += ["--world-model", base, "--listen", url.removeprefix("http://")]
    started: list[subprocess.Popen[bytes]] = []

    def until_it_listens() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        started.append(process)
        for _ in range(600):
            try:
                httpx.get(f"{url}/status").raise_for_status()
            except httpx.HTTPError:
                assert process.poll() is None
                time.sleep(0.1)
            else:
                return process
        raise AssertionError("it does not listen")

    yield until_it_listens
    for process in started:
        process.kill()
        process.wait()


def test_its_death_holds_up_nothing_and_loses_nothing(
    cluster: None, base: str, tmp_path: Path, url: str, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """What was sent while it was away arrives when it is back, and each answer is there once."""
    file = tmp_path / "loops.yaml"
    target = "obsspec.integrations.verl.SpeculativeToolAgentLoop"
    file.write_text(f"- {{name: obsspec, _target_: {target}, transitions: '{url}'}}\n")
    verl = Verl(base, str(file))
    verl.take(0.1)
    plain = verl.samples("tool_agent", 6, 4)
    process = start()
    batches = [verl.samples("obsspec", 6, 4)]
    threading.Timer(0.5, process.kill).start()
    batches.append(verl.samples("obsspec", 6, 4))
    for ahead in batches:
        assert_equal(plain, ahead)
    calls = sum(figures(ahead)["obsspec_tool_calls"] for ahead in batches)
    assert process.poll() == -signal.SIGKILL
    process = start()
    with Transitions.open(tmp_path / "store.sqlite") as store:
        for _ in range(200):
            if (stored := len(list(store.after(0)))) >= calls:
                break
            time.sleep(0.1)
    assert stored == calls > 100
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
