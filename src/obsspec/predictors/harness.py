"""What a predictor must know about the harness whose observations it predicts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Harness:
    """How a command's output becomes an observation."""

    silence: str = "(no output)"
    """Stands for an output that is empty."""
    exit_code: str = "[exit code {}]"
    """The last line of the observation of a command that failed; empty where exit codes are not shown."""
    strips_newlines: bool = True
    """Whether newlines at the end of the output are dropped."""
    limit: int = 10_000
    """Characters; longer outputs are cut, and the rules predict none."""
    keeps_directory: bool = True
    """Whether ``cd`` lasts from one command to the next."""

    def render(self, output: str, code: int = 0) -> str:
        """The observation of a command that printed ``output`` and exited with ``code``."""
        body = (output.rstrip("\n") if self.strips_newlines else output) or self.silence
        return f"{body}\n{self.exit_code.format(code)}" if code and self.exit_code else body

    def failed(self, observation: str) -> bool:
        """Whether the observation itself shows that the command failed."""
        before, _, after = self.exit_code.partition("{}")
        last = observation.rpartition("\n")[2]
        return bool(before) and last.startswith(before) and last.endswith(after)


SANDBOX = Harness()
"""ObsSpec's own sandbox."""
