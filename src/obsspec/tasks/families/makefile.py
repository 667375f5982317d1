"""Makefiles: repair what stops make, and add a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_REQUESTS = (
    "make should build {target} here, but it fails. Fix the Makefile and build {target}.",
    "Repair the Makefile so that make builds {target}.",
    "The Makefile is broken. Fix it, then run make to get {target}.",
    "{target} is built with make, which fails at the moment. Correct the Makefile and build it.",
)
_COUNTING = (
    "Also add a target {count} that holds the number of lines of {target}, and make it.",
    "Add a rule as well that makes {count} from {target} with wc -l, and make {count}.",
    "After that add a target {count} to the Makefile, the line count of {target}, and make it too.",
)


@dataclass(frozen=True, slots=True)
class _Build:
    """What the Makefile does: a script processes each source, and the target is all the results together."""

    target: str
    sources: tuple[str, ...]
    script: str

    @property
    def makefile(self) -> str:
        outputs = " ".join(f"{source}.out" for source in self.sources)
        return "\n".join(
            (
                f"all: {self.target}\n",
                *(self.rule(source) for source in self.sources),
                f"{self.target}: {outputs}\n\tcat {outputs} > {self.target}\n",
            )
        )

    def rule(self, source: str) -> str:
        return f"{source}.out: {source}.txt\n\t./{self.script} {source}.txt > {source}.out\n"


@dataclass(frozen=True, slots=True)
class _Fault:
    """A faulty Makefile, and the command that repairs it."""

    makefile: str
    fix: str


def generate(random: Random, level: Level) -> Problem:
    """Easy: one fault. Medium: one fault and a new target. Hard: two faults and a new target."""
    target, count, script, *sources = pick(random, NOUNS, 5)
    build = _Build(f"{target}.txt", tuple(sources), f"{script}.sh")
    count += ".txt"
    late = _late_fault(random, build, build.makefile)
    if level == "hard":
        early = _early_fault(random, build, late.makefile)
        makefile, fixes = early.makefile, [early.fix, "make", late.fix]
    else:
        fault = random.choice((late, _early_fault(random, build, build.makefile)))
        makefile, fixes = fault.makefile, [fault.fix]

    sentences = [random.choice(_REQUESTS)]
    commands = ["make", "cat Makefile", *fixes, "make"]
    if level != "easy":
        sentences.append(random.choice(_COUNTING))
        rule = rf"\n{count}: {build.target}\n\twc -l < {build.target} > {count}\n"
        commands[-1:] = [f"printf '{rule}' >> Makefile", f"make all {count}"]
    steps = [ExpertStep(command) for command in commands]
    if random.random() < 0.2:
        steps.insert(1, ExpertStep("cat makefile", mistake=True))

    operation = random.choice(("sort", "sort -r", "tr a-z A-Z", "rev", "nl -ba"))
    texts = {f"{source}.txt": "".join(word + "\n" for word in pick(random, NOUNS, 4)) for source in sources}
    files = {path: text.encode() for path, text in texts.items()}
    return Problem(
        instruction=" ".join(sentences).format(target=build.target, count=count),
        check=CHECK,
        expert=tuple(steps),
        files={"Makefile": makefile.encode(), build.script: _script(operation, effort(random)), **files},
        check_files={
            **assertions(*_conditions(build, sources, operation, None if level == "easy" else count)),
            **{f"/tests/sources/{path}": content for path, content in files.items()},
            f"/tests/sources/{build.script}": _script(operation),
        },
    )


def _early_fault(random: Random, build: _Build, makefile: str) -> _Fault:
    """A fault that make meets while it reads the Makefile, or at the first source."""
    source = build.sources[0]
    recipes = [i for i, line in enumerate(makefile.split("\n")) if line.startswith("\t")]
    i = random.choice(recipes)
    spaced = makefile.split("\n")
    spaced[i] = " " * random.choice((4, 8)) + spaced[i].lstrip()
    wrong_script = _misspelt(random, makefile, f"./{build.script} {source}.txt", build.script)
    return random.choice(
        (
            _Fault("\n".join(spaced), rf"sed -i '{i + 1}s/^ */\t/' Makefile"),
            _misspelt(random, makefile, f"{source}.out: {source}.txt", f"{source}.txt"),
            # The failed recipe has left an empty file, which make would take for done.
            _Fault(wrong_script.makefile, f"{wrong_script.fix}; rm {source}.out"),
        )
    )


def _late_fault(random: Random, build: _Build, makefile: str) -> _Fault:
    """A fault that make meets at the last source, after it has built the others."""
    source = build.sources[-1]
    rule = build.rule(source)
    quoted = rule.replace("\n", r"\n").replace("\t", r"\t")
    return random.choice(
        (
            _Fault(makefile.replace(rule + "\n", ""), rf"printf '\n{quoted}' >> Makefile"),
            _misspelt(random, makefile, f"{source}.out: {source}.txt", f"{source}.txt"),
            _misspelt(random, makefile, f"{build.target}: {build.sources[0]}.out {source}.out", f"{source}.out"),
        )
    )


def _misspelt(random: Random, makefile: str, line: str, name: str) -> _Fault:
    """The Makefile with ``name``, the last of its kind in ``line``, misspelt."""
    wrong = misspell(random, name.partition(".")[0] + ".") + name.partition(".")[2]
    faulty = wrong.join(line.rsplit(name, 1))
    return _Fault(makefile.replace(line, faulty), f"sed -i 's/{wrong}/{name}/' Makefile")


def _script(operation: str, effort: str = "") -> bytes:
    return f'#!/bin/bash\n{effort}\n{operation} "$1"\n'.replace('tr a-z A-Z "$1"', 'tr a-z A-Z < "$1"').encode()


def _conditions(build: _Build, sources: Sequence[str], operation: str, count: str | None) -> list[str]:
    """The Makefile builds the target from the sources as they were, again when one has changed; and so it is here."""
    wanted = count or build.target
    folder = "/tests/again"
    prepare = f"mkdir {folder} && cp -r /tests/sources/. Makefile {folder} && cd {folder} && chmod +x {build.script}"
    make = f"make -s all {wanted}"
    expected = " ; ".join(f"./{build.script} {source}.txt" for source in sources)
    conditions = [
        f"output('{prepare} && {make} && cat {build.target}') == output('cd {folder} && {expected}')",
        f"lines({build.target!r}) == lines('{folder}/{build.target}')",
    ]
    conditions += [
        f"output('cd {folder} && sleep 0.01 && echo more >> {source}.txt && {make} && cat {build.target}') "
        f"== output('cd {folder} && {expected}')"
        for source in sources
    ]
    if count:
        conditions += [f"lines({count!r}) == ['8']", f"lines('{folder}/{count}') == ['10']"]
    return conditions
