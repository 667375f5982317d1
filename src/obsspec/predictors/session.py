"""What a rollout's own commands tell about its shell: the working directory, files that they wrote, removed or showed,
and programs that are missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from posixpath import basename, isabs, join, normpath

from obsspec.predictors.harness import Harness
from obsspec.predictors.scripts import success_message
from obsspec.predictors.views import Seen, View, view_of
from obsspec.shell import Redirection, Simple, effect, effect_of, names, parse
from obsspec.types import Exchange

_SILENT = names("cd chmod chown cp export gzip gunzip ln mkdir mv rm rmdir set sleep tar touch truncate unset") | {
    "git add",
    "git apply",
    "git mv",
}
_KEEP_FILES = names("chmod mkdir touch export") | {"git add", "git commit", "git config", "git init"}
_WRITTEN = ("written", "written before a run")
_SHOWN = ("shown", "shown before a run")
_PROVIDERS = names("apk apt apt-get conda dnf mamba npm pip pip3 poetry uv yum . source export")
"""After these, a program may be there that was not."""
_MISSING = re.compile(r"(?:\S*sh: .*: (?:command )?not found|\S+: No module named (?P<module>\S+))(?:\n.*)?")
"""What shells and Python say of a program that is not there; the exit code may follow."""
_PATH = re.compile(r"[^-].*[./]\w")
"""What is rather a path than the name of a branch, a commit or a directory of many files."""
_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True, slots=True)
class Printed:
    """What a simple command prints, by which rule that is known, and the program that rates are counted for."""

    output: str
    rule: str
    program: str


@dataclass(frozen=True, slots=True)
class Known:
    """The text of a file that the rollout wrote."""

    text: str
    doubtful: bool = False
    """Whether other programs ran since, which may change any file, but rarely do."""


class Session:
    """The state after some commands; ``run`` advances it by one more."""

    def __init__(self) -> None:
        self.directory = "."
        """Relative to the start, until the rollout changes to an absolute one."""
        self.files: dict[str, Known] = {}
        self.seen: dict[str, Seen] = {}
        """Lines that were shown, of files that the rollout did not write."""
        self.removed: set[str] = set()
        self.missing: dict[tuple[str, str], str] = {}
        """What was observed of programs that are not there, by name and Python module."""

    def copy(self) -> Session:
        """The same state, to be advanced apart."""
        twin = Session()
        twin.directory, twin.files, twin.removed = self.directory, dict(self.files), set(self.removed)
        twin.seen, twin.missing = dict(self.seen), dict(self.missing)
        return twin

    def then(self, exchange: Exchange, harness: Harness) -> Session:
        """The state after one more command, whose observation is known. This one stays as it is."""
        after = self.copy()
        after.run(exchange.command)
        failed = harness.failed(exchange.observation)
        if failed and effect(exchange.command) == "writes":
            after.files.clear()
            after.seen.clear()
        after._observe(exchange, harness)
        if failed or not harness.keeps_directory:
            after.directory = self.directory
        return after

    def run(self, command: str) -> list[Printed] | None:
        """What the parts of ``command`` print, in order, where all of it is known and succeeds; None otherwise."""
        simples = parse(command)
        if simples is None or any(simple.after == "||" for simple in simples):
            self.files.clear()
            self.seen.clear()
            return None
        parts: list[Printed | None] = []
        for pipeline in _pipelines(simples):
            view = view_of(pipeline)
            if shown := view and self._shows(view, pipeline[0].name):
                parts.append(shown)
                continue
            for simple in pipeline:
                piped = parts.pop() if simple.after == "|" else None
                parts.append(self._execute(simple, piped.output if piped else None))
        known = [part for part in parts if part]
        return known if len(known) == len(parts) else None

    def says_missing(self, command: str) -> str | None:
        """What is observed of a command whose program is known not to be there."""
        simples = parse(command)
        alone = simples and len(simples) == 1 and not simples[0].redirections
        return self.missing.get(_runs(command, simples[0])) if simples and alone else None

    def _observe(self, exchange: Exchange, harness: Harness) -> None:
        """Learn from what a command that has run printed."""
        observation = exchange.observation
        simples = parse(exchange.command) or ()
        if len(simples) == 1 and not simples[0].redirections and (missing := _MISSING.fullmatch(observation)):
            name, module = _runs(exchange.command, simples[0])
            if bool(module) == bool(missing["module"]):
                self.missing[name, module] = observation
        shown = _pipelines([*dropwhile(lambda simple: simple.name == "cd", simples)])
        view = view_of(shown[0]) if len(shown) == 1 else None
        whole = len(observation) < harness.limit and observation != harness.silence
        if view and whole and not harness.failed(observation):
            path = self._path(view.path)
            self.seen[path] = self.seen.get(path, Seen()).after(view, observation)

    def _shows(self, view: View, program: str) -> Printed | None:
        """What a view of a file prints, where its lines are known."""
        path = self._path(view.path)
        if known := self.files.get(path):
            output = Seen.whole(known.text).show(view) if known.text.endswith("\n") else None
            return None if output is None else Printed(output, _WRITTEN[known.doubtful], program)
        seen = self.seen.get(path)
        output = seen.show(view) if seen else None
        return Printed(output, _SHOWN[seen.doubtful], program) if seen and output is not None else None

    def _execute(self, simple: Simple, piped: str | None) -> Printed | None:
        program = f"git {simple.arguments[0]}" if simple.name == "git" and simple.arguments else simple.name
        printed = self._prints(simple, program, piped)
        self._change(simple, program)
        target = next((each for each in simple.redirections if each.takes_output), None)
        if target is None:
            return printed
        self._write(target, printed)
        return Printed("", "redirected", program)

    def _prints(self, simple: Simple, program: str, piped: str | None) -> Printed | None:
        """What ``simple`` writes to standard output, where that is known."""
        if _says_nothing(simple, program):
            forced = any(re.match(r"-[a-zA-Z]*f|--force", each) for each in simple.arguments)
            again = program == "rm" and not forced and not self.removed.isdisjoint(map(self._path, simple.arguments))
            return None if again else Printed("", "silent", program)
        if not simple.literal:
            return None
        if script := self._script(simple, program):
            message = success_message(script.text)
            return None if message is None else Printed(message, "script", program)
        match [program, *simple.arguments]:
            case ["git checkout", _, "--", *_]:
                return Printed("", "silent", program)
            case ["git checkout", _, *paths] if paths and all(map(_PATH.match, paths)):
                count = f"{len(paths)} path" + "s" * (len(paths) > 1)
                return Printed(f"Updated {count} from the index\n", "restored", program)
            case ["echo", *words] if not "".join(words[:1]).startswith("-"):
                return Printed(" ".join(words) + "\n", "echo", program)
            case ["printf", text] if not re.search(r"%|\\[^n]", text):
                return Printed(text.replace("\\n", "\n"), "echo", program)
            case ["pwd"] if isabs(self.directory):
                return Printed(self.directory + "\n", "pwd", program)
            case [_, *options, path] if known := self.files.get(self._path(path)):
                shown = _show([program, *options], known.text, " " + path)
                return None if shown is None else Printed(shown, _WRITTEN[known.doubtful], program)
        source = self._standard_input(simple, piped)
        shown = None if source is None else _show([program, *simple.arguments], source.text, "")
        return None if source is None or shown is None else Printed(shown, _WRITTEN[source.doubtful], program)

    def _standard_input(self, simple: Simple, piped: str | None) -> Known | None:
        if simple.document:
            return Known(simple.document.text) if simple.document.literal else None
        source = next((each.target for each in simple.redirections if each.operator == "<"), None)
        if source:
            return self.files.get(self._path(source.text)) if source.literal else None
        return None if piped is None else Known(piped)

    def _script(self, simple: Simple, program: str) -> Known | None:
        """The text of the Python script that a command runs, where that is known."""
        if not _PYTHON.fullmatch(program) or simple.redirections:
            return None
        match simple.arguments:
            case ["-c", script]:
                return Known(script)
            case [] | ["-"] if simple.document:
                return Known(simple.document.text) if simple.document.literal else None
            case [path]:
                return self.files.get(self._path(path))
        return None

    def _change(self, simple: Simple, program: str) -> None:
        """Follow what ``simple`` does to the directory and to files, its redirections aside."""
        kind = effect_of(simple)
        match [program, *simple.arguments] if simple.literal else [program]:
            case ["cd", path] if path != "-":
                self.directory = normpath(join(self.directory, path))
            case ["cd" | "pushd" | "popd", *_]:
                self.directory = "?"  # somewhere: paths mean something else from here on
            case ["cp" | "mv", source, target]:
                known = self.files.get(self._path(source))
                self._forget(*((source, target) if program == "mv" else (target,)))
                if known:
                    self.files[self._path(target)] = known
            case ["rm", *paths] if paths:
                self._forget(*paths)
                self.removed.update(map(self._path, paths))
            case ["sed" | "tee" | "truncate", *paths] if paths and kind == "writes":
                self._forget(*paths)
            case ["git checkout", _, *paths] if paths and all(path == "--" or _PATH.match(path) for path in paths):
                self._forget(*paths)
            case _ if kind == "unknown":
                self._doubt(simple, program)
            case _ if kind == "writes" and program not in _KEEP_FILES and not simple.outputs:
                self.files.clear()
                self.seen.clear()
        if simple.name in _PROVIDERS or "install" in simple.arguments:
            self.missing.clear()

    def _doubt(self, simple: Simple, program: str) -> None:
        """Some other program ran: it changes the files that it names, and seldom others."""
        script = self._script(simple, program)
        words = [*simple.arguments, simple.document.text if simple.document else "", script.text if script else ""]
        named = " ".join(words)
        self.files = {path: Known(known.text, doubtful=True) for path, known in self.files.items()}
        self.seen = {path: seen.doubted() for path, seen in self.seen.items() if basename(path) not in named}

    def _write(self, redirection: Redirection, printed: Printed | None) -> None:
        """Follow what goes into a file; None is a text that is not known."""
        if not redirection.target.literal:
            self.files.clear()
            self.seen.clear()
            return
        path = self._path(redirection.target.text)
        appends = ">>" in redirection.operator
        before = self.files.get(path)
        self._forget(path)
        if printed and path != "/dev/null" and (before or not appends):
            self.files[path] = Known((before.text if before and appends else "") + printed.output)

    def _path(self, path: str) -> str:
        return normpath(join(self.directory, path))

    def _forget(self, *paths: str) -> None:
        """Forget every file of these names, for one file can have several paths."""
        forgotten = set(map(basename, paths))
        self.files = {path: known for path, known in self.files.items() if basename(path) not in forgotten}
        self.seen = {path: seen for path, seen in self.seen.items() if basename(path) not in forgotten}
        self.removed = {path for path in self.removed if basename(path) not in forgotten}


def _says_nothing(simple: Simple, program: str) -> bool:
    """Whether a command prints nothing when it succeeds."""
    arguments = simple.arguments
    if not program or program in ("true", ":"):
        return True
    if program == "sed":
        return effect_of(simple) == "writes" and not simple.outputs
    if simple.name == "git" and any(re.fullmatch("-[a-z]*q[a-z]*|--quiet", each) for each in arguments):
        return program in ("git checkout", "git commit", "git init", "git merge", "git reset", "git switch")
    if program == "tar":
        return bool(arguments) and not re.search("[tv]", arguments[0])
    return program in _SILENT and bool(arguments) and not any(re.match("-(-verb|[a-z]*v)", each) for each in arguments)


def _show(words: Sequence[str], text: str, path: str) -> str | None:
    """What a program that shows some of a text prints, or None where that is not known. ``path`` is a space and the
    file's name, empty for standard input."""
    match words:
        case ["cat"]:
            return text
        case ["wc", "-l"]:
            return f"{text.count(chr(10))}{path}\n"
        case ["head" | "tail" as name, *count] if number := re.fullmatch(r"(?:-(?:n ?)?(\d+))?", " ".join(count)):
            lines, n = _lines(text), int(number[1] or 10)
            return "".join(lines[:n] if name == "head" else lines[max(0, len(lines) - n) :])
        case ["sed", "-n", script] if span := re.fullmatch(r"(\d+)(?:,(\d+))?p", script):
            first, last = int(span[1]), int(span[2] or span[1])
            return "".join(_lines(text)[max(0, first - 1) : max(first, last)])
    return None


def _lines(text: str) -> list[str]:
    """The lines with their ends. Only a newline ends one, unlike ``str.splitlines``."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _pipelines(simples: Sequence[Simple]) -> list[list[Simple]]:
    """The commands that pipes join, together."""
    pipelines: list[list[Simple]] = []
    for simple in simples:
        if simple.after == "|":
            pipelines[-1].append(simple)
        else:
            pipelines.append([simple])
    return pipelines


def _runs(command: str, simple: Simple) -> tuple[str, str]:
    """The program that a command of one part runs, as it is written, and the Python module."""
    name = next((word for word in command.split() if word.rpartition("/")[2] == simple.name), "")
    arguments = simple.arguments
    module = arguments[arguments.index("-m") + 1 :][:1] if "-m" in arguments and _PYTHON.fullmatch(simple.name) else ()
    return name, "".join(module)
