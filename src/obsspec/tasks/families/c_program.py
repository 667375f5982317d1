"""C programs: fix what the compiler or the tests complain about, then build."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_GOALS = (
    "{name}.c is meant to print the {sum} for the number n that it is given.",
    "The C program {name}.c should take a number n and print the {sum}.",
    "Given a number n, the program in {name}.c should print the {sum}.",
    "{name}.c computes the {sum}, where n is its argument.",
)
_COMPILING = (
    "It does not compile: fix it and build it with ./build.sh.",
    "Please find out why ./build.sh fails, and make it succeed.",
    "Repair it so that ./build.sh works.",
)
_TESTING = (
    "It gives wrong results: fix it, build it with ./build.sh and check with ./test.sh.",
    "It builds with ./build.sh, but ./test.sh fails. Fix the program.",
    "Something in it is wrong. Make ./build.sh and then ./test.sh succeed.",
)
_BOTH = (
    "It neither compiles nor computes the right thing. Make ./build.sh and then ./test.sh succeed.",
    "First fix the compiler errors from ./build.sh, then the results that ./test.sh finds wrong.",
    "Get it to build with ./build.sh, and then to pass ./test.sh.",
)


@dataclass(frozen=True, slots=True)
class _Formula:
    """What the program computes, as a loop over i from 1 to n."""

    description: str
    start: int
    operator: str
    term: str

    def value(self, n: int) -> int:
        result = self.start
        for i in range(1, n + 1):
            term = int(eval(self.term, {"i": i}))
            result = result * term if self.operator == "*=" else result + term
        return result


_FORMULAS = (
    _Formula("sum of the numbers from 1 to n", 0, "+=", "i"),
    _Formula("sum of the squares from 1 to n", 0, "+=", "i * i"),
    _Formula("sum of the cubes from 1 to n", 0, "+=", "i * i * i"),
    _Formula("sum of the first n even numbers", 0, "+=", "2 * i"),
    _Formula("sum of the first n odd numbers", 0, "+=", "2 * i - 1"),
    _Formula("product of the numbers from 1 to n", 1, "*=", "i"),
    _Formula("n-th power of 2", 1, "*=", "2"),
    _Formula("n-th power of 3", 1, "*=", "3"),
)


@dataclass(frozen=True, slots=True)
class _Fault:
    """A correct line, how it reads with the fault, and the expert's sed script against it."""

    right: str
    wrong: str
    fix: str


def generate(random: Random, level: Level) -> Problem:
    """Easy: it does not compile. Medium: it computes something else. Hard: both."""
    name, function, variable = pick(random, NOUNS, 3)
    formula = random.choice(_FORMULAS)
    right = _source(function, variable, formula)
    source = right
    steps: list[ExpertStep] = []
    slip = misspell(random, name) if random.random() < 0.2 else None
    if level != "medium":
        fault = _compiler_fault(random, right, function, variable)
        source = source.replace(fault.right, fault.wrong, 1)
        if slip:
            steps.append(ExpertStep(f"cat {slip}.c", mistake=True))
        steps += [ExpertStep("./build.sh"), ExpertStep(f"sed -i '{fault.fix}' {name}.c")]
    if level == "hard":
        steps.append(ExpertStep("./build.sh && ./test.sh"))
    if level != "easy":
        fault = _logic_fault(random, formula, variable)
        source = source.replace(fault.right, fault.wrong, 1)
        fix = f"sed -i '{fault.fix}'"
        steps.append(ExpertStep(f"cat {name}.c"))
        if slip and level == "medium":
            steps.append(ExpertStep(f"{fix} {slip}.c", mistake=True))
        steps.append(ExpertStep(f"{fix} {name}.c"))
    steps.append(ExpertStep("./build.sh" if level == "easy" else "./build.sh && ./test.sh"))

    request = {"easy": _COMPILING, "medium": _TESTING, "hard": _BOTH}[level]
    goal = random.choice(_GOALS).format(name=name, sum=formula.description)
    answers = [str(formula.value(n)) for n in (1, 2, 6, 9)]
    return Problem(
        instruction=f"{goal} {random.choice(request)}",
        check=CHECK,
        expert=tuple(steps),
        files={
            f"{name}.c": source.encode(),
            "build.sh": _builder(random, name),
            **({} if level == "easy" else {"test.sh": _tester(random, name, formula)}),
        },
        check_files=assertions(
            f"output('for n in 1 2 6 9; do ./{name} $n; done') == {answers!r}",
            f"output('gcc -o /tmp/again {name}.c && for n in 1 2 6 9; do /tmp/again $n; done') == {answers!r}",
        ),
    )


def _source(function: str, variable: str, formula: _Formula) -> str:
    return f"""#include <stdio.h>
#include <stdlib.h>

long {function}(long n)
{{
    long {variable} = {formula.start};
    for (long i = 1; i <= n; i++)
        {variable} {formula.operator} {formula.term};
    return {variable};
}}

int main(int argc, char **argv)
{{
    printf("%ld\\n", {function}(atol(argv[1])));
    return 0;
}}
"""


def _compiler_fault(random: Random, source: str, function: str, variable: str) -> _Fault:
    """One mistake for which the compiler names the line and, mostly, the remedy."""
    lines = source.split("\n")

    def misspelt(line: str, word: str, number: int) -> _Fault:
        wrong = misspell(random, word)
        return _Fault(line, line.replace(word, wrong), f"{number}s/{wrong}/{word}/")

    return random.choice(
        (
            _Fault(lines[7], lines[7].removesuffix(";"), "8s/$/;/"),
            _Fault(lines[8], lines[8].removesuffix(";"), "9s/$/;/"),
            _Fault("#include <stdio.h>\n", "", "1i #include <stdio.h>"),
            misspelt(lines[5], "long", 6),
            misspelt(lines[8], variable, 9),
            misspelt(lines[13], function, 14),
        )
    )


def _logic_fault(random: Random, formula: _Formula, variable: str) -> _Fault:
    """One mistake that compiles and gives another result."""
    start = f"{variable} = {formula.start}"
    wrong_start = f"{variable} = {1 - formula.start}"
    return random.choice(
        (
            _Fault("i <= n", "i < n", "s/i < n/i <= n/"),
            _Fault(start, wrong_start, f"s/{wrong_start}/{start}/"),
            _Fault(f" {formula.operator} ", " -= ", f"s/-=/{formula.operator}/"),
        )
    )


def _builder(random: Random, name: str) -> bytes:
    return f"""#!/bin/bash
# Usage: ./build.sh
{effort(random)}
export LC_ALL=C
gcc -pedantic-errors -fno-diagnostics-show-caret -fno-diagnostics-show-option -o {name} {name}.c && echo "built {name}"
""".encode()


def _tester(random: Random, name: str, formula: _Formula) -> bytes:
    cases = " ".join(f"{n}:{formula.value(n)}" for n in sorted(pick(random, range(3, 8), 3)))
    return f"""#!/bin/bash
# Usage: ./test.sh
{effort(random)}
failed=0
for case in {cases}; do
    got=$(./{name} ${{case%:*}})
    [ "$got" = ${{case#*:}} ] || {{ failed=1; echo "FAIL {name} ${{case%:*}}: expected ${{case#*:}}, got $got"; }}
done
[ $failed = 0 ] && echo "3 tests passed"
""".encode()
