"""`python -m sglang_dflash.demo`: the same prompts to three servers, one after another: plain decoding (AR), SGLang's
chain and DDTree-8, with the tiny pair that is part of this package.

Exit status 0 if all three wrote the same text, 1 if not or if a server fails.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from sglang_dflash.demo_report import show
from sglang_dflash.server_process import ServerError, cache_problem, server_environment, serving, tail
from sglang_dflash.tiny_pair import DRAFTER, TARGET

BUDGET = 32  # nodes of the tree without its root
MAX_TOKENS = 96


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or with ``chat`` a question."""

    text: str
    chat: bool = False


PROMPTS = (
    Prompt("import argparse\nimport json\n\n\ndef main() -> None:\n    parser = argparse.ArgumentParser()\n"),
    Prompt('class Stack:\n    """A last-in, first-out list."""\n\n    def __init__(self) -> None:\n'),
    Prompt("def read_config(path: str) -> dict:\n    with open(path) as file:\n"),
    Prompt("    def __eq__(self, other: object) -> bool:\n        if not isinstance(other, Point):\n"),
    Prompt("# Licensed under the Apache License, Version 2.0\n"),
    Prompt("class ParserTest(unittest.TestCase):\n    def test_empty_input(self):\n"),
    Prompt("What does this function do?\n\n```python\ndef area(self):\n    return self.width * self.height\n```", True),
    Prompt("How would you write `count_words(text)` in Python? It should return the number of words.", True),
)


class DemoError(RuntimeError):
    """A server that did not answer, or did not decode as it was told to; the message says where its log is."""


@dataclass(frozen=True)
class Answer:
    """One prompt's answer; ``histogram[n]`` of its verifies accepted n drafts (empty without speculation)."""

    text: str
    tokens: int
    histogram: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """All answers of one server, in the order of PROMPTS, and the seconds they took one after another."""

    name: str
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(a.tokens for a in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def histogram(self) -> list[int]:
        """Verifies by the number of drafts they accepted, over all answers."""
        depth = max(len(a.histogram) for a in self.answers)
        return [sum(a.histogram[n] for a in self.answers if n < len(a.histogram)) for n in range(depth)]

    @property
    def tau(self) -> float | None:
        """Tokens committed a verify, pooled: 1 + accepted drafts / verifies; None without verifies."""
        verifies = sum(self.histogram)
        return 1 + sum(n * count for n, count in enumerate(self.histogram)) / verifies if verifies else None

    @property
    def acceptance(self) -> list[float]:
        """Share of the verifies that accepted position 1, 2, ... and so all before it."""
        counts = self.histogram
        return [sum(counts[k:]) / sum(counts) for k in range(1, len(counts))]


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def shared_flags(on_gpu: bool) -> dict[str, str]:
    """Flags of all three servers. On a CPU fp32, where equal text means equal token for token; SGLang's prefill kernel
    of the gated delta net takes no fp32 on a GPU."""
    return {
        "model-path": str(TARGET),
        "dtype": "bfloat16" if on_gpu else "float32",
        "device": "cuda" if on_gpu else "cpu",
        "attention-backend": "triton" if on_gpu else "torch_native",
        "max-total-tokens": "4096",
        "max-running-requests": "4",
        "max-mamba-cache-size": "40",
        "mamba-radix-cache-strategy": "extra_buffer",
        "mamba-track-interval": "64",
        "log-level": "info",
    }


def decoding_flags() -> dict[str, dict[str, str]]:
    """What each server adds, by its name in the report."""
    drafted = {"speculative-algorithm": "dflash", "speculative-draft-model-path": str(DRAFTER)}
    tree = {"speculative-ddtree-topk": "8", "speculative-ddtree-budget": str(BUDGET)}
    return {"AR": {}, "chain": drafted | {"speculative-eagle-topk": "1"}, f"DDTree-8, N={BUDGET}": drafted | tree}


def ask(client: httpx.Client, prompt: Prompt) -> Answer:
    """One greedy completion through the OpenAI-compatible API. Raises DemoError if the server refuses it."""
    body: dict[str, Any] = {"model": "default", "max_tokens": MAX_TOKENS, "temperature": 0}
    body["return_spec_tokens_details"] = True
    if prompt.chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt.text}]
    else:
        path = "/v1/completions"
        body["prompt"] = prompt.text
    response = client.post(path, json=body)
    if response.status_code != 200:
        raise DemoError(f"{path}: found status {response.status_code}, wanted 200: {response.text[:500]}")
    reply = response.json()
    choice = reply["choices"][0]
    details = (reply.get("sglext") or {}).get("spec_tokens_details") or {}
    return Answer(
        text=choice["message"]["content"] if prompt.chat else choice["text"],
        tokens=reply["usage"]["completion_tokens"],
        histogram=tuple(details.get("spec_correct_drafts_histogram") or ()) if details.get("spec_verify_ct") else (),
    )


def run(name: str, flags: Mapping[str, str], on_gpu: bool, log: Path, console: Console) -> Run:
    """Serve with ``flags`` and send every prompt, one at a time, after two to warm up."""
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with (
        serving(name, flags, log=log, environment=server_environment(on_gpu), say=say) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        try:
            for prompt in (PROMPTS[0], PROMPTS[-1]):
                ask(client, prompt)
            client.post("/flush_cache").raise_for_status()  # else these two would be answered from the prefix cache
            began = time.monotonic()
            answers = tuple(ask(client, prompt) for prompt in PROMPTS)
            seconds = time.monotonic() - began
        except httpx.HTTPError as e:
            raise DemoError(f"{name}: no answer ({type(e).__name__}: {e}); log {log}, its end:\n{tail(log)}") from e
    done = Run(name, answers, seconds)
    if (done.tau is not None) != ("speculative-algorithm" in flags):
        raise DemoError(f"{name}: found tau {done.tau}, wanted {'none' if done.tau else 'one'}; log {log}")
    console.print(f"{name}: {len(answers)} answers in {seconds:.1f} s", highlight=False)
    return done


def main() -> int:
    """Run the three servers and compare. Returns the exit status."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    on_gpu = has_gpu()
    # Ctrl-C arrives as an exception already; a plain `kill` must end the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if (problem := cache_problem(os.environ)) is not None:
        console.print(f"demo failed: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    logs = Path(tempfile.mkdtemp(prefix="sglang-dflash-logs-"))
    status = 1
    try:
        console.print(
            f"The tiny pair of this package on {'the GPU' if on_gpu else 'the CPU'}: three servers, one after another; "
            "a minute or two.",
            soft_wrap=True,
        )
        runs = [
            run(name, shared_flags(on_gpu) | flags, on_gpu, logs / f"{name.partition(',')[0].lower()}.log", console)
            for name, flags in decoding_flags().items()
        ]
        status = 0 if show([p.text for p in PROMPTS], runs, on_gpu, console) else 1
    except (DemoError, ServerError) as e:
        console.print(f"demo failed: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted; servers ended")
        status = 130
    finally:
        if status == 0:
            shutil.rmtree(logs)
        else:
            console.print(f"the servers' logs stay in {logs}", markup=False, highlight=False, soft_wrap=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
