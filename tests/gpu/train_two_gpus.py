#!/usr/bin/env python3
"""The same fit on one GPU and, through torchrun and NCCL, on two: losses and gradient norms must be equal.

    python3 tests/gpu/train_two_gpus.py [--out FILE.json]

The same samples stand in a step's batch (rows 4 against 2 x 2), every position is an anchor, so only the order of sums
differs. In fp32 the whole curves are compared, in bf16 the losses within its rounding. Says so and fails where there
are not two GPUs; ``--cpu`` runs the same with gloo, to check this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import package  # noqa: F401
import torch
from safetensors.torch import save_file

from sglang_dflash.train.fit import CURVE, Fit
from sglang_dflash.train.recipe import parse_recipe
from sglang_dflash.train.shards import Sample, ShardWriter

HIDDEN, VOCAB, LAYERS, IDS, LENGTH = 128, 512, 8, [1, 3, 5], 128
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}


def write_inputs(folder: Path) -> None:
    """A target and texts that a drafter can learn: features tell the token and the stride of the count."""
    generator = torch.Generator().manual_seed(0)
    target = folder / "target"
    target.mkdir()
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "rope_theta": 1e4,
              "max_position_embeddings": 4096, "tie_word_embeddings": False}  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
            "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator) * 0.2,
            "model.norm.weight": torch.ones(HIDDEN),
        },
        target / "model.safetensors",
    )
    table = torch.randn(VOCAB, len(IDS) * HIDDEN, generator=generator)
    strides = torch.randn(4, len(IDS) * HIDDEN, generator=generator)
    with ShardWriter(folder / "data", {"layer_ids": IDS, "quantization": "random"}) as writer:
        for i in range(64):
            start, stride = (int(torch.randint(0, n, (1,), generator=generator)) for n in (VOCAB - 1, 4))
            tokens = (start + (1 + stride) * torch.arange(LENGTH)) % (VOCAB - 1)
            writer.add(Sample(f"s{i}", tokens.int(), torch.arange(LENGTH) >= 8, table[tokens] + strides[stride]))


def train(folder: Path, out: Path, rows: int, dtype: str) -> None:
    recipe = {
        "drafter": {
            "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256, "block_size": 8,
            "mask_token_id": VOCAB - 1,
        },
        "anchors": LENGTH, "max_length": LENGTH, "rows": rows, "epochs": 3, "lr": 3e-3, "dtype": dtype, "log_every": 1,
        "save_every": 10**6, "tensorboard": False,
    }  # fmt: skip
    Fit(folder / "target", [folder / "data"], out, parse_recipe(recipe, "two GPUs")).run()


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / CURVE).read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", nargs=4, metavar=("FOLDER", "OUT", "ROWS", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        folder, out, rows, dtype = args.train
        train(Path(folder), Path(out), int(rows), dtype)
        return 0
    if not args.cpu and torch.cuda.device_count() < 2:
        print(f"error: found {torch.cuda.device_count()} GPUs, want 2; run on a host with two.", file=sys.stderr)
        return 1
    report: dict[str, object] = {"torch": torch.__version__, "ranks": "gloo" if args.cpu else "nccl"}
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for dtype, tolerance in TOLERANCE.items():
            for ranks in (1, 2):
                line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
                how = ["--train", str(folder), str(folder / f"{dtype}-{ranks}"), str(4 // ranks), dtype]
                subprocess.run([*line, __file__, *how], check=True, env=environment)
            one, two = curve(folder / f"{dtype}-1"), curve(folder / f"{dtype}-2")
            assert len(one) == len(two) > 20
            worst = {
                key: max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(one, two, strict=True))
                for key in ("loss", "grad_norm")
            }
            fell = one[-1]["loss"] < 0.8 * one[0]["loss"]
            same = worst["loss"] < tolerance and (dtype != "float32" or worst["grad_norm"] < 10 * tolerance) and fell
            good &= same
            report[dtype] = {"steps": len(one), "first": one[0]["loss"], "last": one[-1]["loss"], "equal": same} | {
                f"largest relative difference of {key}": value for key, value in worst.items()
            }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
