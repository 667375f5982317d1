"""Loading task directories, and solving them in the real sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from obsspec.environments.sandbox import open_sandbox
from obsspec.errors import InputError
from obsspec.tasks.harbor import load_tasks

TOML = """\
version = "1.0"
[metadata]
difficulty = "medium"
[verifier]
timeout_sec = 30.0
[agent]
timeout_sec = 45
"""
TEST = """\
#!/bin/bash
if [ "$(cat /work/answer.txt)" = "$(cat /tests/expected/answer.txt)" ]; then reward=1; else reward=0.25; fi
echo $reward > /logs/verifier/reward.txt
exit 1
"""


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return directory


@pytest.fixture
def task_directory(tmp_path: Path) -> Path:
    files = {
        "task.toml": TOML,
        "instruction.md": "Write 42 to answer.txt.\n",
        "tests/test.sh": TEST,
        "tests/expected/answer.txt": "42\n",
        "solution/solve.sh": "echo 42 > answer.txt\n",
    }
    return write(tmp_path / "suite" / "answer", files)


async def reward(directory: Path, *commands: str) -> float:
    (task,) = load_tasks(directory)
    async with open_sandbox(task) as sandbox:
        for command in commands:
            await sandbox.execute(command)
        return await sandbox.score()


def refusal(directory: Path) -> str:
    """The one line with which a directory is refused."""
    with pytest.raises(InputError) as raised:
        load_tasks(directory)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_what_a_task_says_of_itself(task_directory: Path) -> None:
    (task,) = load_tasks(task_directory)
    assert (task.id, task.family, task.level) == ("suite/answer", "suite", "medium")
    assert task.instruction == "Write 42 to answer.txt."
    assert task.time_limit == 45.0
    assert set(task.check_files) == {"/tests/test.sh", "/tests/expected/answer.txt"}
    assert not task.files, "neither tests nor solution may be there while the policy works"


def test_a_directory_of_tasks_is_loaded_in_order_of_names(task_directory: Path) -> None:
    suite = task_directory.parent
    task_directory.rename(suite / "second")
    write(suite / "first", {"task.toml": "", "instruction.md": "Do.", "tests/test.sh": TEST})
    write(suite, {"README.md": "Not a task.", ".git/config": ""})
    first, second = load_tasks(suite)
    assert (first.id, second.id) == ("suite/first", "suite/second")
    assert (first.level, first.time_limit) == ("", 600.0)


@pytest.mark.anyio
async def test_the_test_script_gives_the_reward(task_directory: Path) -> None:
    assert await reward(task_directory, "echo 42 > answer.txt") == 1.0
    assert await reward(task_directory, "echo 41 > answer.txt") == 0.25


@pytest.mark.anyio
async def test_the_policy_cannot_see_the_tests(task_directory: Path) -> None:
    assert await reward(task_directory, "cat /tests/expected/answer.txt > answer.txt") == 0.25


@pytest.mark.anyio
async def test_a_script_that_leaves_no_reward_earns_nothing(task_directory: Path) -> None:
    write(task_directory, {"tests/test.sh": "exit 0\n"})
    assert await reward(task_directory) == 0.0


@pytest.mark.anyio
async def test_a_script_that_takes_too_long_earns_nothing(task_directory: Path) -> None:
    late = "sleep 20; echo 1 > /logs/verifier/reward.txt\n"
    write(task_directory, {"tests/test.sh": late, "task.toml": "[verifier]\ntimeout_sec = 0.5\n"})
    assert await reward(task_directory) == 0.0


@pytest.mark.anyio
async def test_a_dockerfile_that_needs_no_build(task_directory: Path) -> None:
    dockerfile = """\
# Only what a plain machine has.
FROM python:3.11-slim

WORKDIR /app
COPY numbers.txt .
COPY greet.sh \\
     tools/
COPY data /srv/data
"""
    same = '[ "$(cat /app/all.txt)" = "$(printf "one\\nhello\\ntwo\\nthree")" ]'
    environment = {
        "environment/Dockerfile": dockerfile,
        "environment/numbers.txt": "one\n",
        "environment/greet.sh": "#!/bin/sh\necho hello\n",
        "environment/data/a.txt": "two\n",
        "environment/data/deep/b.txt": "three\n",
        "tests/test.sh": f"if {same}; then echo 1 > /logs/verifier/reward.txt; fi\n",
    }
    write(task_directory, environment)
    collect = "(cat numbers.txt; tools/greet.sh; cat /srv/data/a.txt /srv/data/deep/b.txt) > all.txt"
    assert await reward(task_directory, collect) == 1.0
    assert await reward(task_directory, f"cd /app && {collect}") == 1.0
    assert await reward(task_directory) == 0.0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("RUN apt-get install -y cowsay", "RUN"),
        ("ENV MODE=fast", "ENV"),
        ("FROM ghcr.io/somebody/something:latest", "FROM"),
        ("FROM debian AS builder", "FROM"),
        ("COPY --from=builder /a /b", "COPY"),
        ("COPY *.txt /app/", "COPY"),
        ("ADD https://example.com/file /file", "ADD"),
    ],
)
def test_a_dockerfile_that_needs_an_image_is_refused(task_directory: Path, line: str, what: str) -> None:
    write(task_directory, {"environment/Dockerfile": f"FROM debian:12\n\n{line}\n"})
    message = refusal(task_directory)
    assert str(task_directory / "environment" / "Dockerfile") in message
    assert f"line 3: {what} needs an image" in message


def test_copying_what_is_not_there_is_refused(task_directory: Path) -> None:
    (task_directory / "environment").mkdir(exist_ok=True)
    (task_directory / "environment" / "loop").symlink_to("loop")
    for source in ("missing.txt", "../instruction.md", "loop", "x" * 5000):
        write(task_directory, {"environment/Dockerfile": f"FROM debian\nCOPY {source} /app/\n"})
        assert f"Dockerfile, line 2: COPY: there is no {source}" in refusal(task_directory)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("task.toml", None, "is missing"),
        ("instruction.md", None, "is missing"),
        ("tests/test.sh", None, "is missing"),
        ("instruction.md", b" \n", "is empty"),
        ("instruction.md", b"caf\xe9", "byte 3 is not UTF-8"),
        ("task.toml", b"\xff\xfe", "byte 0 is not UTF-8"),
        ("tests/test.sh", b"echo \xff", "byte 5 is not UTF-8"),
        ("task.toml", b"[agent", "is not valid TOML"),
        ("task.toml", b"agent = 5", "agent must be a table"),
        ("task.toml", b"[agent]\ntimeout_sec = 'long'", "agent.timeout_sec is 'long'; give a positive number"),
        ("task.toml", b"[agent]\ntimeout_sec = -1", "agent.timeout_sec is -1"),
        ("task.toml", b"[verifier]\ntimeout_sec = inf", "verifier.timeout_sec is inf"),
        ("task.toml", b"[agent]\ntimeout_sec = 1e300", "agent.timeout_sec is 1e+300"),
        ("task.toml", b"[agent]\ntimeout_sec = 1" + b"0" * 400, "agent.timeout_sec is 10"),
        ("task.toml", b"x = " + b"[" * 100_000, "is not valid TOML"),
        ("task.toml", b"[verifier.env]\nKEY = '1'", "verifier.env: the sandbox does not provide this"),
        ("task.toml", b"[environment]\ngpus = 1", "environment.gpus: the sandbox does not provide this"),
        ("task.toml", b"[environment]\ndocker_image = 'a/b'", "environment.docker_image: 'a/b' cannot be run"),
        ("environment/docker-compose.yaml", b"", "needs several containers"),
    ],
)
def test_a_corrupt_task_is_refused(task_directory: Path, name: str, content: bytes | None, says: str) -> None:
    path = task_directory / name
    if content is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    for directory in (task_directory, task_directory.parent):
        message = refusal(directory)
        assert message.startswith(f"{path}: ")
        assert says in message


@pytest.mark.parametrize("name", ["bad\udcff", "two\nlines"])
def test_a_name_that_cannot_be_shown_is_refused(task_directory: Path, name: str) -> None:
    renamed = task_directory.rename(task_directory.with_name(name))
    assert "must be printable" in refusal(renamed)


def test_no_tasks_at_all_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "no tasks here" in refusal(tmp_path)
