"""The demo's own logic, without a server: what it counts, what is identical."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from sglang_dflash import demo
from sglang_dflash.demo import PROMPTS, Answer, DemoError, Run
from sglang_dflash.demo_report import printable, show


def a_run(name: str = "AR", *, text: str = "same", histogram: tuple[int, ...] = ()) -> Run:
    return Run(name, tuple(Answer(text, 10, histogram) for _ in PROMPTS), seconds=2.0)


def test_tau_and_acceptance_are_pooled_over_requests() -> None:
    # Taus 3.0 and 1.25: their mean, 2.125, is another number. Six verifies: 3, 0, 0, 1, 0, 1 drafts accepted.
    run = Run("chain", (Answer("", 0, (0, 0, 0, 1)), Answer("", 0, (3, 2))), 1.0)
    assert run.histogram == [3, 2, 0, 1]
    assert run.tau == pytest.approx(1 + 5 / 6)
    assert run.acceptance == pytest.approx([3 / 6, 1 / 6, 1 / 6])
    assert a_run().tau is None
    assert a_run().tokens_per_second == pytest.approx(len(PROMPTS) * 5)


@pytest.mark.parametrize(("text", "identical"), [("same", True), ("other", False)])
def test_only_equal_texts_are_identical(text: str, identical: bool) -> None:
    out = io.StringIO()
    runs = [a_run(), a_run("chain", histogram=(1, 3)), a_run("DDTree-8", text=text, histogram=(1, 1, 2))]
    assert show([p.text for p in PROMPTS], runs, False, Console(file=out, width=120)) is identical
    assert f"text identical: {'yes' if identical else 'no'}" in out.getvalue()
    assert ("NO: DDTree-8" in out.getvalue()) is not identical


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31m\r\nü").plain == "a\\x1b[31m\\r\nü"


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
    return a_run(name, histogram=() if name == "AR" else (1, 2))


def test_success_leaves_no_files(home: Path) -> None:
    assert demo.main() == 0
    assert left(home) == []


@pytest.mark.parametrize("how", ["other text", "no server", "interrupt"])
def test_failure_keeps_the_logs_and_says_where(
    how: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, flags: dict, on_gpu: bool, log: Path, console: Console) -> Run:
        done = serve(name, flags, on_gpu, log, console)
        if name != f"DDTree-8, N={demo.BUDGET}":
            return done
        if how == "other text":
            return a_run(name, text=name, histogram=(1, 2))
        raise KeyboardInterrupt if how == "interrupt" else DemoError("server exited with 1")

    monkeypatch.setattr(demo, "run", fail)
    assert demo.main() == (130 if how == "interrupt" else 1)
    (logs,) = left(home)
    assert logs.startswith("sglang-dflash-logs-")
    assert (home / logs / "ddtree-8.log").exists()
    assert f"the servers' logs stay in {home / logs}" in capsys.readouterr().out


def test_a_home_that_cannot_be_written_is_said_in_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "cache").touch()
    assert demo.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"demo failed: cache directory: found {home / 'cache' / 'inductor'}")
    assert left(home) == []
