"""Run `sglang.launch_server` as a child that never outlives us: the demo, evaluation and load tests share it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 600.0
#: The CPU platform and one thread a process. SGLang keeps fp32 convolution states only if told; its bf16 default moves
#: the text.
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ServerError(RuntimeError):
    """A server that did not start or did not answer; the message names its log and quotes the end of it."""


def server_environment(on_gpu: bool) -> dict[str, str]:
    """The environment of a server; on a CPU it asks for the CPU platform and one thread a process."""
    return dict(os.environ) | ({} if on_gpu else CPU_ENVIRONMENT)


def cache_problem(environment: Mapping[str, str]) -> str | None:
    """One line if torch could not write its compiler cache where SGLang puts it: importing SGLang would end in a bare
    FileNotFoundError. None if it could. The directory is made, as SGLang would make it."""
    base = environment.get("SGLANG_CACHE_DIR") or os.path.join("~", ".cache", "sglang")
    folder = environment.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(os.path.expanduser(base), "inductor")
    try:
        os.makedirs(folder, exist_ok=True)
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "not writable"
    except OSError as error:
        reason = str(error)
    return reason and (
        f"cache directory: found {folder} ({reason}), want one that can be written; "
        "set SGLANG_CACHE_DIR to a writable directory"
    )


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def serving(
    name: str,
    flags: Mapping[str, str],
    *,
    log: Path,
    environment: Mapping[str, str],
    say: Callable[[str], object],
) -> Iterator[str]:
    """Start a server, wait until it answers, yield its URL, and end its whole process group.

    ``flags`` are SGLang's without their dashes; an empty value is a switch. ``say`` receives progress, a line at a
    time. Raises ServerError.
    """
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
    for flag, value in flags.items():
        command += [f"--{flag}", value] if value else [f"--{flag}"]
    say(f"{name}: starting the server (half a minute or more), log {log}")
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
            preexec_fn=_die_with_parent,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(name, url, process, log, say)
        yield url
    finally:
        end_process_group(process)


def _die_with_parent() -> None:
    """In the child: a kill -9 of us runs no clean-up, so the kernel must end the server; SGLang's own processes end
    with the server by the same means (``kill_itself_when_parent_died``)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_until_healthy(
    name: str, url: str, process: subprocess.Popen[Any], log: Path, say: Callable[[str], object]
) -> None:
    """Poll /health. Raises ServerError with the log's last lines if the server dies or takes too long."""
    began, last_line = time.monotonic(), 0.0
    while True:
        waited = time.monotonic() - began
        if process.poll() is not None:
            raise ServerError(f"{name}: server exited with {process.returncode}; log {log}, its end:\n{tail(log)}")
        if waited > START_TIMEOUT_S:
            raise ServerError(
                f"{name}: not healthy after {waited:.0f} s, wanted at most {START_TIMEOUT_S:.0f}; log {log}, "
                f"its end:\n{tail(log)}"
            )
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                say(f"{name}: ready after {waited:.0f} s")
                return
        except httpx.TransportError:
            pass
        if waited - last_line >= 10:
            last_line = waited
            say(f"{name}: still starting, {waited:.0f} s")
        time.sleep(0.5)


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def end_process_group(process: subprocess.Popen[Any]) -> None:
    """SIGTERM, then after 10 s SIGKILL, to a server and the processes it started."""
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    # The leader may be gone while a child of its group is not.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
