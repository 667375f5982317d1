from __future__ import annotations

import os
import subprocess

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def unprivileged() -> list[str]:
    """What runs the command after it as one whom the permissions of files bind, as they do not bind root."""
    if os.geteuid() != 0:
        return []
    prefix = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("root may read and write anything here")
    return prefix


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model of random weights, and its tokenizer."""
    import tiny

    directory = tmp_path_factory.mktemp("base")
    tokenizer = tiny.tokenizer()
    tiny.llama(vocab_size=len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
