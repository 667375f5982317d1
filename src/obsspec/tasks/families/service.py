"""Running and waiting for programs: a server to start, ask and stop; jobs to run side by side."""

from __future__ import annotations

from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_START = (
    "Start the server ./{server} in the background and wait with ./ask.sh ping until it is ready.",
    "Run ./{server} in the background. ./ask.sh ping waits for it.",
    "./{server} is a server: start it in the background, and wait for it with ./ask.sh ping.",
)
_GET = (
    "Ask for {key} with ./ask.sh get {key} and save the answer as {file}.",
    "Save what it answers to ./ask.sh get {key} in {file}.",
    "Write the value of {key}, from ./ask.sh get {key}, to {file}.",
)
_SET = (
    "Set {key} to {value} with ./ask.sh set {key} {value}.",
    "Tell it ./ask.sh set {key} {value}.",
    "Change {key} to {value}, with ./ask.sh set {key} {value}.",
)
_STOP = (
    "At the end stop it with ./ask.sh stop.",
    "Finally shut it down with ./ask.sh stop.",
    "When you are done, ./ask.sh stop ends it.",
)
_STAY = ("Leave it running.", "The server must stay up.", "Do not stop the server.")
_JOBS = (
    "Run ./{script} on each of {names} in the background, each writing to a file ending in .out, such as {first}.out.",
    "Process {names} with ./{script}, all at the same time, and put the results in files named like {first}.out.",
    "For each of {names} run ./{script} in the background, and save what it prints in {first}.out and so on.",
)
_TOGETHER = (
    "When all have finished, put the results together in {file}, in that order.",
    "Wait for them, then join the results in the same order as {file}.",
    "After all are done, write their results one after the other to {file}.",
)


def generate(random: Random, level: Level) -> Problem:
    """A server: easy to ask; medium to change; hard to do both and stop. Or jobs: two, three or four of them."""
    return random.choice((_server, _server, _jobs))(random, level)


def _server(random: Random, level: Level) -> Problem:
    name, *keys = pick(random, NOUNS, 5)
    server = f"{name}.py"
    values = {key: random.randint(10, 99) for key in keys}
    asked, changed = pick(random, keys, 2)
    file = f"{random.choice([noun for noun in NOUNS if noun not in keys and noun != name])}.txt"
    value = random.randint(100, 999)
    stops = level == "hard" or random.random() < 0.5

    sentences = [random.choice(_START)]
    steps = [ExpertStep(f"./{server} > {name}.log &"), ExpertStep("./ask.sh ping")]
    if level != "medium":
        if random.random() < 0.2:
            steps.append(ExpertStep(f"./ask.sh get {misspell(random, asked)}", mistake=True))
        sentences.append(random.choice(_GET).format(key=asked, file=file))
        steps.append(ExpertStep(f"./ask.sh get {asked} > {file}"))
    if level == "hard":
        steps.append(ExpertStep(f"cat {file}"))
    final = dict(values)
    if level != "easy":
        final[changed] = value
        sentences.append(random.choice(_SET).format(key=changed, value=value))
        if random.random() < 0.2:
            steps.append(ExpertStep(f"./ask.sh set {changed}", mistake=True))
        steps += [ExpertStep(f"./ask.sh set {changed} {value}"), ExpertStep(f"./ask.sh get {changed}")]
    sentences.append(random.choice(_STOP if stops else _STAY))
    if stops:
        steps.append(ExpertStep("./ask.sh stop"))

    conditions = [] if level == "medium" else [f"lines({file!r}) == [{str(values[asked])!r}]"]
    if stops:
        conditions += [f"not os.path.exists('{name}.socket')", f"json.load(open('{name}.json')) == {final!r}"]
    else:
        conditions += [f"output('bash /tests/ask.sh get {key}') == [{str(final[key])!r}]" for key in keys]
    return Problem(
        instruction=" ".join(sentences).format(server=server),
        check=CHECK,
        expert=tuple(steps),
        files={
            server: _SERVER.format(name=name, effort=effort(random)).encode(),
            "ask.sh": _ASK.format(name=name).encode(),
            f"{name}.json": repr(values).replace("'", '"').encode(),
        },
        check_files={**assertions(*conditions), "/tests/ask.sh": _ASK.format(name=name).encode()},
    )


def _jobs(random: Random, level: Level) -> Problem:
    n = {"easy": 2, "medium": 2, "hard": 3}[level]
    script, file, *names = pick(random, NOUNS, n + 2)
    together = level != "easy"
    sentences = [random.choice(_JOBS)] + ([random.choice(_TOGETHER)] if together else [])
    steps = [ExpertStep(f"./{script}.sh {name}.txt > {name}.out &") for name in names] + [ExpertStep("wait")]
    outputs = " ".join(f"{name}.out" for name in names)
    if random.random() < 0.2:
        steps.insert(0, ExpertStep(f"cat {misspell(random, names[0])}.txt", mistake=True))
    steps.append(ExpertStep(f"cat {outputs} > {file}.txt" if together else f"cat {outputs}"))
    texts = {name: [str(random.randint(1, 99)) for _ in range(random.randint(3, 6))] for name in names}
    results = {name: f"{name}.txt {sum(map(int, numbers))}" for name, numbers in texts.items()}
    conditions = [f"lines('{name}.out') == {[result]!r}" for name, result in results.items()]
    if together:
        steps.append(ExpertStep(f"cat {file}.txt"))
        conditions.append(f"lines('{file}.txt') == {list(results.values())!r}")
    listed = [f"{name}.txt" for name in names]
    return Problem(
        instruction=" ".join(sentences).format(
            script=f"{script}.sh",
            names=", ".join(listed[:-1]) + " and " + listed[-1],
            first=names[0],
            file=f"{file}.txt",
        ),
        check=CHECK,
        expert=tuple(steps),
        files={
            f"{script}.sh": _JOB.format(effort=effort(random)).encode(),
            **{f"{name}.txt": "".join(number + "\n" for number in numbers).encode() for name, numbers in texts.items()},
        },
        check_files=assertions(*conditions),
    )


_SERVER = '''\
#!/usr/bin/env python3
"""Serves the values in {name}.json on the socket {name}.socket. Usage: ./{name}.py &"""
import json, os, socket, subprocess

values = json.load(open("{name}.json"))
subprocess.run(["bash", "-c", """{effort}"""])
with socket.socket(socket.AF_UNIX) as server:
    server.bind("{name}.socket")
    server.listen()
    while True:
        connection, _ = server.accept()
        command, *words = connection.recv(1000).decode().split()
        if command == "ping":
            answer = "{name} is ready"
        elif command == "get" and len(words) == 1:
            answer = values.get(words[0], "error: no key " + words[0])
        elif command == "set" and len(words) == 2 and words[1].isdigit():
            values[words[0]] = int(words[1])
            answer = "ok"
        elif command == "stop":
            json.dump(values, open("{name}.json", "w"))
            os.remove("{name}.socket")
            answer = "{name} has stopped"
        else:
            answer = "error: use get KEY or set KEY NUMBER"
        connection.sendall(str(answer).encode())
        connection.close()
        if command == "stop":
            break
'''
_ASK = """\
#!/bin/bash
# Usage: ./ask.sh ping | get KEY | set KEY NUMBER | stop
sleep 0.3
exec python3 - "$@" <<'END'
import socket, sys, time

for _ in range(100):
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("{name}.socket")
        break
    except OSError:
        time.sleep(0.1)
else:
    sys.exit("error: {name} does not answer")
connection.sendall(" ".join(sys.argv[1:]).encode() or b"help")
answer = connection.recv(1000).decode()
print(answer)
sys.exit(answer.startswith("error"))
END
"""
_JOB = """\
#!/bin/bash
# Adds the numbers in a file up. Usage: ./SCRIPT FILE
{effort}
awk '{{sum += $1}} END {{print FILENAME, sum}}' "$1"
"""
