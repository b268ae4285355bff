from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from cases import Pair, model, pair  # noqa: E402
from configs import SETUPS  # noqa: E402
from forward import Forward  # noqa: E402
from harness import Server  # noqa: E402

from sglang_dflash.cpu.stand_in import declare_torchvision_ops  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests by server, or each would start several times; those that start their own come first,
    while no shared one is up."""
    slots = [i for i, item in enumerate(items) if HERE in item.path.parents]
    order = list(SETUPS)

    def key(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        name = callspec.params.get("served") if callspec else None
        return order.index(name) if name else -1

    for slot, item in zip(slots, sorted((items[i] for i in slots), key=key), strict=True):
        items[slot] = item


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Pair]]:
    """A running server of ``configs.SETUPS`` and its reference texts."""
    setup = SETUPS[request.param]
    texts = pair(setup.kind, block_size=setup.block_size, shared=4)
    with Server(tmp_path_factory.mktemp(request.param), texts.target, texts.drafter, *setup.options) as server:
        server.control(truths=texts.truths)
        yield server, texts
        server.assert_healthy()


@pytest.fixture(autouse=True)
def _server_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave no setting behind; a failing test shows the end of the server's log (pytest prints a teardown's output)."""
    yield
    if "served" in request.fixturenames:
        server, texts = request.getfixturevalue("served")
        server.reset(truths=texts.truths)
        print(f"---- server log\n{server.tail()}")


@pytest.fixture(scope="session")
def forward() -> Iterator[Forward]:
    """transformers in a process of its own."""
    with Forward() as process:
        yield process


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The byte-level tokenizer that all tiny models share; as the server, it leaves special tokens out of a text."""
    declare_torchvision_ops()
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(model("dense"))
    loaded.decode = functools.partial(loaded.decode, skip_special_tokens=True)
    return loaded
