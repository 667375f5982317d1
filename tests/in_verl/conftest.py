import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
# What Ray's workers import.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model of random weights, and its tokenizer."""
    import tiny

    directory = tmp_path_factory.mktemp("model")
    tokenizer = tiny.tokenizer()
    tiny.llama(vocab_size=len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def loops(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of agent loops, as verl has them."""
    file = tmp_path_factory.mktemp("loops") / "loops.yaml"
    target = "obsspec.integrations.verl.SpeculativeToolAgentLoop"
    entries = (
        f"{{name: obsspec, _target_: {target}, depth: 2, breadth: 2}}",
        f"{{name: never, _target_: {target}, depth: 0}}",
    )
    file.write_text("".join(f"- {entry}\n" for entry in entries))
    return str(file)
