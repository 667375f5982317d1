from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from obsspec.errors import InputError
from obsspec.hub import load_tokenizer
from tiny import tokenizer


def test_a_tokenizer_without_pytorch_and_in_silence(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None; from obsspec.hub import load_tokenizer; "
        "print(load_tokenizer(sys.argv[1], '').encode('done'))"
    )
    finished = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == str(tokenizer().encode("done"))
    assert finished.stderr == ""


def test_what_is_no_tokenizer_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    for name in (str(tmp_path), "/nowhere", "x" * 5000):
        with pytest.raises(InputError, match=r"^tokenizer [^\n]*; take another$"):
            load_tokenizer(name, "take another")


@pytest.mark.parametrize("missing", ["jinja2", "transformers"])
def test_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"needs {missing}: pip install 'obsspec\[server\]'"):
        load_tokenizer(str(tmp_path), "")
