import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model of random weights, and its tokenizer."""
    import tiny

    directory = tmp_path_factory.mktemp("base")
    tokenizer = tiny.tokenizer()
    tiny.llama(vocab_size=len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
