"""Checks written as Python assertions, and the few functions that they are written in."""

from __future__ import annotations

from collections.abc import Mapping

CHECK = "python3 -I /tests/check.py"
"""The check of a problem whose ``check_files`` are those of `assertions`."""

_FUNCTIONS = '''\
import json, os, stat, subprocess, tarfile


def lines(path):
    """The lines of a text file; spaces at their ends and empty lines around them do not count."""
    return [line.rstrip() for line in open(path, encoding="utf-8").read().strip().split("\\n")]


def tree(root):
    """Content by path of each file under a directory."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    return {path: open(path, encoding="utf-8").read() for path in paths}


def mode(path):
    """Permissions in octal digits, as chmod takes them."""
    return format(stat.S_IMODE(os.stat(path).st_mode), "o")


def members(archive):
    """Content by path of each file in a tar archive."""
    with tarfile.open(archive) as tar:
        files = [member for member in tar.getmembers() if member.isfile()]
        return {os.path.normpath(member.name): tar.extractfile(member).read().decode() for member in files}


def output(command):
    """The lines that a shell command prints; it must succeed."""
    return subprocess.run(command, shell=True, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


'''


def assertions(*conditions: str) -> Mapping[str, bytes]:
    """Check files for `CHECK` that accept a final state where every one of ``conditions`` is true.

    A condition is a Python expression on one line, evaluated in the working directory. It may call ``lines``,
    ``tree``, ``mode``, ``members`` and ``output``.
    """
    return {"/tests/check.py": (_FUNCTIONS + "".join(f"assert {condition}\n" for condition in conditions)).encode()}
