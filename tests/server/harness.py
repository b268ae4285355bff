"""A real SGLang server in a child process, its requests, and its control file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

PLUGIN = Path(__file__).parent / "plugin"
START_LIMIT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_env(**extra: str) -> dict[str, str]:
    """The environment of a CPU server with the test plugin."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "DDTREE_"))}
    return (
        env
        | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(PLUGIN),
        }
        | extra
    )


LAUNCH = ("-m", "sglang.launch_server")


def command(model: Path, drafter: Path | None, *options: str, launcher: tuple[str, ...] = LAUNCH) -> list[str]:
    """The server's command line; options given twice: the last one wins."""
    line = [sys.executable, *launcher, "--device", "cpu", "--dtype", "float32"]
    line += ["--model-path", str(model), "--host", "127.0.0.1", "--max-total-tokens", "8192"]
    line += ["--max-running-requests", "4"]
    if drafter is not None:
        line += ["--speculative-algorithm", "dflash", "--speculative-draft-model-path", str(drafter)]
    return [*line, *options]


class Server:
    """Starts on construction; raises RuntimeError with the log's end when it does not come up."""

    def __init__(
        self,
        work: Path,
        model: Path,
        drafter: Path | None,
        *options: str,
        env: dict[str, str] | None = None,
        launcher: tuple[str, ...] = LAUNCH,
    ):
        work.mkdir(parents=True, exist_ok=True)
        self.log, self.control_file, self.trace_file = work / "server.log", work / "control.json", work / "trace.jsonl"
        self.settings: dict[str, Any] = {}
        self.control()
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._client = httpx.Client(base_url=self.url, timeout=300, limits=httpx.Limits(max_connections=32))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command(model, drafter, *options, launcher=launcher), "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=work,
                env=server_env(DDTREE_TEST_CONTROL=str(self.control_file)) | (env or {}),
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server died:\n{self.tail()}")
            try:
                if self._client.get("/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"server not up after {START_LIMIT_S} s:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def control(self, **settings: Any) -> None:
        """Change the test plugin's settings; takes effect with the next step."""
        self.settings |= settings
        part = self.control_file.with_suffix(".part")
        part.write_text(json.dumps(self.settings))
        part.replace(self.control_file)  # the server must never read half a file

    def reset(self, **settings: Any) -> None:
        """Only these settings remain."""
        self.settings = {}
        self.control(**settings)

    def start_trace(self) -> None:
        self.trace_file.unlink(missing_ok=True)
        self.control(trace=str(self.trace_file))

    def trace(self) -> list[dict[str, Any]]:
        """Steps since ``start_trace``, one entry a request and step."""
        self.control(trace=None)
        return self.read(self.trace_file)

    def read(self, trace_file: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in trace_file.read_text().splitlines()] if trace_file.exists() else []

    def get(self, path: str) -> Any:
        response = self._client.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._client.post(path, json=body)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The parsed server-sent events of a streaming request, ``[DONE]`` left out."""
        with self._client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]

    def abandon(self, body: dict[str, Any], after_chunks: int) -> None:
        """A streaming ``/generate`` whose client hangs up."""
        with self._client.stream("POST", "/generate", json=body | {"stream": True}) as response:
            for i, _ in enumerate(response.iter_lines()):
                if i >= 2 * after_chunks:  # every event is followed by an empty line
                    return

    def generate(
        self, input_ids: list[int], max_new_tokens: int, *, sampling: dict[str, Any] | None = None, **body: Any
    ):
        """``/generate`` on token ids, greedy unless ``sampling`` says otherwise; returns the parsed answer."""
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | (sampling or {})
        response = self.post("/generate", {"input_ids": input_ids, "sampling_params": params} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def generate_all(self, jobs: list[tuple[list[int], int]], at_once: int, **kwargs: Any) -> list[dict[str, Any]]:
        return self.in_parallel(lambda job: self.generate(*job, **kwargs), jobs, at_once)

    @staticmethod
    def in_parallel(function: Callable[[Any], Any], jobs: Iterable[Any], at_once: int) -> list[Any]:
        """Results in the order of ``jobs``."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(function, jobs))

    def flush(self) -> None:
        """Refused while an answered request is still being put away, so tried until the server is idle."""
        deadline = time.monotonic() + 20
        while self.post("/flush_cache", {}).status_code != 200:
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.1)

    def assert_healthy(self) -> None:
        """Alive, and its pools' own accounting found no leak."""
        assert self.process.poll() is None, self.tail()
        log = self.log.read_text(errors="replace")
        for bad in ("memory leak detected", "Traceback (most recent call last)", "Scheduler hit an exception"):
            assert bad not in log, self.tail()

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._client.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
