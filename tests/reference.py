"""Greedy text of a model by transformers alone: fp32, pure-torch layers, the yardstick for every server
test."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "tests"


@dataclass(frozen=True)
class Greedy:
    """Greedy continuation of one prompt."""

    tokens: list[int]
    margin: float
    """Smallest gap between the best and second best logit along the way; a server may only differ below its
    noise."""


def _key(model_dir: Path, prompts: list[list[int]], new_tokens: int) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(json.dumps([prompts, new_tokens]).encode())
    for file in sorted(model_dir.iterdir()):
        if file.suffix in (".json", ".safetensors"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def greedy(model_dir: Path | str, prompts: list[list[int]], new_tokens: int) -> list[Greedy]:
    """Continue each prompt (token ids) by exactly `new_tokens` tokens, end-of-text ignored.

    A text that hinges on rounding (batched with a cache, and alone without one, disagree) gets margin 0. Runs
    in a process of its own, so that hiding fla and causal_conv1d from transformers leaves the caller's
    imports alone. Results are kept in `.cache/tests` under a hash of the inputs, the model's files and this
    file.

    Raises RuntimeError if that process fails.
    """
    model_dir = Path(model_dir)
    cached = CACHE / f"greedy-{_key(model_dir, prompts, new_tokens)}.json"
    if not cached.exists():
        job = json.dumps({"model": str(model_dir), "prompts": prompts, "new_tokens": new_tokens})
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, __file__],
            input=job,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"reference for {model_dir}: exit status {done.returncode}, wanted 0; {done.stderr}")
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_suffix(f".{os.getpid()}")
        unfinished.write_text(done.stdout.splitlines()[-1])
        unfinished.replace(cached)
    return [Greedy(**entry) for entry in json.loads(cached.read_text())]


def _generate(model_dir: str, prompts: list[list[int]], new_tokens: int) -> list[Greedy]:
    import torch

    from sglang_dflash.cpu.stand_in import declare_torchvision_ops

    declare_torchvision_ops()
    # transformers would otherwise take the Triton layers where they are installed.
    sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # type: ignore[assignment]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    results = []
    with torch.no_grad():
        # All prompts in one left-padded batch: the per-token cost of the pure-torch layers hardly depends on
        # it.
        texts = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        for prompt, text in zip(prompts, texts, strict=True):
            tokens = text[longest:].tolist()
            # What counts: alone, without padding and without a cache, every token is the argmax of its
            # prefix.
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            best = logits.topk(2).values
            margin = (best[:, 0] - best[:, 1]).min().item()
            results.append(Greedy(tokens, margin if logits.argmax(-1).tolist() == tokens else 0.0))
    return results


if __name__ == "__main__":
    request = json.loads(sys.stdin.read())
    answers = _generate(request["model"], request["prompts"], request["new_tokens"])
    print(json.dumps([asdict(answer) for answer in answers]))
