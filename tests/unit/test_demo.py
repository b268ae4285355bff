"""The demo's own logic, without a server: what it counts, what is identical."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from sglang_dflash import demo, demo_models
from sglang_dflash.demo import PROMPTS, Answer, DemoError, Run


def a_run(*, text: str = "same", correct: int = 0, verifies: int = 0) -> Run:
    return Run(tuple(Answer(text, 10, correct, verifies) for _ in PROMPTS), seconds=2.0)


def test_tau_is_pooled_over_requests() -> None:
    # Ratios 2.0 and 1.25: their mean, 1.625, is another number.
    run = Run((Answer("", 0, 1, 1), Answer("", 0, 1, 4)), 1.0)
    assert run.tau == pytest.approx(1 + 2 / 5)
    assert a_run().tau is None
    assert a_run().tokens_per_second == pytest.approx(len(PROMPTS) * 5)


@pytest.mark.parametrize(("text", "identical"), [("same", True), ("other", False)])
def test_only_equal_texts_are_identical(text: str, identical: bool) -> None:
    out = io.StringIO()
    result = demo.report(a_run(), a_run(text=text, verifies=9), Console(file=out, width=120))
    assert result is identical
    assert f"text identical: {'yes' if identical else 'NO'}" in out.getvalue()


def test_a_tree_server_that_never_verified_is_an_error() -> None:
    with pytest.raises(DemoError, match="wanted none and one"):
        demo.report(a_run(), a_run(), Console(file=io.StringIO()))


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert demo.printable("a\x1b[31m\nü").plain == "a\\x1b[31m\\nü"


def test_models_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        demo_models.write(tmp_path / name)
    demo_models.write(tmp_path / "c", seed=1)
    a, b, c = ({f.name: f.read_bytes() for f in (tmp_path / n / "target").iterdir()} for n in "abc")
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]
