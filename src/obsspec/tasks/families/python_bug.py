"""Python bugs: functions that do not do what their docstrings say, and tests that show it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_REQUESTS = (
    "The tests fail: ./test.sh says what is wrong. Fix {modules} so that each function does what its docstring says.",
    "Run ./test.sh and repair {modules}. The docstrings are right, the code is not.",
    "There are bugs in {modules}. Find them with ./test.sh and fix them, until all tests pass.",
    "Make ./test.sh pass by correcting the functions in {modules}.",
    "{modules}: some functions do something else than their docstrings say. Fix them; ./test.sh must succeed.",
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a function does, and what it returns when it is right and wrong."""

    parameters: str
    docstring: str
    right: str
    wrong: str
    arguments: tuple[tuple[object, ...], ...]


_NUMBERS = ((4, 3), (9, 2), (7, 5), (8, 3), (6, 2))
_LISTS = (([3, 1, 2],), ([5, 8, 4],), ([2, 9, 6, 7],), ([6, 3, 5, 1],), ([7, 2, 4],))
_TEXTS = (("Red Fox",), ("Big Old Owl",), ("One Two",), ("Hot Tea Pot",), ("Sun Day",))
_KINDS = (
    _Kind("a, b", "The product of a and b.", "a * b", "a + b", _NUMBERS),
    _Kind("a, b", "The sum of a and b.", "a + b", "a - b", _NUMBERS),
    _Kind("a, b", "What is left of a without b.", "a - b", "b - a", _NUMBERS),
    _Kind("a, b", "The larger of a and b.", "max(a, b)", "min(a, b)", _NUMBERS),
    _Kind("a, b", "The smaller of a and b.", "min(a, b)", "max(a, b)", _NUMBERS),
    _Kind("a, b", "The remainder of a divided by b.", "a % b", "a // b", _NUMBERS),
    _Kind("items", "The sum of all items.", "sum(items)", "len(items)", _LISTS),
    _Kind("items", "The number of items.", "len(items)", "len(items) - 1", _LISTS),
    _Kind("items", "The first of the items.", "items[0]", "items[1]", _LISTS),
    _Kind("items", "The last of the items.", "items[-1]", "items[0]", _LISTS),
    _Kind("items", "The items in rising order.", "sorted(items)", "items", _LISTS),
    _Kind("items", "The largest of the items.", "max(items)", "min(items)", _LISTS),
    _Kind("text", "The text in capital letters.", "text.upper()", "text.lower()", _TEXTS),
    _Kind("text", "The number of words in text.", "len(text.split())", "len(text)", _TEXTS),
    _Kind("text", "The text backwards.", "text[::-1]", "text[::1]", _TEXTS),
)


@dataclass(frozen=True, slots=True)
class _Function:
    """One function of a module."""

    module: str
    name: str
    kind: _Kind
    returns: str

    @property
    def broken(self) -> bool:
        return self.returns != self.kind.right

    @property
    def source(self) -> str:
        return f'def {self.name}({self.kind.parameters}):\n    """{self.kind.docstring}"""\n    return {self.returns}\n'


def generate(random: Random, level: Level) -> Problem:
    """Easy: one bug. Medium: two. Hard: three, in two modules."""
    functions = _functions(random, level)
    modules = list(dict.fromkeys(function.module for function in functions))
    slip = random.choice(modules) if random.random() < 0.2 else None
    steps = [ExpertStep("./test.sh")]
    for module in modules:
        if module == slip:
            steps.append(ExpertStep(f"cat {misspell(random, module)}.py", mistake=True))
        steps.append(ExpertStep(f"cat {module}.py"))
        steps += [ExpertStep(_fix(function)) for function in functions if function.module == module and function.broken]
    steps.append(ExpertStep("./test.sh"))
    return Problem(
        instruction=random.choice(_REQUESTS).format(modules=" and ".join(f"{module}.py" for module in modules)),
        check=CHECK,
        expert=tuple(steps),
        files={
            **{
                f"{module}.py": "\n\n".join(f.source for f in functions if f.module == module).encode()
                for module in modules
            },
            "test.sh": _tester(random, modules, functions),
        },
        check_files=assertions(*(_condition(function) for function in functions)),
    )


def _functions(random: Random, level: Level) -> list[_Function]:
    broken = {"easy": [1, 0], "medium": [1, 1, 0], "hard": [1, 1, 0, 1, 0]}[level]
    first, second, *names = pick(random, NOUNS, 2 + len(broken))
    modules = [first] * min(3, len(broken)) + [second] * (len(broken) - 3)
    functions = []
    for module, name, kind, bug in zip(modules, names, pick(random, _KINDS, len(broken)), broken, strict=True):
        returns = kind.right if not bug else random.choice((kind.wrong, kind.wrong, _unknown_name(random, kind)))
        functions.append(_Function(module, name, kind, returns))
    return functions


def _unknown_name(random: Random, kind: _Kind) -> str:
    """The right expression with one name misspelt, or the wrong one where the names are too short."""
    parameter = kind.parameters
    return kind.wrong if "," in parameter else kind.right.replace(parameter, misspell(random, parameter))


def _fix(function: _Function) -> str:
    return f"sed -i '/def {function.name}/,/return/s|return .*|return {function.kind.right}|' {function.module}.py"


def _call(function: _Function, arguments: Sequence[object]) -> str:
    return f"{function.name}({', '.join(map(repr, arguments))})"


def _expected(kind: _Kind, arguments: Sequence[object]) -> object:
    return eval(kind.right, dict(zip(kind.parameters.split(", "), arguments, strict=True)))


def _tester(random: Random, modules: Sequence[str], functions: Sequence[_Function]) -> bytes:
    cases = []
    for function in functions:
        arguments = random.choice(function.kind.arguments[:3])
        call = f"{function.module}.{_call(function, arguments)}"
        cases.append(f"    ({call!r}, {_expected(function.kind, arguments)!r}),\n")
    return f"""#!/bin/bash
# Usage: ./test.sh
{effort(random)}
exec python3 -B - <<'END'
import sys
import {", ".join(modules)}

TESTS = [
{"".join(cases)}]
failed = 0
for call, expected in TESTS:
    try:
        got = repr(eval(call))
    except Exception as error:
        got = type(error).__name__ + ": " + str(error)
    if got != repr(expected):
        failed += 1
        print("FAIL", call + ": expected", repr(expected) + ", got", got)
print(len(TESTS) - failed, "passed,", failed, "failed")
sys.exit(failed > 0)
END
""".encode()


def _condition(function: _Function) -> str:
    """Other cases than the task's own tests, so that no answer can be written into the function."""
    arguments = function.kind.arguments[2:]
    calls = ", ".join(f"{function.module}.{_call(function, each)}" for each in arguments)
    command = f"python3 -B -c {shlex.quote(f'import {function.module}; print([{calls}])')}"
    return f"output({command!r}) == [{str([_expected(function.kind, each) for each in arguments])!r}]"
