"""The rules against a real bash: whatever they guess is what it prints."""

import subprocess
from pathlib import Path

import pytest

from obsspec.predictors import SANDBOX, Harness, Rules
from obsspec.shell import effect, parse
from obsspec.types import Draft, Exchange, Observation, Query

MARK = "\x1e"


def observe(directory: Path, commands: list[str]) -> list[Exchange]:
    """What one bash prints for each command, rendered as the sandbox would."""
    script = "".join(f"{command}\nprintf '{MARK}%s{MARK}' $?\n" for command in commands)
    output = subprocess.run(
        ["bash"], input=script, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    ).stdout.split(MARK)
    return [
        Exchange(command, SANDBOX.render(printed, int(code)))
        for command, printed, code in zip(commands, output[::2], output[1::2], strict=False)
    ]


def test_changing_to_absolute_directories(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    exchanges = observe(tmp_path, [f"cd {tmp_path}", "pwd", "cd a; pwd", "cd ./b && pwd", "cd ..", "pwd"])
    assert guesses(exchanges) == [exchange.observation for exchange in exchanges]


def guesses(exchanges: list[Exchange]) -> list[str | None]:
    rules = Rules()
    texts = []
    for number, exchange in enumerate(exchanges):
        guess = rules.guess(Query("task", "", tuple(exchanges[:number]), exchange.command))
        texts.append(guess.text if guess else None)
    return texts


KNOWN = {
    "silent": ["mkdir -p a/b", "touch a/x", "chmod +x a/x", "cp a/x a/y", "mv a/y a/z", "rm -rf a", "X=1", "true"],
    "changing directory": ["mkdir d", "cd d", "cd ..", "mkdir d/e && cd d/e", "cd ../.."],
    "echo": [
        'echo a  \'b  c\' "d\\"e" f\\ g',
        "echo -n x",
        "echo",
        "printf 'a\\nb\\n'",
        "echo a; echo b && echo c # d",
    ],
    "here-document": ["cat > f <<'EOF'\n$x `y` \"\n\n'EOF\nEOF", "cat f", "head -n 1 f", "tail -n1 f", "wc -l f"],
    "indented here-document": ["cat <<-EOF > f\n\ta\n\t\tb\n\tEOF", "cat f", "wc -l < f", "cat < f | tail -1"],
    "here-document on a list": ["cat > f <<EOF && cat f\nbody\nEOF\necho more >> f", "cat f", "sed -n 2p f"],
    "appending": [
        "echo 1 > f",
        "echo 2 >> f",
        "echo 3 >>f; cat f",
        "sed -n '2,3p' f",
        "head -2 f",
        "tail -5 f | wc -l",
    ],
    "no newline at the end": ["printf 'a\\nb' > f", "wc -l f", "cat f", "tail -n 1 f", "cat f f2 2>/dev/null"],
    "a form feed ends no line": ["printf 'a\fb\\nc\\n' > f", "head -1 f", "wc -l f"],
    "copied and moved": ["echo 1 > f", "cp f g", "mv g h", "cat h", "cat f"],
    "nothing is shown of what goes to the void": ["echo gone > /dev/null", "echo gone &> /dev/null", "cat /dev/null"],
    "quiet git": ["git init -q .", "git config user.name x", "echo a > f", "git add f", "git add -A"],
    "repeats": [
        "echo b > f; echo a > g",
        "ls",
        "sort f g",
        "ls",
        "sort f g",
        "grep a f",
        "grep a f",
        "no-such-program",
    ],
    "another program between": ["echo a > f", "cat f", "sh -c true", "cat f"],
    "a file that was shown": [
        "seq 15 | sed '5d;$s/$/\\n\\n/' > f",
        "cat f",
        "nl -ba f | sed -n '3,20p'",
        "head f",
        "cat -n f | head -3",
        "sed -n '9,$p' f",
        "seq 3 > f",
        "cat f",
        "sed -n 2p f",
    ],
    "parts of a file that were shown": [
        "printf '%s\\n' a '' b '' > f",
        "sed -n '1,2p' f",
        "nl -ba f | sed -n '1,2p'",
        "nl -ba f | sed -n '1,3p'",
        "nl -ba f | sed -n '2,9p'",
        "sed -n '3,9p' f",
        "nl -ba f",
        "sed -i 2d f",
        "sed -n 2p f",
        "cd /; sed -n 2p f",
    ],
    "restored from git": [
        "git init -q .; git config user.email user@example.com; git config user.name x",
        "echo a > f.txt; echo a > g.txt; git add . ; git commit -qm a",
        "echo b > f.txt; echo b > g.txt",
        "git checkout f.txt",
        "echo b > f.txt; git checkout -- f.txt",
        "echo b > f.txt; git checkout f.txt g.txt",
        "git checkout -q -b branch/name",
    ],
    "removed for certain": ["rm -f f", "rm -rf f g", "rm -f f"],
}


@pytest.mark.parametrize("commands", KNOWN.values(), ids=KNOWN)
def test_a_guess_is_what_bash_prints(tmp_path: Path, commands: list[str]) -> None:
    exchanges = observe(tmp_path, commands)
    wrong = [
        (exchange, guess)
        for exchange, guess in zip(exchanges, guesses(exchanges), strict=True)
        if guess not in (None, exchange.observation)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (["mkdir d"], "(no output)"),
        (["cd /usr/lib", "pwd"], "/usr/lib"),
        (["echo 'a  b' c"], "a  b c"),
        (["cat > f <<EOF\none\ntwo\nEOF", "cat f"], "one\ntwo"),
        (["cat > f <<EOF\none\ntwo\nEOF", "wc -l f"], "2 f"),
        (["cat > f <<EOF\none\ntwo\nEOF", "wc -l < f"], "2"),
        (["cat > f <<EOF\none\ntwo\nEOF", "tail -n 1 f && head -1 f"], "two\none"),
        (["cat > d/f <<EOF\none\nEOF", "cd d", "cat ./f"], "one"),
        (["echo one > f", "echo two >> f", "cat f"], "one\ntwo"),
        (["sed -i s/a/b/ f"], "(no output)"),
        (["tar -czf a.tgz d"], "(no output)"),
        (["git commit -qm 'a message'"], "(no output)"),
        (["python3 run.py > log.txt 2>&1"], "(no output)"),
    ],
)
def test_what_the_rules_know(commands: list[str], expected: str) -> None:
    history = tuple(Exchange(command, "(no output)") for command in commands[:-1])
    guess = Rules().guess(Query("task", "", history, commands[-1]))
    assert guess is not None
    assert guess.text == expected


@pytest.mark.parametrize(
    "commands",
    [
        ["cat f"],
        ["pwd"],
        ["echo $HOME"],
        ["echo *"],
        ['echo "$(date)"'],
        ["echo `date`"],
        ["echo -e 'a\\tb'"],
        ["mkdir -v d"],
        ["tar tzf a.tgz"],
        ["git commit -m message"],
        ["for i in 1 2; do echo $i; done"],
        ["sleep 1 &"],
        ["echo 'unfinished"],
        ["false || echo no"],
        ["cat > f <<EOF\n$HOME\nEOF", "cat f"],
        ["echo a > f", "sed -i s/a/b/ f", "cat f"],
        ["echo a > f", "sed -i s/a/b/ ./../here/f", "cat f"],
        ["echo a > f", "rm f", "cat f"],
        ["rm f", "rm f"],
        ["echo a > f", "git checkout .", "cat f"],
        ["echo a > f", "cd elsewhere", "cat f"],
        ["echo a > f", "test -e g || echo b > f", "cat f"],
        ["echo a > f", "python3 edit.py > $x", "cat f"],
        ["ls", "touch new", "ls"],
        ["ls", "cd ..", "ls"],
        ["make", "make install", "make"],
    ],
)
def test_what_the_rules_leave_alone(commands: list[str]) -> None:
    history = tuple(Exchange(command, "(no output)") for command in commands[:-1])
    assert Rules().guess(Query("task", "", history, commands[-1])) is None


def test_a_silent_command_that_spoke_before_is_left_alone() -> None:
    history = (Exchange("cp a b", "cp: cannot stat 'a': No such file or directory\n[exit code 1]"),)
    assert Rules().guess(Query("task", "", history, "cp a b")) is None


def test_a_write_that_failed_leaves_no_file() -> None:
    failed = Exchange("echo a > d/f", "bash: d/f: No such file or directory\n[exit code 1]")
    assert Rules().guess(Query("task", "", (failed,), "cat d/f")) is None


def test_a_failed_change_of_directory_is_none() -> None:
    history = (Exchange("cd /usr", "(no output)"), Exchange("cd x", "bash: cd: x: No such file\n[exit code 1]"))
    guess = Rules().guess(Query("task", "", history, "pwd"))
    assert guess is not None
    assert guess.text == "/usr"


def test_another_harness() -> None:
    rules = Rules(Harness(silence="", exit_code="", strips_newlines=False, limit=20, keeps_directory=False))

    def guessed(*commands: str) -> str | None:
        history = tuple(Exchange(command, "") for command in commands[:-1])
        guess = rules.guess(Query("task", "", history, commands[-1]))
        return guess.text if guess else None

    assert guessed("mkdir d") == ""
    assert guessed("echo a") == "a\n"
    assert guessed("cd /usr", "pwd") is None
    assert guessed("cd /usr && pwd") == "/usr\n"
    assert guessed("echo 12345678901234567890") is None


@pytest.mark.anyio
async def test_rates_follow_what_is_observed() -> None:
    rules = Rules()
    query = Query("task", "", (), "mkdir d")

    async def drafts() -> list[Draft]:
        found: list[Draft] = []
        await rules.predict(query, found.append)
        return found

    (first,) = await drafts()
    rules.learn(query, Observation("(no output)"))
    (second,) = await drafts()
    assert first.text == second.text == "(no output)"
    assert first.probability < second.probability < 1.0
    for _ in range(5):
        rules.learn(query, Observation("mkdir: cannot create directory 'd': File exists\n[exit code 1]"))
    assert await drafts() == []
    assert rules.rates["silent", "mkdir"].attempts == 6
    for _ in range(40):
        rules.learn(query, Observation("(no output)"))
    assert len(await drafts()) == 1, "a rule that fell below the floor can recover"


def test_guesses_do_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    """Sessions are remembered from one query of a rollout to the next; a fresh instance has none to remember."""
    exchanges = observe(tmp_path, KNOWN["appending"] + KNOWN["copied and moved"] + KNOWN["another program between"])
    apart = []
    for number, exchange in enumerate(exchanges):
        guess = Rules().guess(Query("task", "", tuple(exchanges[:number]), exchange.command))
        apart.append(guess.text if guess else None)
    assert apart == guesses(exchanges)


def test_lines_that_were_shown_are_known_until_something_may_have_changed_them(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("one\ntwo\nthree\nfour\nfive\n")
    shown = [
        "nl -ba f | sed -n '1,3p'",
        "sed -n '2,4p' f",
        "nl -ba f | sed -n '2,4p'",
        "head -n 2 f",
        "sed -n '3,5p' f",
    ]
    exchanges = observe(tmp_path, shown)
    assert guesses(exchanges) == [None, None, exchanges[2].observation, "one\ntwo", None]

    def guessed(between: str) -> str | None:
        guess = Rules().guess(Query("task", "", (*exchanges, Exchange(between, "(no output)")), "sed -n 2p f"))
        return guess.text if guess else None

    assert [guessed(command) for command in ("ls", "python3 other.py", "mkdir d")] == ["two"] * 3
    for change in ("sed -i 2d f", "python3 edit.py f", "seq 9 > f", "git stash", "for f in *; do rm $f; done"):
        assert guessed(change) is None, change


EDIT = """cat > edit.py <<'EOF'
import sys
lines = open('f').readlines()
if not lines:
    print('Nothing to edit')
    sys.exit(1)
if len(lines) < 9:
    with open('f', 'w') as file:
        file.writelines(lines[1:])
    print('Edited.')
else:
    print('Too long')
EOF"""


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("python3 edit.py", "Edited."),
        ("python3 - <<'EOF'\nopen('f', 'a').write('x')\nEOF", "(no output)"),
        ("python3 -c \"open('f', 'a').write('x')\"", "(no output)"),
        ("python3 -c \"print(open('f').read())\"", None),
        ("python3 -c \"open('f', 'a').write('x'); print(1 + 1)\"", None),
        ("python3 -c \"import this; open('f', 'a').write('x')\"", None),
        ("python3 -c \"for _ in range(2): open('f', 'a').write('x'); print('x')\"", None),
        ("python3 -c 'not python'", None),
    ],
)
def test_a_script_that_edits_a_file_says_that_it_succeeded(tmp_path: Path, run: str, expected: str | None) -> None:
    exchanges = observe(tmp_path, ["seq 3 > f", EDIT, run])
    assert guesses(exchanges)[2] == expected
    assert expected in (None, exchanges[2].observation)


@pytest.mark.parametrize(
    ("command", "observation", "same", "other"),
    [
        ("rg a", "bash: line 1: rg: command not found\n[exit code 127]", "rg -n b c", "rg b | head"),
        (
            "python3 -m pytest a",
            "/usr/bin/python3: No module named pytest\n[exit code 1]",
            "python3 -m pytest -x b",
            "python3 -m unittest b",
        ),
        ("python3 a.py", "a.py: No module named x\n[exit code 1]", "", "python3 b.py"),
    ],
)
def test_a_program_that_was_missing_is_missing(command: str, observation: str, same: str, other: str) -> None:
    def guessed(*commands: str) -> str | None:
        history = (Exchange(command, observation), *(Exchange(each, "(no output)") for each in commands[:-1]))
        guess = Rules().guess(Query("task", "", history, commands[-1]))
        return guess.text if guess else None

    if same:
        assert guessed(same) == guessed("ls", same) == observation
        assert guessed(same + " > log 2>&1") != observation
        assert guessed("pip install it", same) is None
    assert guessed(other) is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ls -l | grep a", "reads"),
        ("find . -name '*.py' | xargs grep -n a 2>/dev/null", "reads"),
        ("find . -exec md5sum {} \\;", "reads"),
        ("sed -n 1p f && git status", "reads"),
        ("cd d && ls", "moves"),
        ("ls > f", "writes"),
        ("sed -ni p f", "writes"),
        ("find . -delete", "writes"),
        ("find . | xargs rm", "writes"),
        ("git commit -m x", "writes"),
        ("X=1", "writes"),
        ("python3 run.py", "unknown"),
        ("for i in 1; do ls; done", "unknown"),
    ],
)
def test_effects(command: str, expected: str) -> None:
    assert effect(command) == expected


def test_parse_keeps_order_and_quotes() -> None:
    simples = parse("a 'b c' && d \"$e\" | /bin/f >> g 2>&1; h=1 i\n\nj")
    assert simples is not None
    assert [(each.after, each.name, each.arguments, each.literal) for each in simples] == [
        (";", "a", ("b c",), True),
        ("&&", "d", ("$e",), False),
        ("|", "f", (), True),
        (";", "i", (), True),
        (";", "j", (), True),
    ]
    assert [(each.operator, each.target.text) for each in simples[2].redirections] == [(">>", "g"), ("2>&", "1")]


@pytest.mark.parametrize(
    "command", ["", "&&", "a &&", "a | | b", "( a )", "a $(b)", "a <<EOF\nb", "a >", "a ;; b", "'"]
)
def test_beyond_the_grammar(command: str) -> None:
    assert not parse(command)
