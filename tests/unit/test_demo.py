"""The demo's own logic, without a server: what it counts, what is identical, that nothing outlives it."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import psutil
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


def test_a_dead_server_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        pytest.raises(DemoError, match=r"AR: server exited with \d+; log .*server.log"),
        demo.serving("AR", {"dtype": "float32"}, False, log, Console(file=io.StringIO())),
    ):
        pass
    assert "required: --model-path" in log.read_text()


def test_the_whole_process_group_ends() -> None:
    code = "import subprocess as s, time; s.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    (child,) = psutil.Process(process.pid).children()
    demo.end_process_group(process)
    assert process.poll() is not None
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server's child outlived it"
        time.sleep(0.05)


def test_models_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        demo_models.write(tmp_path / name)
    demo_models.write(tmp_path / "c", seed=1)
    a, b, c = ({f.name: f.read_bytes() for f in (tmp_path / n / "target").iterdir()} for n in "abc")
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]
