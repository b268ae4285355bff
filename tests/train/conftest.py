"""What files of these tests share; one that needs another target defines its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import random_pair


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's target; not to be changed."""
    return random_pair.write(tmp_path_factory.mktemp("models"))[0]


@pytest.fixture(scope="module")
def prompts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module's ``PROMPTS`` as a prompt set."""
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in request.module.PROMPTS))
    return file
