"""From bytes that a command printed to what the policy reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obsspec.environments.observation import LIMIT, Capture, render, shorten


def captured(*chunks: bytes) -> str:
    capture = Capture()
    for chunk in chunks:
        capture.add(chunk)
    return capture.text()


@given(st.binary(max_size=60), st.integers(1, 7))
def test_how_the_output_arrives_does_not_matter(data: bytes, size: int) -> None:
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    assert captured(*chunks) == captured(data) == data.decode(errors="replace").rstrip("\n")


@settings(deadline=None)
@given(
    st.integers(0, 300_000),
    st.sampled_from([b"a", b"0123456789\n", "é".encode(), "東".encode(), "🙂".encode()]),
    st.integers(50, 70_000),
)
def test_long_output_keeps_its_ends_and_says_how_much_is_missing(length: int, unit: bytes, size: int) -> None:
    data = b"<" + unit * (length // len(unit)) + b">"
    text = data.decode()
    shown = captured(*(data[i : i + size] for i in range(0, len(data), size)))
    if len(text) <= LIMIT:
        assert shown == text
        return
    head, note, tail = shown.split("\n[", 1)[0], *shown.split("\n[", 1)[1].split(" characters left out]\n", 1)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) == len(tail) == LIMIT // 2
    if len(data) <= 8 * LIMIT or len(data) == len(text):
        assert int(note) == len(text) - LIMIT


def test_what_is_kept_is_bounded() -> None:
    capture = Capture()
    for _ in range(2000):
        capture.add(b"x" * 100_000)
    held = len(capture._head) + sum(map(len, capture._tail))
    assert held < 500_000
    assert f"[{2000 * 100_000 - LIMIT} characters left out]" in capture.text()


@given(st.text())
def test_shortening_keeps_short_texts(text: str) -> None:
    assert shorten(text) == text
    assert shorten(shorten(text * 5000))[:100] == (text * 5000)[:100]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("hello", 0), "hello"),
        (("", 0), "(no output)"),
        (("", 1), "(no output)\n[exit code 1]"),
        (("oops", 127), "oops\n[exit code 127]"),
        (("so far", None, 30.0), "so far\n[timed out after 30 s]"),
        (("", None, 0.5), "(no output)\n[timed out after 0.5 s]"),
    ],
)
def test_rendering(arguments: tuple[str, int | None], text: str) -> None:
    assert render(*arguments) == text
