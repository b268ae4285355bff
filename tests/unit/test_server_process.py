"""Servers we start: a dead one is reported with its log, and none outlives us, however we end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sglang_dflash.server_process import ServerError, cache_problem, end_process_group, server_environment, serving


def wait_for_end(process: psutil.Process) -> None:
    deadline = time.monotonic() + 10
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.05)


def test_a_dead_server_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        pytest.raises(ServerError, match=r"AR: server exited with \d+; log .*server.log"),
        serving("AR", {"dtype": "float32"}, log=log, environment=server_environment(False), say=print),
    ):
        pass
    assert "required: --model-path" in log.read_text()


def test_the_whole_process_group_ends() -> None:
    code = "import subprocess as s, time; s.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    (child,) = psutil.Process(process.pid).children()
    end_process_group(process)
    assert process.poll() is not None
    wait_for_end(child)


def test_kill_9_of_us_ends_the_server(tmp_path: Path) -> None:
    """No clean-up of ours runs then. A stand-in for launch_server that sleeps is enough: the kernel does the rest."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text("import time\ntime.sleep(600)\n")
    code = (
        "import os, pathlib\n"
        "from sglang_dflash.server_process import serving\n"
        f"env = os.environ | {{'PYTHONPATH': {str(tmp_path)!r}}}\n"
        f"with serving('x', {{}}, log=pathlib.Path({str(tmp_path / 'log')!r}), environment=env, say=print): pass\n"
    )
    parent = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 30
    while not children:
        assert time.monotonic() < deadline
        children = psutil.Process(parent.pid).children()
        time.sleep(0.05)
    time.sleep(0.5)  # past the exec
    assert children[0].is_running()
    parent.kill()
    parent.wait()
    wait_for_end(children[0])


@pytest.mark.parametrize("name", ["SGLANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HOME"])
def test_a_cache_that_cannot_be_written_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" if name == "HOME" else tmp_path))
    environment = {} if name == "HOME" else {name: str(tmp_path / "file" / "cache")}
    problem = cache_problem(environment)
    assert problem is not None
    assert problem.startswith(f"cache directory: found {tmp_path / 'file'}")
    assert "set SGLANG_CACHE_DIR to a writable directory" in problem
    assert "\n" not in problem
    assert cache_problem({"SGLANG_CACHE_DIR": str(tmp_path / "cache")}) is None
