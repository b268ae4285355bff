"""`python -m sglang_dflash.demo`: the same prompts to two servers, plain decoding and DDTree-8, side by side.

Exit status 0 if every answer is the same text, 1 if not or if a server fails. The models are those of
:mod:`sglang_dflash.demo_models`: random weights, so the text is noise and the drafter is right about as
often as chance. What the run shows is that the tree changes nothing in the text, through the real server
and its HTTP API.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_dflash.server_process import ServerError, cache_problem, server_environment, serving, tail

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "def quicksort(items: list[int]) -> list[int]:\n    ",
    "Translate to German: the train leaves at half past seven.",
    "A farmer has 17 sheep; all but 9 run away. How many are left?",
    "SELECT name, count(*) FROM orders GROUP BY",
)
MAX_TOKENS = 96
MODELS = "sglang-dflash-demo-"  # a temporary directory's name begins so, and goes on with our process id


class DemoError(RuntimeError):
    """A server that did not start or did not answer; the message says where its log is."""


@dataclass(frozen=True)
class Answer:
    """One prompt's answer and what the server counted for it. Without speculation the two counts are 0."""

    text: str
    tokens: int
    correct_drafts: int
    verifies: int


@dataclass(frozen=True)
class Run:
    """All answers of one server, in the order of PROMPTS, and the seconds they took one after another."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(a.tokens for a in self.answers) / self.seconds

    @property
    def tau(self) -> float | None:
        """Tokens committed a verify, pooled: 1 + accepted drafts / verifies; None without verifies."""
        verifies = sum(a.verifies for a in self.answers)
        return 1 + sum(a.correct_drafts for a in self.answers) / verifies if verifies else None


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def server_flags(target: Path, on_gpu: bool) -> dict[str, str]:
    """Flags both servers share. fp32 so that the two texts can be compared token for token."""
    return {
        "model-path": str(target),
        "dtype": "float32",
        "device": "cuda" if on_gpu else "cpu",
        "attention-backend": "triton" if on_gpu else "torch_native",
        "max-total-tokens": "4096",
        "max-running-requests": "4",
        "max-mamba-cache-size": "40",
        "mamba-radix-cache-strategy": "extra_buffer",
        "mamba-track-interval": "64",
        "log-level": "info",
    }


def tree_flags(drafter: Path) -> dict[str, str]:
    """Flags that turn DDTree-8 on; the budget is the default, block size - 1 = 7 nodes."""
    return {
        "speculative-algorithm": "dflash",
        "speculative-draft-model-path": str(drafter),
        "speculative-ddtree-topk": "8",
    }


def ask(client: httpx.Client, prompt: str) -> Answer:
    """One greedy chat completion. Raises DemoError if the server refuses it."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_spec_tokens_details": True,
    }
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise DemoError(f"chat completion: found status {response.status_code}, wanted 200: {response.text[:500]}")
    reply = response.json()
    details = (reply.get("sglext") or {}).get("spec_tokens_details") or {}
    return Answer(
        text=reply["choices"][0]["message"]["content"],
        tokens=reply["usage"]["completion_tokens"],
        correct_drafts=details.get("spec_num_correct_drafts", 0),
        verifies=details.get("spec_verify_ct", 0),
    )


def run(name: str, flags: dict[str, str], on_gpu: bool, log: Path, console: Console) -> Run:
    """Serve with ``flags`` and send every prompt, one at a time, after one to warm up."""
    environment = server_environment(on_gpu)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with (
        serving(name, flags, log=log, environment=environment, say=say) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        try:
            ask(client, "warm-up")
            began = time.monotonic()
            answers = tuple(ask(client, prompt) for prompt in PROMPTS)
            seconds = time.monotonic() - began
        except httpx.TransportError as e:
            raise DemoError(f"{name}: no answer ({type(e).__name__}: {e}); log {log}, its end:\n{tail(log)}") from e
    console.print(f"{name}: {len(answers)} answers in {seconds:.1f} s")
    return Run(answers, seconds)


def printable(text: str) -> Text:
    """Text with everything a terminal might act on escaped."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


def report(ar: Run, tree: Run, console: Console) -> bool:
    """Print the answers side by side and the totals; True if every answer is the same text."""
    table = Table(title="Greedy answers", show_lines=True)
    for heading in ("prompt", "AR", "DDTree-8", "same"):
        table.add_column(heading, overflow="fold")
    for prompt, a, t in zip(PROMPTS, ar.answers, tree.answers, strict=True):
        same = Text("yes", "green") if a.text == t.text else Text("NO", "bold red")
        table.add_row(printable(prompt), printable(a.text), printable(t.text), same)
    console.print(table)
    if ar.tau is not None or tree.tau is None:
        raise DemoError(f"verifies: found tau {ar.tau} without speculation and {tree.tau} with, wanted none and one")
    totals = Table(title=f"{len(PROMPTS)} prompts, one at a time, {MAX_TOKENS} tokens each")
    for heading in ("", "tokens", "verifies", "tau (pooled)", "tokens/s"):
        totals.add_column(heading)
    for name, result in (("AR", ar), ("DDTree-8", tree)):
        verifies = sum(a.verifies for a in result.answers)
        tau = "-" if result.tau is None else f"{result.tau:.3f}"
        tokens = sum(a.tokens for a in result.answers)
        totals.add_row(name, str(tokens), str(verifies or "-"), tau, f"{result.tokens_per_second:.1f}")
    console.print(totals)
    identical = [a.text for a in ar.answers] == [t.text for t in tree.answers]
    console.print(
        "tau = tokens committed a verify. The drafter is untrained: tau is about 1, DDTree the slower one."
        "\nA tree costs a draft and a wider pass, and only a trained drafter earns them back.",
        soft_wrap=True,
    )
    console.print(f"text identical: [bold]{'yes' if identical else 'NO'}[/]")
    return identical


def remove_leftovers() -> None:
    """Remove the models of demos that were killed with signal 9, which runs no clean-up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{MODELS}*-*"):
        pid = folder.name.removeprefix(MODELS).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)  # another user's stay


def main() -> int:
    """Write the models, run both servers, compare. Returns the exit status."""
    from sglang_dflash import demo_models

    console = Console(width=None if sys.stdout.isatty() else 120)
    on_gpu = has_gpu()
    # Ctrl-C arrives as an exception already; a plain `kill` must end the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if (problem := cache_problem(os.environ)) is not None:
        console.print(f"demo failed: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    remove_leftovers()
    logs = Path(tempfile.mkdtemp(prefix="sglang-dflash-logs-"))
    status = 1
    try:
        with tempfile.TemporaryDirectory(prefix=f"{MODELS}{os.getpid()}-") as models:
            target, drafter = demo_models.write(Path(models))
            console.print(
                f"A tiny hybrid target and an untrained drafter (random weights), on "
                f"{'the GPU' if on_gpu else 'the CPU'}: the text is noise."
            )
            shared = server_flags(target, on_gpu)
            ar = run("AR", shared, on_gpu, logs / "ar.log", console)
            tree = run("DDTree-8", shared | tree_flags(drafter), on_gpu, logs / "ddtree.log", console)
        status = 0 if report(ar, tree, console) else 1
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
