"""A world model's server beside verl: what it foretells is used while it is there, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from scripted import Verl, assert_equal, figures

from http_server import serve
from test_served_world_model import FakeModel


def foretold(prompt: str) -> str:
    """What the tools answer to the command that is asked about."""
    command = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return f"ran {command}\n"


class Elsewhere:
    """A world model's server that can be ended and started again."""

    def __init__(self, portal: BlockingPortal, directory: Path) -> None:
        self.model = FakeModel(directory, 290, foretold)
        self._portal = portal

    @contextmanager
    def serving(self) -> Iterator[str]:
        with self._portal.wrap_async_context_manager(serve(self.model)) as url:
            yield url


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Elsewhere]:
    with start_blocking_portal() as portal:
        yield Elsewhere(portal, tmp_path / "world-model")


def test_it_is_used_while_it_is_there(cluster: None, base: str, tmp_path: Path, elsewhere: Elsewhere) -> None:
    file = tmp_path / "loops.yaml"
    with elsewhere.serving() as url:
        target = "obsspec.integrations.verl.SpeculativeToolAgentLoop"
        keys = f"predictor: language_model, world_model: '{url}', world_model_tokenizer: '{tmp_path / 'world-model'}'"
        file.write_text(f"- {{name: obsspec, _target_: {target}, breadth: 2, {keys}}}\n")
        verl = Verl(base, str(file))
        plain = verl.samples("tool_agent", 4, 2)
        for _ in range(40):  # The first samples find that nobody has looked for the server yet.
            ahead = verl.samples("obsspec", 4, 2)
            assert_equal(plain, ahead)
            if figures(ahead)["obsspec_hits"]:
                break
        else:
            raise AssertionError("no hit")
    assert any(each.body["logprobs"] == 2 for each in elsewhere.model.completions), (
        "a second draft needs the second likeliest tokens"
    )
    ahead = verl.samples("obsspec", 4, 2)
    assert_equal(plain, ahead)
    assert figures(ahead)["obsspec_hits"] == 0
