import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# What Ray's workers import beside what is installed.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def loops(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of agent loops, as verl has them."""
    file = tmp_path_factory.mktemp("loops") / "loops.yaml"
    target = "obsspec.integrations.verl.SpeculativeToolAgentLoop"
    entries = (
        f"{{name: obsspec, _target_: {target}, depth: 2, breadth: 2}}",
        f"{{name: novice, _target_: {target}, breadth: 3}}",  # With a gate and a memory of its own.
        f"{{name: never, _target_: {target}, depth: 0}}",
    )
    file.write_text("".join(f"- {entry}\n" for entry in entries))
    return str(file)
