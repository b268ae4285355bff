#!/usr/bin/env python3
"""Capture against plain prefill: the same server, the same texts, rounds alternating.

    python3 tests/gpu/capture_bench.py --out DIR                                   # Qwen3.6-27B shape, dummy weights
    python3 tests/gpu/capture_bench.py --out DIR --target T --drafter D            # a pair
    python3 tests/gpu/capture_bench.py --out DIR --rounds 6 --texts 32 --length 2048

A round prefills all texts, a request each, eight at a time, one new token. A captured round ends when the last file is
there (in memory, /dev/shm), read for its size and removed after the clock has stopped. Wanted: 0.80 at least.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from server import Server
from step_cost import DRAFTER, TARGET

from sglang_dflash import capture

AT_ONCE = 8


def flags(target: Path, drafter: Path, dummy: bool, length: int) -> list[str]:
    line = ["--model-path", str(target), "--dtype", "bfloat16", "--grammar-backend", "none", "--disable-radix-cache"]
    line += ["--context-length", str(max(4096, length + 64)), "--max-running-requests", str(AT_ONCE)]
    line += ["--cuda-graph-max-bs-decode", "1", "--mem-fraction-static", "0.85"]
    line += ["--max-total-tokens", str(2 * AT_ONCE * (length + 64))]
    line += ["--speculative-algorithm", "dflash", "--speculative-draft-model-path", str(drafter)]
    return line + (["--load-format", "dummy", "--speculative-draft-load-format", "dummy"] if dummy else [])


def round_seconds(server: Server, texts: list[list[int]], folder: Path | None, number: int) -> float:
    """All texts once; with ``folder``, captured there."""
    rids = [f"{capture.PREFIX}{number}-{i}" if folder else f"plain-{number}-{i}" for i in range(len(texts))]

    def one(job: tuple[str, list[int]]) -> None:
        server.generate(job[1], 1, rid=job[0])
        if folder:
            file = folder / f"{capture.file_stem(job[0])}.safetensors"
            while not file.exists():
                if file.with_suffix(".error").exists():
                    raise RuntimeError(file.with_suffix(".error").read_text())
                time.sleep(0.0005)

    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, zip(rids, texts, strict=True)))
    seconds = time.perf_counter() - began
    for file in folder.iterdir() if folder else ():
        file.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    dummy = args.target is None
    target, drafter = args.target, args.drafter
    if dummy:
        target, drafter = args.out / "dummy-models" / "target", args.out / "dummy-models" / "drafter"
        for folder, config in ((target, TARGET), (drafter, DRAFTER)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
    rng = random.Random(0)
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    texts = [[rng.randrange(vocab * 9 // 10) for _ in range(args.length)] for _ in range(args.texts)]
    spool = Path(tempfile.mkdtemp(prefix="sglang-dflash-bench-", dir="/dev/shm"))
    server = Server("capture", args.out, flags(target, drafter, dummy, args.length), env={capture.FOLDER: str(spool)})
    try:
        server.wait()
        for warm in (None, spool):
            round_seconds(server, texts, warm, 0)
        times: dict[str, list[float]] = {"plain": [], "captured": []}
        for i in range(1, args.rounds + 1):
            for arm in ("plain", "captured") if i % 2 else ("captured", "plain"):
                times[arm].append(round_seconds(server, texts, spool if arm == "captured" else None, i))
        tokens = args.texts * args.length
        rate = {arm: tokens / statistics.median(seconds) for arm, seconds in times.items()}
        rounds = {arm: [round(s, 3) for s in seconds] for arm, seconds in times.items()}
        print(
            f"capture, {'27B shape, dummy weights' if dummy else target.name}, {args.texts} texts of {args.length} "
            f"tokens, {AT_ONCE} at once, {args.rounds} rounds: plain {rate['plain']:.0f} tokens/s, captured "
            f"{rate['captured']:.0f}, ratio {rate['captured'] / rate['plain']:.3f} (wanted: at least 0.80); "
            f"seconds {json.dumps(rounds)}",
            flush=True,
        )
    finally:
        server.stop()
        shutil.rmtree(spool, ignore_errors=True)


if __name__ == "__main__":
    main()
