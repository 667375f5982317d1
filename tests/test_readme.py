"""What the README and the documentation show runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = [
    pytest.param(program, id=f"{page.name}-{number}")
    for page in PAGES
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_runs(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    if "print(" in program:
        assert finished.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    assert [
        link for link in links if not (page.parent / link).exists() and not (page.parent / f"{link}.md").exists()
    ] == []
