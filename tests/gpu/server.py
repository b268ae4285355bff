"""Servers on the GPU host: AR, stock chain and tree, several at a time on one card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
COMMON = ["--host", "127.0.0.1", "--sampling-backend", "pytorch", "--skip-server-warmup", "--skip-tokenizer-init"]
COMMON += ["--disable-prefill-cuda-graph", "--attention-backend", "triton"]


class Server:
    """Starts at once and returns; ``wait`` until it is healthy. ``plugin=False`` sets SGLANG_DFLASH=off (stock)."""

    next_port = 31000

    def __init__(
        self, name: str, work: Path, options: list[str], *, plugin: bool = True, env: dict[str, str] | None = None
    ):
        self.name, Server.next_port = name, Server.next_port + 37
        self.work = work / name
        self.work.mkdir(parents=True, exist_ok=True)
        self.log, self.control_file = work / f"{name}.log", self.work / "control.json"
        self.settings: dict[str, Any] = {}
        self.control()
        port = Server.next_port
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        env = os.environ | {"DDTREE_TEST_CONTROL": str(self.control_file), "PYTHONUNBUFFERED": "1"} | (env or {})
        env["PYTHONPATH"] = f"{HERE / 'plugin'}:{env.get('PYTHONPATH', '')}"
        if not plugin:
            env["SGLANG_DFLASH"] = "off"
        self.started = time.time()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *COMMON, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env,
            )

    def wait(self, limit_s: float = 420) -> Server:
        while time.time() - self.started < limit_s:
            if self.process.poll() is not None:
                break
            try:
                if self.client.get("/health", timeout=2).status_code == 200:
                    print(f"{self.name}: up after {time.time() - self.started:.0f} s", flush=True)
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        self.stop()
        raise RuntimeError(f"{self.name} did not come up:\n{tail}")

    def control(self, **settings: Any) -> None:
        self.settings |= settings
        part = self.control_file.with_suffix(".part")
        part.write_text(json.dumps(self.settings))
        part.replace(self.control_file)

    def generate(self, input_ids: list[int], max_new_tokens: int, sampling: dict | None = None, **body: Any) -> dict:
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | (sampling or {})
        answer = self.client.post("/generate", json={"input_ids": input_ids, "sampling_params": params} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate_all(self, jobs: list[tuple[list[int], int]], at_once: int, **kwargs: Any) -> list[dict]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda job: self.generate(*job, **kwargs), jobs))

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.client.close()
