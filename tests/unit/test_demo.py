"""The demo's own logic, without a server: what it counts, what is identical."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo keeps its files; the servers are stand-ins, and the signal handler is put back."""
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it once it is imported
    monkeypatch.setattr(demo, "run", serve)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


def left(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.name != "cache")


def serve(name: str, flags: dict, on_gpu: bool, log: Path, console: Console) -> Run:
    log.touch()
    return a_run(verifies=0 if name == "AR" else 9)


def test_success_leaves_no_files(home: Path) -> None:
    assert demo.main() == 0
    assert left(home) == []


@pytest.mark.parametrize("how", ["other text", "no server", "interrupt"])
def test_failure_keeps_the_logs_and_says_where(
    how: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, flags: dict, on_gpu: bool, log: Path, console: Console) -> Run:
        done = serve(name, flags, on_gpu, log, console)
        if name == "AR" or how == "other text":
            return a_run(text=name, verifies=done.answers[0].verifies)
        raise KeyboardInterrupt if how == "interrupt" else DemoError("server exited with 1")

    monkeypatch.setattr(demo, "run", fail)
    assert demo.main() == (130 if how == "interrupt" else 1)
    (logs,) = left(home)
    assert logs.startswith("sglang-dflash-logs-")
    assert (home / logs / "ddtree.log").exists()
    assert f"the servers' logs stay in {home / logs}" in capsys.readouterr().out


def test_a_home_that_cannot_be_written_is_said_in_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "cache").touch()
    assert demo.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"demo failed: cache directory: found {home / 'cache' / 'inductor'}")
    assert left(home) == []


def test_models_of_killed_demos_are_removed(home: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for name in (f"{process.pid}-dead", f"{os.getpid()}-alive", "older"):
        (home / f"{demo.MODELS}{name}").mkdir()
    demo.remove_leftovers()
    assert left(home) == sorted([f"{demo.MODELS}{os.getpid()}-alive", f"{demo.MODELS}older"])
