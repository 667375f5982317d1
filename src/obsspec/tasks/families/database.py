"""SQLite databases: questions and changes in SQL, through a script that the task ships."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from random import Random

from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import CITIES, NOUNS, PEOPLE, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_OPENINGS = (
    "./query.sh SQL runs SQL on a database with the table {table} ({columns}).",
    "You reach a database with ./query.sh SQL. It has one table, {table} ({columns}).",
    "Use ./query.sh SQL on the database; its table is {table} ({columns}).",
    "The table {table} ({columns}) is in the database behind ./query.sh SQL.",
)
_SHOWING = (
    "Save the result in {file}.",
    "Write the answer to {file}.",
    "Put it into the file {file}.",
)
_COLUMNS = {"city": CITIES, "country": CITIES, "product": NOUNS, "item": NOUNS, "team": NOUNS}
_NUMBERS = ("amount", "price", "points", "stock", "score", "hours")


@dataclass(frozen=True, slots=True)
class _Table:
    """A table with a name, a word and a number in each row."""

    name: str
    column: str
    number: str
    rows: tuple[tuple[str, str, int], ...]

    @property
    def columns(self) -> str:
        return f"name, {self.column}, {self.number}"

    @property
    def script(self) -> str:
        values = ",\n".join(map(str, self.rows))
        return f"CREATE TABLE {self.name} ({self.columns});\nINSERT INTO {self.name} VALUES\n{values};\n"


@dataclass(frozen=True, slots=True)
class _Request:
    """Something asked of the database, in English and in SQL."""

    sentence: str
    sql: str


def generate(random: Random, level: Level) -> Problem:
    """Easy: a question. Medium: a change, then a question. Hard: three changes, then a question."""
    table = _table(random)
    file, database = (f"{noun}.{ending}" for noun, ending in zip(pick(random, NOUNS, 2), ("txt", "db"), strict=True))
    key = max(table.rows, key=lambda row: row[2])[1]  # No deletion takes all of its rows.
    kinds = pick(random, (_update, _delete, _insert), {"easy": 0, "medium": 1, "hard": 3}[level])
    changes = [kind(random, table, key) for kind in kinds]
    question = _question(random, table, key)

    look = f'./query.sh "SELECT * FROM {table.name} LIMIT 3"'
    steps = [ExpertStep(look)]
    if random.random() < 0.2:
        steps.insert(0, ExpertStep(look.replace(table.name, misspell(random, table.name)), mistake=True))
    steps += [ExpertStep(f'./query.sh "{change.sql}"') for change in changes]
    steps += [ExpertStep(f'./query.sh "{question.sql}" > {file}'), ExpertStep(f"cat {file}")]

    with sqlite3.connect(":memory:") as final:
        final.executescript(table.script)
        for change in changes:
            final.execute(change.sql)
        rows = sorted(final.execute(f"SELECT {table.columns} FROM {table.name}").fetchall())
        answer = [str(value) for (value,) in final.execute(question.sql)]
    opening = random.choice(_OPENINGS).format(table=table.name, columns=table.columns)
    showing = random.choice(_SHOWING).format(file=file)
    return Problem(
        instruction=" ".join((opening, *(change.sentence for change in changes), question.sentence, showing)),
        check="python3 -I /tests/check.py",
        expert=tuple(steps),
        files={"query.sh": _QUERY.format(effort=effort(random), database=database).encode()},
        setup=f"""python3 -I - <<'END'
import sqlite3
sqlite3.connect({database!r}).executescript({table.script!r})
END""",
        check_files={
            "/tests/check.py": f"""import sqlite3
rows = sqlite3.connect("{database}").execute("SELECT {table.columns} FROM {table.name}").fetchall()
assert sorted(rows) == {rows}
assert sorted(open("{file}").read().split()) == {sorted(answer)}
""".encode()
        },
    )


def _table(random: Random) -> _Table:
    """Eight to twelve rows with few different words, so that each word is in several."""
    column = random.choice(sorted(_COLUMNS))
    words = pick(random, _COLUMNS[column], 3)
    people = pick(random, PEOPLE, random.randint(8, 12))
    rows = tuple((person, random.choice(words), random.randint(10, 99)) for person in people)
    return _Table(random.choice(NOUNS), column, random.choice(_NUMBERS), rows)


def _update(random: Random, table: _Table, key: str) -> _Request:
    value = random.randint(100, 199)
    phrases = (
        f"Set {table.number} to {value} where {table.column} is {key}.",
        f"Where {table.column} is {key}, {table.number} should be {value}.",
        f"Change {table.number} to {value} in the rows whose {table.column} is {key}.",
    )
    sql = f"UPDATE {table.name} SET {table.number} = {value} WHERE {table.column} = '{key}'"
    return _Request(random.choice(phrases), sql)


def _delete(random: Random, table: _Table, key: str) -> _Request:
    numbers = sorted(row[2] for row in table.rows)
    limit = numbers[len(numbers) // 2]
    phrases = (
        f"Delete the rows where {table.number} is less than {limit}.",
        f"Remove every row with {table.number} below {limit}.",
        f"Rows with {table.number} under {limit} must go.",
    )
    return _Request(random.choice(phrases), f"DELETE FROM {table.name} WHERE {table.number} < {limit}")


def _insert(random: Random, table: _Table, key: str) -> _Request:
    person = random.choice([name for name in PEOPLE if name not in {row[0] for row in table.rows}])
    value = random.randint(50, 99)
    phrases = (
        f"Add a row with {person}, {key} and {value}.",
        f"Insert {person}, {key}, {value} as a new row.",
        f"There is a new row to add: {person}, {key}, {value}.",
    )
    return _Request(random.choice(phrases), f"INSERT INTO {table.name} VALUES ('{person}', '{key}', {value})")


def _question(random: Random, table: _Table, key: str) -> _Request:
    """A question about the rows whose word is ``key``, or about all."""
    select = random.choice(
        (
            (("How many rows have {key} as {column}?", "Count the rows whose {column} is {key}."), "COUNT(*)"),
            (("What is the sum of {number} where {column} is {key}?", "Add up {number} for {key}."), "SUM({number})"),
            (
                ("What is the largest {number} where {column} is {key}?", "Find the top {number} for {key}."),
                "MAX({number})",
            ),
            (("Whose {column} is {key}?", "List the names whose {column} is {key}."), "name"),
        )
    )
    words = {"key": key, "column": table.column, "number": table.number}
    phrases, expression = select
    sql = f"SELECT {expression} FROM {table.name} WHERE {table.column} = '{key}'"
    return _Request(random.choice(phrases).format(**words), sql.format(**words))


_QUERY = """\
#!/bin/bash
# Usage: ./query.sh SQL
{effort}
exec python3 -I - "$1" <<'END'
import sqlite3, sys

with sqlite3.connect("{database}") as connection:
    try:
        result = connection.execute(sys.argv[1])
    except sqlite3.Error as error:
        sys.exit("error: " + str(error))
    for row in result:
        print(*row, sep="|")
    if result.rowcount >= 0:
        print(result.rowcount, "rows changed")
END
"""
