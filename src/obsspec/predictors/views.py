"""Files as far as commands have shown them: which lines a command prints, and which lines are known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from obsspec.shell import Simple

_MOST_LINES = 5000
_Span = tuple[int, int | None]
_ALL: _Span = (1, None)


@dataclass(frozen=True, slots=True)
class View:
    """What a pipeline prints of a file: the lines from ``first`` (the file's first is 1) to ``last``."""

    path: str
    first: int
    last: int | None
    """None for the file's last line."""
    numbered: bool
    """Whether each line comes after its number, as ``cat -n`` has it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The lines of a file that were seen."""

    lines: Mapping[int, str] = field(default_factory=dict)
    """By number, without their ends."""
    length: int | None = None
    """How many lines the file has, where that is known."""
    more: bool = False
    """Whether empty lines may follow those: they are lost where an output is stripped of its last newlines."""
    doubtful: bool = False
    """Whether other programs ran since, which may change any file, but rarely do."""

    @classmethod
    def whole(cls, text: str) -> Seen:
        """All of a file's text."""
        lines = text.removesuffix("\n").split("\n") if text else []
        return cls(dict(enumerate(lines, start=1)), len(lines))

    def show(self, view: View) -> str | None:
        """What ``view`` prints, or None where a line of it was not seen."""
        last = view.last if self.length is None else min(view.last or self.length, self.length)
        if last is None or last - view.first >= _MOST_LINES or (self.more and view.numbered and last != view.last):
            return None
        numbers = range(view.first, last + 1)
        if not all(number in self.lines for number in numbers):
            return None
        return "".join(
            f"{number:6}\t{self.lines[number]}\n" if view.numbered else f"{self.lines[number]}\n" for number in numbers
        )

    def after(self, view: View, output: str) -> Seen:
        """With the lines that ``view`` printed. Newlines at the end of ``output`` may be missing."""
        shown = output.split("\n")
        if view.numbered:
            starts = [f"{number:6}\t" for number, _ in enumerate(shown, start=view.first)]
            if not all(map(str.startswith, shown, starts)):
                return self
            shown = [line.removeprefix(start) for line, start in zip(shown, starts, strict=True)]
        end = view.first + len(shown) - 1
        if view.last is not None and end > view.last:
            return self
        before = Seen() if self.doubtful else self
        lines = {**before.lines, **dict(enumerate(shown, start=view.first))}
        if view.last is None or (view.numbered and end < view.last):
            return Seen(lines, length=end, more=not view.numbered)
        return Seen(lines, before.length, before.more)

    def doubted(self) -> Seen:
        """The same lines, after a program ran that may have changed them."""
        return replace(self, doubtful=True)


def view_of(pipeline: Sequence[Simple]) -> View | None:
    """What a pipeline shows of one file, where all it does is print some of its lines in order."""
    if any(simple.redirections or simple.document or not simple.literal for simple in pipeline):
        return None
    (program, *arguments), *filters = ([simple.name, *simple.arguments] for simple in pipeline)
    if not arguments or arguments[-1].startswith("-"):
        return None
    *options, path = arguments
    span: _Span | None
    match [program, *options]:
        case ["cat"]:
            span, numbered = _ALL, False
        case ["cat", "-n"] | ["nl", "-ba"] | ["nl", "-b", "a"]:
            span, numbered = _ALL, True
        case words:
            span, numbered = _span(words), False
    for each in filters:
        span = _span(each) if span == _ALL else None
    return View(path, *span, numbered) if span else None


def _span(words: Sequence[str]) -> _Span | None:
    """The first and last line that ``head`` or ``sed -n`` prints of what it reads."""
    match words:
        case ["head", *count] if number := re.fullmatch(r"(?:-(?:n ?)?(\d+))?", " ".join(count)):
            return 1, int(number[1] or 10)
        case ["sed", "-n", script] if span := re.fullmatch(r"(\d+)(?:,(\d+|\$))?p", script):
            first = max(1, int(span[1]))
            return first, None if span[2] == "$" else max(first, int(span[2] or first))
    return None
