"""CSV: select rows, add columns up, and total them by group."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import CITIES, NOUNS, PEOPLE, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_EXPORT = (
    "Run ./export.sh to get {table}.",
    "{table} is written by ./export.sh, so run that first.",
    "Export {table} with ./export.sh.",
    "First export the data: ./export.sh writes {table}.",
)
_SELECT = (
    "Copy the rows of {table} whose {key} is {value} to {target}, without the header.",
    "Save all rows of {table} with {key} {value} as {target}; leave the header out.",
    "I need the rows where {key} is {value} from {table} in {target}, no header.",
)
_SUM = (
    "Add up the {number} of all rows of {table} where {key} is {value} and write the sum to {target}.",
    "What is the total {number} for {key} {value} in {table}? Write it to {target}.",
    "Put the sum of {number} over the rows of {table} with {key} {value} into {target}.",
)
_TOTALS = (
    "Write the total {number} of each {key} in {table} to {target}, as lines like name,total sorted by name.",
    "For each {key} in {table} add up the {number}; save lines like name,total in {target}, sorted by name.",
    "Make {target} with one line name,total for each {key} of {table}: the sum of its {number}. Sort by name.",
)
_BEST = (
    "Write the {key} with the highest total to {best}.",
    "Put the name of the {key} with the largest total into {best}.",
)
_LOAD = (
    "Finally load it with ./load.sh {target}.",
    "Then run ./load.sh {target}.",
)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of people with one column to group by and one to add up."""

    header: list[str]
    rows: list[list[str]]
    key: int
    """Index of the column to group by."""
    number: int
    """Index of the column to add up."""

    @property
    def lines(self) -> list[str]:
        return [",".join(row) for row in [self.header, *self.rows]]


def generate(random: Random, level: Level) -> Problem:
    """Easy: select rows. Medium: add up a column of some rows. Hard: totals of all groups, and the best of them."""
    name, target, best = pick(random, NOUNS, 3)
    source = name + ".csv"
    table = _table(random, {"easy": 8, "medium": 12, "hard": 14}[level])
    key, number = table.key + 1, table.number + 1
    value = random.choice(table.rows)[table.key]
    selected = [row for row in table.rows if row[table.key] == value]
    sentences = [random.choice(_EXPORT)]
    if level == "easy":
        target += ".csv"
        sentences.append(random.choice(_SELECT))
        work = [f"awk -F, '${key} == \"{value}\"' {source} > {target}", f"cat {target}"]
        conditions = [f"lines({target!r}) == {[','.join(row) for row in selected]!r}"]
    elif level == "medium":
        target += ".txt"
        total = sum(int(row[table.number]) for row in selected)
        sentences.append(random.choice(_SUM))
        work = [
            f"awk -F, '${key} == \"{value}\" {{s += ${number}}} END {{print s}}' {source} > {target}",
            f"cat {target}",
        ]
        conditions = [f"lines({target!r}) == {[str(total)]!r}"]
    else:
        target, best = target + ".csv", best + ".txt"
        totals = Counter[str]()
        for row in table.rows:
            totals[row[table.key]] += int(row[table.number])
        (winner, highest), (_, second) = totals.most_common(2)
        if highest == second:
            return generate(random, level)
        expected = [f"{group},{total}" for group, total in sorted(totals.items())]
        sentences += [random.choice(_TOTALS), random.choice(_BEST), random.choice(_LOAD)]
        print_groups = '{for (k in s) print k "," s[k]}'
        work = [
            f"awk -F, 'NR > 1 {{s[${key}] += ${number}}} END {print_groups}' {source} | sort > {target}",
            f"sort -t , -k 2 -nr {target}",
            f"echo {winner} > {best}",
            f"./load.sh {target}",
        ]
        conditions = [
            f"lines({target!r}) == {expected!r}",
            f"lines({best!r}) == {[winner]!r}",
            f"lines('database/{target}') == {expected!r}",
        ]
    look = f"head -n 3 {source}"
    steps = [ExpertStep(command) for command in ["./export.sh", look, *work]]
    if random.random() < 0.2:
        steps.insert(1, ExpertStep(look.replace(source, misspell(random, source)), mistake=True))
    files = {"export.sh": _exporter(random, source, table)}
    if level == "hard":
        files["load.sh"] = _loader(random)
    return Problem(
        instruction=" ".join(sentences).format(
            table=source,
            key=table.header[table.key],
            number=table.header[table.number],
            value=value,
            target=target,
            best=best,
        ),
        check=CHECK,
        expert=tuple(steps),
        files=files,
        check_files=assertions(f"lines({source!r}) == {table.lines!r}", *conditions),
    )


def _table(random: Random, n: int) -> _Table:
    """``n`` rows with the columns in random order, but for the person's name, which comes first."""
    key = random.choice(("city", "office", "branch"))
    label = random.choice(("item", "product", "team"))
    number = random.choice(("amount", "hours", "points", "price"))
    cities, nouns = pick(random, CITIES, 3), pick(random, NOUNS, 5)
    values = {
        "name": pick(random, PEOPLE, n),
        key: [random.choice(cities) for _ in range(n)],
        label: [random.choice(nouns) for _ in range(n)],
        number: [str(random.randint(2, 40)) for _ in range(n)],
    }
    header = ["name", *pick(random, (key, label, number), 3)]
    rows = [[values[column][i] for column in header] for i in range(n)]
    return _Table(header, rows, header.index(key), header.index(number))


def _exporter(random: Random, source: str, table: _Table) -> bytes:
    return f"""#!/bin/bash
{effort(random)}
cat > {source} <<'END'
{chr(10).join(table.lines)}
END
echo "exported {len(table.rows)} rows to {source}"
""".encode()


def _loader(random: Random) -> bytes:
    return f"""#!/bin/bash
# Usage: ./load.sh FILE
{effort(random)}
mkdir -p database && cp "$1" database/ || exit 1
echo "loaded $(wc -l < "$1") rows from $1"
""".encode()
