"""JSON: change settings, select records, and reload what reads them."""

from __future__ import annotations

import json
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import CITIES, NOUNS, PEOPLE, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

Record = dict[str, object]

_SET = (
    "In {config} set {key} to {value}.",
    "Change {key} to {value} in {config}.",
    "The {key} in {config} must be {value}.",
    "Edit {config} so that {key} is {value}.",
)
_REMOVE = (
    "Remove the key {key} from {config}.",
    "Delete {key} from {config}.",
    "Take {key} out of {config}.",
)
_SELECT = (
    "Copy the records of {source} whose {field} is {chosen} to {target}.",
    "From {source} save only the records with {field} {chosen}, as {target}.",
    "Write {target} with just those records of {source} that have {field} {chosen}.",
)
_RELOAD = (
    "At the end run ./reload.sh {config}.",
    "Then run ./reload.sh {config} to make it take effect.",
    "Reload with ./reload.sh {config} when you are done.",
)
_IMPORT = (
    "At the end run ./import.sh {target}.",
    "Then run ./import.sh {target}.",
    "Import the result with ./import.sh {target}.",
)


def generate(random: Random, level: Level) -> Problem:
    """Easy: one setting, or one selection of records. Medium: two settings. Hard: a setting and a selection."""
    config, source, target = (f"{name}.json" for name in pick(random, NOUNS, 3))
    editing = level != "easy" or random.random() < 0.6
    selecting = level == "hard" or not editing
    sentences: list[str] = []
    steps: list[ExpertStep] = []
    conditions: list[str] = []
    files: dict[str, bytes] = {}
    if editing:
        settings = _settings(random)
        files |= {config: _pretty(settings), "reload.sh": _script(random, "reloaded", "settings")}
        steps += _look(random, config)
        for edit in pick(random, ("number", "switch", "remove"), 2 if level == "medium" else 1):
            sentence, statement = _edit(random, settings, edit)
            sentences.append(sentence)
            steps.append(ExpertStep(_python(config, statement, "d", config)))
        steps.append(ExpertStep(f"./reload.sh {config}"))
        sentences.append(random.choice(_RELOAD))
        conditions += [f"json.load(open({name!r})) == {settings!r}" for name in (config, f"active/{config}")]
    if selecting:
        records = _records(random)
        field = random.choice(("city", "team"))
        chosen = random.choice(records)[field]
        selected = [record for record in records if record[field] == chosen]
        files |= {source: _one_a_line(records), "import.sh": _script(random, "imported", "records")}
        steps += _look(random, source)
        steps.append(ExpertStep(_python(source, "", f"[r for r in d if r['{field}'] == '{chosen}']", target)))
        if level == "hard":
            steps.append(ExpertStep(f"cat {target}"))
        steps.append(ExpertStep(f"./import.sh {target}"))
        sentences += [
            random.choice(_SELECT).format(source=source, target=target, field=field, chosen=chosen),
            random.choice(_IMPORT),
        ]
        conditions += [
            f"json.load(open({source!r})) == {records!r}",
            *(f"json.load(open({name!r})) == {selected!r}" for name in (target, f"active/{target}")),
        ]
    return Problem(
        instruction=" ".join(sentences).format(config=config, target=target),
        check=CHECK,
        expert=tuple(steps),
        files=files,
        check_files=assertions(*conditions),
    )


def _settings(random: Random) -> Record:
    """Two numbers, two switches and a name."""
    numbers = pick(random, ("port", "workers", "retries", "limit", "timeout", "size"), 2)
    switches = pick(random, ("debug", "cache", "verbose", "secure", "backup"), 2)
    settings: Record = {"name": random.choice(NOUNS)}
    settings |= {key: random.randint(2, 90) for key in numbers}
    settings |= {key: random.random() < 0.5 for key in switches}
    return dict(pick(random, list(settings.items()), len(settings)))


def _edit(random: Random, settings: Record, edit: str) -> tuple[str, str]:
    """Changes ``settings``; returns what is asked and the Python statement that does it to ``d``."""
    kind = {"number": int, "switch": bool}.get(edit)
    key = random.choice([key for key, value in settings.items() if key != "name" and kind in (None, type(value))])
    if edit == "remove":
        del settings[key]
        return random.choice(_REMOVE).replace("{key}", key), f"del d['{key}']"
    settings[key] = not settings[key] if edit == "switch" else random.randint(100, 900)
    sentence = random.choice(_SET).replace("{key}", key).replace("{value}", json.dumps(settings[key]))
    return sentence, f"d['{key}'] = {settings[key]}"


def _records(random: Random) -> list[Record]:
    cities, teams = pick(random, CITIES, 2), pick(random, NOUNS, 2)
    return [
        {"name": name, "city": random.choice(cities), "team": random.choice(teams)}
        for name in pick(random, PEOPLE, random.randint(4, 6))
    ]


def _look(random: Random, path: str) -> list[ExpertStep]:
    slip = [ExpertStep(f"cat {misspell(random, path)}", mistake=True)] if random.random() < 0.15 else []
    return [*slip, ExpertStep(f"cat {path}")]


def _python(source: str, statement: str, result: str, target: str) -> str:
    """A command that reads ``source`` as ``d``, runs ``statement``, and writes the expression ``result``."""
    statements = [
        "import json",
        f"d = json.load(open('{source}'))",
        statement,
        f"json.dump({result}, open('{target}', 'w'))",
    ]
    return f'python3 -c "{"; ".join(filter(None, statements))}"'


def _pretty(settings: Record) -> bytes:
    return (json.dumps(settings, indent=2) + "\n").encode()


def _one_a_line(records: list[Record]) -> bytes:
    return ("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n").encode()


def _script(random: Random, done: str, things: str) -> bytes:
    """A script that takes a JSON file over, says how many things are in it, and fails where it is no JSON."""
    return f"""#!/bin/bash
# Usage: FILE
{effort(random)}
count=$(python3 -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' "$1" 2> /dev/null)
[ -n "$count" ] || {{ echo "cannot read $1"; exit 1; }}
mkdir -p active && cp "$1" active/
echo "{done} $1: $count {things}"
""".encode()
