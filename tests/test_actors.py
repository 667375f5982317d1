"""Rollouts on Ray, on real clusters of this machine: whatever dies, every job has one result."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from http_server import until
from obsspec.actors import connected, spread
from obsspec.errors import InputError
from obsspec.reports.records import read_trajectories
from obsspec.rollout import Failure
from obsspec.types import Task
from test_cli import OBSSPEC, obsspec, wait_for, wait_for_lines

JOBS = [(Task(f"task/{number}", ""), seed) for number in range(6) for seed in range(4)]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
Run = Callable[[Task, int], Awaitable[tuple[str, int, int]]]


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """This module, in actors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def cluster(importable: None) -> Iterator[None]:
    with connected("local", 3):
        yield


@asynccontextmanager
async def worker(directory: Path, actors: int, dying: str = "", always: bool = False) -> AsyncIterator[Run]:
    """Says who ran what, as soon as so many actors are there. One job, such as ``task/3 0``, kills its actor the first
    time, or each time."""
    (directory / f"opened {os.getpid()}").touch()

    async def run(task: Task, seed: int) -> tuple[str, int, int]:
        await until(lambda: len(list(directory.glob("opened *"))) >= actors)
        await anyio.sleep(0.02)
        if f"{task.id} {seed}" == dying and (always or not (directory / "died").exists()):
            (directory / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 3:
            raise OSError("no room")
        return task.id, seed, os.getpid()

    yield run
    (directory / f"closed {os.getpid()}").touch()


def spread_all(open_worker: Callable[[], object], actors: int = 2, concurrency: int = 4) -> list[object]:
    results: list[object] = []
    anyio.run(spread, open_worker, JOBS, actors, concurrency, results.append)
    return results


def assert_all_there(results: list[object], lost: frozenset[tuple[str, int]] = frozenset()) -> None:
    """Each job once; those with seed 3 fail by themselves, and those that are ``lost`` with their actors."""
    came = Counter((each.task, each.seed) if isinstance(each, Failure) else each[:2] for each in results)
    assert came == Counter({(task.id, seed): 1 for task, seed in JOBS})
    for each in results:
        if isinstance(each, Failure):
            assert (each.seed == 3 and each.error == "OSError: no room") or (
                (each.task, each.seed) in lost and each.error == "the actor that ran it died, 3 times"
            ), each


def is_alive(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


def assert_gone(directory: Path) -> None:
    """No actor is left."""
    opened = [int(file.name.split()[1]) for file in directory.glob("opened *")]
    assert opened
    wait_for(lambda: not any(map(is_alive, opened)))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "--ray 127.0.0.1:1: Connection refused; start a cluster with"),
        ("somewhere", "--ray somewhere: is not local, auto or HOST:PORT; start a cluster with"),
        ("127.0.0.1:99999", "--ray 127.0.0.1:99999: is not local, auto or HOST:PORT; start a cluster with"),
        ("[::1]:1", "--ray [::1]:1: Connection refused; start a cluster with"),
        (":1", "--ray :1: is not local, auto or HOST:PORT; start a cluster with"),
        ("http://127.0.0.1:1", "--ray http://127.0.0.1:1: is not local, auto or HOST:PORT; start a cluster with"),
        ("a..b:1", "--ray a..b:1: "),
        ("ray://x:1", "--ray ray://x:1: run this on"),
    ],
)
def test_without_a_cluster_it_says_how_to_have_one(address: str, said: str, tmp_path: Path) -> None:
    assert said in refused("--ray", address, "--output", str(tmp_path / "run"))


def test_where_ray_finds_no_cluster_it_says_so(tmp_path: Path) -> None:
    if any(process.name() == "gcs_server" for process in psutil.process_iter()):
        pytest.skip("this machine is part of a Ray cluster")
    line = refused("--ray", "auto", "--output", str(tmp_path / "run"))
    assert "--ray auto: Could not find any running Ray instance; start a cluster with" in line


def refused(*options: str) -> str:
    finished = obsspec("rollout", "--tasks", "generated:text/easy/0-99", "--policy", "nowhere", *options)
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    assert "Traceback" not in line
    return line


def test_what_listens_there_may_be_no_cluster(tmp_path: Path) -> None:
    """It takes the connection, and never says a word that Ray understands."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        line = refused("--ray", address, "--output", str(tmp_path / "run"))
    assert f"--ray {address}: what is there does not answer as a Ray cluster does; start a cluster" in line


@pytest.mark.parametrize("listens", [False, True])
def test_auto_may_mean_what_is_no_cluster(listens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the shell still has the address of one that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}" if listens else "127.0.0.1:1"
        monkeypatch.setenv("RAY_ADDRESS", address)
        start = time.monotonic()
        line = refused("--ray", "auto", "--output", str(tmp_path / "run"))
    assert "--ray auto: " in line
    assert "; start a cluster with `ray start --head`, or give local" in line
    assert time.monotonic() - start < 60, "Ray itself tries for two minutes"


def test_a_cluster_may_ask_for_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that is started where Ray has left a token before, and finds there what is on the same machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a" * 64)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:  # For the names of its sockets.
        head = ["start", "--head", "--port", str(port), "--temp-dir", short, "--num-cpus", "1", "--block"]
        with subprocess.Popen([*RAY, *head], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            try:
                wait_for(lambda: is_healthy(address))
                assert "model nowhere" in refused("--ray", address, "--output", str(tmp_path / "run"))
                monkeypatch.delenv("RAY_AUTH_MODE")
                asks = "the cluster asks for a token; set RAY_AUTH_MODE=token"
                assert asks in refused("--ray", address, "--output", str(tmp_path / "run"))
                assert "model nowhere" in refused("--ray", "auto", "--output", str(tmp_path / "run"))
                monkeypatch.setenv("RAY_ADDRESS", address)
                assert asks in refused("--ray", "auto", "--output", str(tmp_path / "run"))
            finally:
                child.terminate()


def is_healthy(address: str) -> bool:
    command = [*RAY, "health-check", "--address", address]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--actors", "3"), "--actors 3: these are processes of a Ray cluster; say which with --ray"),
        (("--ray", "local", "--actors", "100000"), "--ray local: 100 actors are too many for the "),
    ],
)
def test_actors_that_make_no_sense_are_refused(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """A hundred rollouts never need more than a hundred of them, which are too many for one machine."""
    if (os.cpu_count() or 1) * 8 >= 100:
        pytest.skip("this machine has the cores for so many")
    assert said in refused(*options, "--output", str(tmp_path / "run"))


def test_every_job_is_run_once(cluster: None, tmp_path: Path) -> None:
    results = spread_all(partial(worker, tmp_path, 3), actors=3)
    assert_all_there(results)
    assert len({file.name.split()[1] for file in tmp_path.glob("closed *")}) == 3
    assert_gone(tmp_path)


def test_rollouts_of_a_task_share_an_actor(cluster: None, tmp_path: Path) -> None:
    """With as many jobs at once as a task has: what each task needs is learned in one place."""
    ran = [each for each in spread_all(partial(worker, tmp_path, 2)) if not isinstance(each, Failure)]
    by_task = [{process for name, _, process in ran if name == task} for task in {name for name, *_ in ran}]
    assert sum(len(each) == 1 for each in by_task) >= 4


def test_what_a_dying_actor_ran_is_run_by_others(cluster: None, tmp_path: Path) -> None:
    assert_all_there(spread_all(partial(worker, tmp_path, 2, "task/3 0")))
    assert (tmp_path / "died").exists()
    assert_gone(tmp_path)


def test_a_job_that_kills_every_actor_is_given_up(cluster: None, tmp_path: Path) -> None:
    """Alone, so that no other is lost with it."""
    results = spread_all(partial(worker, tmp_path, 2, "task/3 0", always=True), actors=2, concurrency=1)
    assert_all_there(results, lost=frozenset({("task/3", 0)}))
    assert sum(isinstance(each, Failure) for each in results) == 7
    assert_gone(tmp_path)


@asynccontextmanager
async def stillborn() -> AsyncIterator[Run]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield  # type: ignore[misc]


@asynccontextmanager
async def unfit() -> AsyncIterator[Run]:
    raise InputError("no such model")
    yield


def test_where_no_actor_stays_alive_it_ends(cluster: None) -> None:
    with pytest.raises(InputError, match="--ray: no actor stays alive: "):
        spread_all(stillborn)


def test_what_an_actor_cannot_open_is_said(cluster: None) -> None:
    with pytest.raises(InputError, match=r"^no such model$"):
        spread_all(unfit)


def test_what_cannot_be_taken_in_ends_it(cluster: None, tmp_path: Path) -> None:
    def full(result: object) -> None:
        raise InputError("the disk is full")

    with pytest.raises(InputError, match=r"^the disk is full$"):
        anyio.run(spread, partial(worker, tmp_path, 2), JOBS, 2, 4, full)
    assert_gone(tmp_path)


def test_a_store_is_for_one_machine(tmp_path: Path) -> None:
    finished = obsspec(
        *("rollout", "--tasks", "generated:text/easy/0", "--ray", "auto", "--output", tmp_path / "run"),
        *("--transitions", tmp_path / "store.sqlite"),
    )
    assert finished.returncode == 2
    assert "other machines of the cluster do not have this file" in finished.stderr


TASKS = "generated:text/easy/0-5"


def options(base: str, output: Path) -> tuple[str, ...]:
    return (
        *("rollout", "--policy", base, "--output", str(output), "--tasks", TASKS, "--max-turns", "3"),
        *("--predictor", "rules,memory", "--max-context", "2048"),
    )


def test_a_run_on_ray_is_the_run_of_one_process(base: str, tmp_path: Path) -> None:
    """Killed outright in the middle, and gone on with: with every rollout once, and each as it is in one process."""
    here, there, store = tmp_path / "here", tmp_path / "there", tmp_path / "store.sqlite"
    alone = obsspec(*options(base, here), "--depth", "0")
    assert alone.returncode == 0, alone.stderr
    on_ray = (*options(base, there), "--ray", "local", "--actors", "2", "--transitions", str(store))
    with subprocess.Popen([*OBSSPEC, *on_ray], stderr=subprocess.DEVNULL) as child:
        wait_for_lines(there / "trajectories.jsonl", 1)
        started = [each.pid for each in psutil.Process(child.pid).children(recursive=True)]
        child.kill()
    wait_for(lambda: not any(map(is_alive, started)))
    resumed = obsspec(*on_ray, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    lines = read_trajectories(there)
    assert len({line.task for line in lines}) == len(lines) == 6
    compared = obsspec("compare", here, there)
    assert compared.returncode == 0, compared.stderr
    assert "trajectories identical: 6 of 6" in compared.stdout
    assert store.exists()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_leaves_nothing_running(sent: signal.Signals, code: int, base: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [*OBSSPEC, *options(base, output), "--ray", "local", "--actors", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0) as child:
        wait_for_lines(output / "trajectories.jsonl", 1)
        started = [each.pid for each in psutil.Process(child.pid).children(recursive=True)]
        os.killpg(child.pid, sent)
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == code, stderr
    assert stderr.splitlines()[-1].startswith("obsspec: interrupted; ")
    assert "Traceback" not in stderr
    assert "***" not in stderr, "Ray's own way to end"
    wait_for(lambda: not any(map(is_alive, started)))


def test_a_node_dies(tmp_path: Path) -> None:
    """In the middle, with an actor on it: the others take over what it ran."""
    ray.shutdown()  # The cluster of the tests above.
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = machines.add_node(num_cpus=1)
    machines.wait_for_nodes()
    results: list[object] = []

    def finished(result: object) -> None:
        results.append(result)
        if len(results) == 5:
            machines.remove_node(other, allow_graceful=False)

    try:
        with connected(machines.address, 2):
            anyio.run(spread, partial(worker, tmp_path, 2), JOBS, 2, 1, finished)
        assert_all_there(results)
        assert len(list(tmp_path.glob("opened *"))) >= 2
    finally:
        machines.shutdown()
    assert_gone(tmp_path)
