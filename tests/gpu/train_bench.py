#!/usr/bin/env python3
"""Trainer speed and memory: random features, random head, everything else the real `Fit` loop with its data thread.

    python3 tests/gpu/train_bench.py [--shape 27b|tiny] [--out FILE.json] [--steps 30] [--rows N] [--length N]

``27b``: the drafter of Qwen3.6-27B (1.73e9 parameters, 5 layers S,S,S,S,F, K*H = 25600, vocabulary 248,320), then the
same steps with the head's logits whole and kept for backward. ``tiny``: the shipped pair's recipe, 5.2e6 parameters;
shows whether the GPU or the host limits a small model. ``smoke``: a few kilobytes, to run this script on a CPU.

Figures: context tokens and drafted slots a second, model FLOP use (products that the mathematics needs, none counted
twice, against `--peak` TFLOP/s), share of the time in which the GPU computes, peak memory. Needs torch, safetensors,
pydantic, PyYAML, rich; neither SGLang nor a target.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import package  # noqa: F401
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy

from sglang_dflash.train import fit as fit_module
from sglang_dflash.train import step as step_module
from sglang_dflash.train.head import HeadOutput
from sglang_dflash.train.recipe import Recipe, parse_recipe
from sglang_dflash.train.shards import Sample
from sglang_dflash.train.target_weights import TargetWeights

SHAPES: dict[str, dict[str, Any]] = {
    "27b": {
        "hidden": 5120, "vocab": 248320, "target_layers": 64, "ids": [1, 16, 31, 46, 61], "rows": 1, "length": 4096,
        "recipe": {
            "drafter": {
                "layers": 5, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 17408, "block_size": 16,
                "mask_token_id": 248070, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
                "sliding_window": 2048,
            },
            "anchors": 512,
        },
    },
    "tiny": {
        "hidden": 256, "vocab": 1024, "target_layers": 8, "ids": [1, 3, 5, 6], "rows": 32, "length": 2048,
        "recipe": {
            "drafter": {
                "layers": 5, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 1024, "block_size": 8,
                "mask_token_id": 1021,
            },
            "anchors": 512,
        },
    },
    "smoke": {
        "hidden": 32, "vocab": 64, "target_layers": 8, "ids": [1, 3, 5], "rows": 2, "length": 64,
        "recipe": {
            "drafter": {
                "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64, "block_size": 8,
                "mask_token_id": 63,
            },
            "anchors": 16,
        },
    },
}  # fmt: skip


class RandomSource:
    """Samples of one row each, of which a few different ones exist: host memory is read as for real data."""

    def __init__(self, shape: dict[str, Any], length: int, count: int, distinct: int = 4):
        generator = torch.Generator().manual_seed(0)
        self.feature_width, self.has_final = len(shape["ids"]) * shape["hidden"], False
        self.layer_ids = tuple(shape["ids"])
        self.fingerprint = {"layer_ids": shape["ids"], "quantization": "random"}
        self.lengths = [length] * count
        top = shape["recipe"]["drafter"]["mask_token_id"]
        mask = torch.arange(length) >= length // 8
        base = torch.randn(1 << 20, generator=generator).bfloat16()
        repeats = -(-length * self.feature_width // base.numel())
        self._samples = [
            Sample(
                f"s{i}",
                torch.randint(0, top, (length,), generator=generator, dtype=torch.int32),
                mask,
                base.roll(i * 101).repeat(repeats)[: length * self.feature_width].view(length, -1),
            )
            for i in range(distinct)
        ]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index % len(self._samples)]

    def fetch(self, indices: Sequence[int]) -> list[Sample]:
        return [self[i] for i in indices]


def step_flops(shape: dict[str, Any], recipe: Recipe) -> float:
    """Of one rank's step. A trained product costs 6 a weight and token, fc 4 (features need no gradient), the frozen
    head 4 (its weights need none). Attention counts what a query may see, with anchors halfway on average."""
    d, h, vocab = recipe.drafter, shape["hidden"], shape["vocab"]
    context, queries = recipe.rows * recipe.max_length, recipe.rows * recipe.anchors * d.block_size
    kv, attention = 2 * h * d.kv_heads * d.head_dim, 2 * h * d.heads * d.head_dim
    flops = 4.0 * context * len(shape["ids"]) * h * h
    for kind in d.layer_types or ("full_attention",) * d.layers:
        flops += 6.0 * context * kv + 6.0 * queries * (attention + kv + 3 * h * d.intermediate)
        seen = recipe.max_length / 2
        if kind == "sliding_attention" and d.sliding_window and d.sliding_window < recipe.max_length:
            w, s = d.sliding_window, recipe.max_length
            seen = (w * w / 2 + (s - w) * w) / s
        flops += 12.0 * queries * d.heads * d.head_dim * (seen + d.block_size)
    slots = recipe.rows * recipe.anchors * (d.block_size - 1)
    return flops + 4.0 * slots * vocab * h


def whole_head(hidden: Tensor, lm_head: Tensor, labels: Tensor, chunk: int | None = None) -> HeadOutput:
    """`head.head_loss` as autograd does it: all logits at once, kept for backward."""
    logits = (hidden.to(lm_head.dtype) @ lm_head.T).float()
    with torch.no_grad():
        rank = (logits > logits.gather(1, labels.unsqueeze(1))).sum(dim=1, dtype=torch.int32)
    return HeadOutput(cross_entropy(logits, labels, reduction="none"), rank)


def fake_target(folder: Path, shape: dict[str, Any], device: torch.device) -> Callable[..., TargetWeights]:
    """A config.json, and what `load_target_weights` would return."""
    h, vocab = shape["hidden"], shape["vocab"]
    config = {"hidden_size": h, "vocab_size": vocab, "num_hidden_layers": shape["target_layers"],
              "max_position_embeddings": 32768, "rope_theta": 1e7, "rms_norm_eps": 1e-6}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    matrices = [torch.randn(vocab, h, device=device, dtype=torch.bfloat16) for _ in range(2)]
    weights = TargetWeights(*matrices, torch.zeros(h), 1e-6, True)
    return lambda path: weights


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(fit: fit_module.Fit, steps: int, flops: float, peak: float) -> dict[str, float]:
    """``steps`` steps in one run, after a few that compile. Its data thread's start counts, and so do its figures."""
    fit.run(until=fit.step + 3)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    sync()
    began = time.perf_counter()
    fit.run(until=fit.step + steps)
    sync()
    a_step = (time.perf_counter() - began) / steps
    recipe = fit.recipe
    out = {
        "ms_a_step": 1000 * a_step,
        "context_tokens_a_second": recipe.rows * recipe.max_length / a_step,
        "slots_a_second": recipe.rows * recipe.anchors * recipe.drafter.block_size / a_step,
        "tflops": flops / a_step / 1e12,
        "model_flop_use": flops / a_step / 1e12 / peak,
    }
    if torch.cuda.is_available():
        out["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        out |= busy(fit)
    return out


def busy(fit: fit_module.Fit, steps: int = 3) -> dict[str, float]:
    """Share of the time between the first and the last kernel in which one runs, and kernels a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        fit.run(until=fit.step + steps)
        sync()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    covered, end = 0.0, spans[0][0]
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {"gpu_busy": covered / (end - spans[0][0]), "kernels_a_step": len(spans) / steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="27b")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s, dense bf16 (default: H100 and H200)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    rows, length = args.rows or shape["rows"], args.length or shape["length"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"shape": args.shape, "rows": rows, "length": length, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        fit_module.load_target_weights = fake_target(Path(folder), shape, device)
        how = shape["recipe"] | {
            "rows": rows, "max_length": length, "epochs": 1, "log_every": 10, "save_every": 10**9,
            "tensorboard": False,
        }  # fmt: skip
        recipe = parse_recipe(how, "bench")
        source = RandomSource(shape, length, rows * (2 * args.steps + 50))
        fit = fit_module.Fit(folder, source, Path(folder) / "run", recipe, console=Console(quiet=True))
        fit._save = lambda: None  # type: ignore[method-assign]  # 20 GB that nobody reads
        report["parameters"] = sum(p.numel() for p in fit.drafter.parameters())
        flops = step_flops(shape, recipe)
        report["tflop_a_step"] = flops / 1e12
        report["chunked"] = measure(fit, args.steps, flops, args.peak)
        print(json.dumps(report, indent=1), flush=True)
        step_module.head_loss = whole_head
        try:
            report["whole"] = measure(fit, args.steps, flops, args.peak)
        except torch.OutOfMemoryError as e:
            report["whole"] = f"out of memory: {' '.join(str(e).split())[:120]}"
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
