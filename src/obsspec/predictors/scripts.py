"""What a Python script prints that edits files: nothing, or the message that it reports success with."""

from __future__ import annotations

import ast
from functools import lru_cache

from obsspec.shell import names

_QUIET_MODULES = names("ast fileinput io json os pathlib re shutil sys textwrap")
"""They print nothing when they are imported or used."""
_WRITES = names("write write_text writelines")


@lru_cache(maxsize=512)
def success_message(source: str) -> str | None:
    """What a script that edits files prints when the edit succeeds, or None where that is not plain to see.

    Success is the path that leads to the last write to a file: what is printed on it must be literal.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if "stdout" in source or not _imports(module) <= _QUIET_MODULES:
        return None
    path = _to_last_write(module.body)
    texts = [None] if path is None else [_message(statement) for statement in path]
    return None if None in texts else "".join(map(str, texts))


def _imports(module: ast.Module) -> set[str]:
    """The modules that a script imports, without their submodules."""
    imported: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "?").partition(".")[0])
    return imported


def _to_last_write(block: list[ast.stmt]) -> list[ast.Expr] | None:
    """The expressions, in order, that a run goes through which reaches the last statement that writes a file; None
    where there is none, or where a loop or a function holds it."""
    for number, statement in reversed([*enumerate(block)]):
        if not _calls(statement, _WRITES):
            continue
        if isinstance(statement, ast.Expr):
            return _expressions(block)
        inner = next((path for each in _blocks(statement) if (path := _to_last_write(each)) is not None), None)
        return None if inner is None else [*_expressions(block[:number]), *inner, *_expressions(block[number + 1 :])]
    return None


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of a statement that runs at most one of them, and that once."""
    match statement:
        case ast.If(_, body, other):
            return [body, other]
        case ast.With(_, body) | ast.Try(body):
            return [body]
    return []


def _expressions(block: list[ast.stmt]) -> list[ast.Expr]:
    return [statement for statement in block if isinstance(statement, ast.Expr)]


def _message(statement: ast.Expr) -> str | None:
    """What a statement prints; None where that is not literal."""
    if not _calls(statement, frozenset({"print"})):
        return ""
    match statement:
        case ast.Expr(ast.Call(ast.Name("print"), [ast.Constant(str(text))], [])):
            return text + "\n"
    return None


def _calls(statement: ast.stmt, called: frozenset[str]) -> bool:
    """Whether a function or method of one of these names is called anywhere in a statement."""
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any((call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")) in called for call in calls)
