"""transformers' logits for whole sequences, from one child process: hiding fla there leaves our own imports alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

BATCH = 64


class Forward:
    """The child process; started by the first use."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def logits(self, model: Path, sequences: list[list[int]], last: int = 1, dtype: str = "float32") -> list[Tensor]:
        """Logits after each of the ``last`` tokens of every sequence: ``[min(last, length), V]`` each, in ``dtype``."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        with tempfile.NamedTemporaryFile(suffix=".pt") as out:
            job = {"model": str(model), "sequences": sequences, "last": last, "dtype": dtype, "out": out.name}
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            print(json.dumps(job), file=self._child.stdin, flush=True)
            answer = self._child.stdout.readline()
            assert answer == "done\n", f"the transformers process died (exit status {self._child.poll()})"
            return torch.load(out.name)

    def logprobs(self, model: Path, prompt: list[int], answer: list[int]) -> Tensor:
        """Log-probs of every token at each step of ``answer``: ``[len(answer), V]``."""
        (logits,) = self.logits(model, [prompt + answer[:-1]], last=len(answer))
        return logits.log_softmax(-1)

    def joint(self, model: Path, prompt: list[int], length: int, temperature: float, top_k: int) -> dict:
        """The exact distribution of the next ``length`` tokens: token tuple -> probability."""
        paths: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            rows = self.logits(model, [prompt + list(path) for path in paths])
            grown = {}
            for (path, mass), row in zip(paths.items(), rows, strict=True):
                best = (row[0].double() / temperature).topk(top_k)
                for p, token in zip(best.values.softmax(-1).tolist(), best.indices.tolist(), strict=True):
                    grown[(*path, token)] = mass * p
            paths = grown
        assert math.isclose(sum(paths.values()), 1)
        return paths

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()


def _serve() -> None:
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    from sglang_dflash.cpu.stand_in import declare_torchvision_ops

    declare_torchvision_ops()
    sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # type: ignore[assignment]
    from transformers import AutoModelForCausalLM

    models = {}
    for line in sys.stdin:
        job = json.loads(line)
        key = job["model"], job["dtype"]
        if key not in models:
            loaded = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
            models[key] = loaded.eval()
        torch.save(_logits(models[key], job["sequences"], job["last"]), job["out"])
        print("done", flush=True)


@torch.no_grad()
def _logits(model, sequences: list[list[int]], last: int) -> list[Tensor]:
    results: list[Tensor] = []
    for start in range(0, len(sequences), BATCH):
        batch = sequences[start : start + BATCH]
        longest = max(map(len, batch))
        # Padded on the right: no token sees what follows it.
        logits = model(torch.tensor([s + [0] * (longest - len(s)) for s in batch]), use_cache=False).logits
        results += [logits[i, max(0, len(s) - last) : len(s)].clone() for i, s in enumerate(batch)]
    return results


if __name__ == "__main__":
    _serve()
