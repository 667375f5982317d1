"""Just enough of bash's grammar to tell what a command does: simple commands, their words, redirections and order.

``parse`` understands lists of simple commands joined by ``;``, newlines, ``&&``, ``||`` and ``|``, with quotes,
here-documents and redirections. Whatever else it meets (loops, substitutions, background jobs) makes it return None,
and callers then treat the command as one that might do anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile
from typing import Literal

Effect = Literal["reads", "moves", "writes", "unknown"]
"""What a command may do to the environment: nothing; change the working directory; change more; anything, for it runs
some other program."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word after quotes are removed."""

    text: str
    literal: bool
    """False where bash may expand it (a variable, a glob, a tilde): ``text`` is then not what the program sees."""


@dataclass(frozen=True, slots=True)
class Redirection:
    """``operator`` with its descriptor as written (``>``, ``2>``, ``&>>``), and the file or descriptor it names."""

    operator: str
    target: Word

    @property
    def takes_output(self) -> bool:
        """Whether it sends standard output into a file, ``/dev/null`` too."""
        return ">" in self.operator and self.operator[0] != "2" and not self._duplicates

    @property
    def writes_file(self) -> bool:
        """Whether it changes a file."""
        return ">" in self.operator and self.target.text != "/dev/null" and not self._duplicates

    @property
    def _duplicates(self) -> bool:
        return self.operator.endswith(">&") and (self.target.text.isdigit() or self.target.text == "-")


@dataclass(frozen=True, slots=True)
class Simple:
    """One simple command."""

    after: str
    """What joins it to the command before: ``;``, ``&&``, ``||`` or ``|``. The first has ``;``."""
    name: str
    """The program, without its directory; empty for bare assignments and redirections."""
    arguments: tuple[str, ...]
    literal: bool
    """Whether name and arguments are exactly what the program sees."""
    redirections: tuple[Redirection, ...]
    document: Word | None
    """The text of a here-document or here-string."""

    @property
    def outputs(self) -> list[Redirection]:
        """The redirections that change files."""
        return [each for each in self.redirections if each.writes_file]


_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t\r]|\\\n)+)
    |(?P<comment>(?:(?<=[\s;&|])|^)\#[^\n]*)
    |(?P<redirection>(?:\d|&)?(?:<<<|<<-|<<|>>|>\||>&|<&|<>|<|>))
    |(?P<operator>&&|\|\||;;|;|\||&|\n|[()])
    |(?P<single>'[^']*')
    |(?P<double>"(?:[^"\\]|\\.)*")
    |(?P<escape>\\.)
    |(?P<plain>[^\s'"\\$`&|;<>()*?\[\]{}~\#]+)
    |(?P<special>[$`*?\[\]{}~\#])""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


def names(text: str) -> frozenset[str]:
    """A set of names, from a list with spaces between them."""
    return frozenset(text.split())


_KEYWORDS = names("if then else elif fi for while until do done case esac select function time { } [[ ! coproc")


@lru_cache(maxsize=8192)
def parse(command: str) -> tuple[Simple, ...] | None:
    """The simple commands of ``command`` in order, or None where it is beyond this grammar."""
    try:
        return _Parser(command).commands()
    except _BeyondGrammarError:
        return None


class _BeyondGrammarError(Exception):
    pass


class _Parser:
    """One pass over the tokens; the fields are the word and the command being read."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.position = self.word_end = 0
        self.found: list[Simple] = []
        self.after = ";"
        self.words: list[Word] = []
        self.redirections: list[Redirection] = []
        self.document: Word | None = None
        self.pieces: list[str] = []
        self.in_word = self.expands = self.quoted = False
        self.awaiting: str | None = None

    def commands(self) -> tuple[Simple, ...]:
        while self.position < len(self.source):
            token = _TOKEN.match(self.source, self.position)
            if token is None:
                raise _BeyondGrammarError
            self.position = token.end()
            kind, text = token.lastgroup, token.group()
            if kind in ("blank", "comment"):
                self._end_word()
            elif kind == "operator":
                self._end_word()
                self._join(text)
            elif kind == "redirection":
                self._end_word()
                if self.awaiting:
                    raise _BeyondGrammarError
                self.awaiting = text
            else:
                self._extend_word(str(kind), text)
        self._end_word()
        self._end_command()
        if self.awaiting or self.after != ";":
            raise _BeyondGrammarError
        return tuple(self.found)

    def _extend_word(self, kind: str, text: str) -> None:
        self.in_word, self.word_end = True, self.position
        self.quoted |= kind in ("single", "double", "escape")
        if kind == "single":
            text = text[1:-1]
        elif kind == "double":
            bare = re.sub(r"\\.", "", text, flags=re.DOTALL)
            if "$(" in bare or "`" in bare:
                raise _BeyondGrammarError
            self.expands |= "$" in bare
            text = re.sub(r"\\(?:([\"\\$`])|\n)", r"\1", text[1:-1])
        elif kind == "escape":
            text = text[1]
        elif text == "`":
            raise _BeyondGrammarError
        elif kind == "special":
            self.expands |= text != "#"
        self.pieces.append(text)

    def _end_word(self) -> None:
        if not self.in_word:
            return
        word, quoted = Word("".join(self.pieces), not self.expands), self.quoted
        self.pieces, self.in_word, self.expands, self.quoted = [], False, False, False
        operator, self.awaiting = self.awaiting, None
        if operator is None:
            if not self.words and not quoted and word.text in _KEYWORDS:
                raise _BeyondGrammarError
            self.words.append(word)
        elif operator in ("<<", "<<-"):
            self._cut_document(word.text, quoted, tabs=operator == "<<-")
        elif operator == "<<<":
            self.document = Word(word.text + "\n", word.literal)
        else:
            self.redirections.append(Redirection(operator, word))

    def _cut_document(self, delimiter: str, quoted: bool, tabs: bool) -> None:
        """Takes the here-document out of the source: it starts on the next line and belongs to this command."""
        start = self.source.find("\n", self.word_end) + 1
        tab = "\t*" if tabs else ""
        end = re.compile(rf"^{tab}{re.escape(delimiter)}$", re.MULTILINE).search(self.source, start)
        if not start or end is None or self.document:
            raise _BeyondGrammarError
        body = self.source[start : end.start()]
        if tabs:
            body = re.sub(r"^\t+", "", body, flags=re.MULTILINE)
        self.document = Word(body, quoted or not re.search(r"[$`\\]", body))
        self.source = self.source[:start] + self.source[end.end() + 1 :]

    def _join(self, operator: str) -> None:
        if operator in ("&", "(", ")", ";;") or self.awaiting:
            raise _BeyondGrammarError
        ended = self._end_command()
        if operator == "\n":
            return  # an empty line, or one that ends in an operator, goes on
        if not ended:
            raise _BeyondGrammarError
        self.after = operator

    def _end_command(self) -> bool:
        """Adds the command read so far, if there is one, and says whether there was."""
        if not (self.words or self.redirections):
            return False
        words = list(dropwhile(lambda word: _ASSIGNMENT.match(word.text), self.words))
        name = words[0].text.rpartition("/")[2] if words else ""
        arguments = tuple(word.text for word in words[1:])
        literal = all(word.literal for word in words)
        self.found.append(Simple(self.after, name, arguments, literal, tuple(self.redirections), self.document))
        self.words, self.redirections, self.document, self.after = [], [], None, ";"
        return True


_READERS = names(
    """basename cat cmp column comm cut date df diff dirname du echo egrep env expr false fgrep file fold grep groups
    head hexdump hostname id jq ls lsof md5sum nl nproc od paste printenv printf ps pwd readlink realpath rev rg seq
    sha1sum sha256sum shasum stat strings tac tail test tr tree true type uname uniq wc whereis which whoami xxd zcat
    zgrep [ :"""
)
_WRITERS = names(
    """chmod chown cp dd export gunzip gzip install kill ln mkdir mktemp mv patch rm rmdir rsync set source tar tee
    touch truncate unset unzip zip ."""
)
_GIT_READERS = names("blame describe diff grep log ls-files ls-tree rev-list rev-parse shortlog show status")
_PROGRAMS = (_READERS | _WRITERS) - {".", ":", "["}
_WRITING_ARGUMENT = {
    "sed": re.compile(r"-(-in-place|[nErsz]*i)"),
    "find": re.compile(r"-(delete|ok|fprint|fls)"),
    "sort": re.compile(r"-(o|-output)"),
    "awk": re.compile(r".*(>|system|getline)", re.DOTALL),
}
_RUNS_ANOTHER = {"find": re.compile("-exec(dir)?"), "xargs": re.compile(".*")}


@lru_cache(maxsize=8192)
def effect(command: str) -> Effect:
    """What executing ``command`` may do to the environment."""
    simples = parse(command)
    if simples is None:
        return "unknown"
    effects = {effect_of(simple) for simple in simples}
    return next((each for each in ("writes", "unknown", "moves") if each in effects), "reads")


def effect_of(simple: Simple) -> Effect:
    """What executing one simple command may do to the environment."""
    if simple.outputs or simple.name in _WRITERS or not simple.name:
        return "writes"
    if simple.name in ("cd", "pushd", "popd"):
        return "moves"
    if simple.name == "git":
        return "reads" if _GIT_READERS.issuperset(simple.arguments[:1]) else "writes"
    if simple.name in _WRITING_ARGUMENT and any(map(_WRITING_ARGUMENT[simple.name].match, simple.arguments)):
        return "writes"
    if simple.name in _RUNS_ANOTHER and any(map(_RUNS_ANOTHER[simple.name].fullmatch, simple.arguments)):
        another = next((argument for argument in simple.arguments if argument in _PROGRAMS), "")
        return "writes" if another in _WRITERS else "reads" if another in _READERS else "unknown"
    return "reads" if simple.name in _READERS or simple.name in _WRITING_ARGUMENT else "unknown"


def kind_of(command: str) -> str:
    """The programs that a command names; its first word where it is more than a list of simple commands."""
    simple = parse(command)
    if simple is None:
        return next(iter(command.split()), "")
    return " ".join(dict.fromkeys(each.name for each in simple))
