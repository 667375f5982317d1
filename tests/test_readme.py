"""What the README shows runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_loop_in_the_readme_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "tokens to train on" in finished.stdout


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
