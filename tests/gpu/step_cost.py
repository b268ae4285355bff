#!/usr/bin/env python3
"""Step time of stock's chain-16 and of a tree with 16 verify rows, Qwen3.6-27B shape with dummy weights.

``interleaved``: both servers alive on one card, rounds alternating, one request. ``sequential``: one server after the
other, 1, 4 and 8 requests (two do not fit together). The drafter is random, so tau is about 1 and a step commits about
one token; what is compared is milliseconds a step = wall time / verifies. Medians, and a sign test over the pairs.
    python3 tests/gpu/step_cost.py --out DIR [--phases interleaved sequential] [--budget 15]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from server import Server

LAYERS = 64
TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16", "vocab_size": 248320,
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": LAYERS, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "max_position_embeddings": 262144, "partial_rotary_factor": 0.25, "tie_word_embeddings": False, "eos_token_id": 0,
    "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(LAYERS)],
    "pad_token_id": 0, "use_cache": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 248320,
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "rope_theta": 1e7, "max_position_embeddings": 262144, "num_target_layers": LAYERS, "block_size": 16,
    "layer_types": ["full_attention"] * 5, "tie_word_embeddings": False, "eos_token_id": 0,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61], "block_size": 16},
}  # fmt: skip
NEW, PROMPT = 64, 64


def options(models: Path, arm: str, requests: int, fraction: float, budget: int) -> list[str]:
    line = ["--model-path", str(models / "target"), "--load-format", "dummy", "--dtype", "bfloat16"]
    line += ["--grammar-backend", "none", "--disable-radix-cache", "--context-length", "4096"]
    line += ["--max-running-requests", str(requests), "--cuda-graph-max-bs-decode", str(requests)]
    line += ["--mem-fraction-static", str(fraction), "--max-total-tokens", "8192"]
    if arm != "ar":
        line += ["--speculative-algorithm", "dflash", "--speculative-draft-model-path", str(models / "drafter")]
        line += ["--speculative-draft-load-format", "dummy"]
    if arm == "tree":
        line += ["--speculative-ddtree-budget", str(budget)]
    return line


SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}


def round_ms(server: Server, requests: int, sampling: dict | None = None) -> float:
    """Milliseconds a step of one round: ``requests`` fixed requests of NEW tokens, all at once, greedy if not told."""
    ids = [[(7 * i + 13 * j) % 250 for i in range(PROMPT)] for j in range(requests)]
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": NEW, "ignore_eos": True} | (sampling or {"temperature": 0}),
    }
    begin = time.perf_counter()
    answer = server.client.post("/generate", json=body)
    seconds = time.perf_counter() - begin
    assert answer.status_code == 200, answer.text
    steps = max(a["meta_info"].get("spec_verify_ct") or NEW for a in answer.json())
    return seconds / steps * 1e3


def sign_test(a: list[float], b: list[float]) -> float:
    """Two-sided p of ``a`` and ``b`` being the same, from the signs of the paired differences."""
    signs = [x > y for x, y in zip(a, b, strict=False) if x != y]
    n, k = len(signs), min(sum(signs), len(signs) - sum(signs))
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def interleaved(args, models: Path) -> None:
    servers = {
        "chain": Server("inter-chain", args.out, options(models, "chain", 1, 0.47, args.budget), plugin=False),
    }
    # The second one's share is counted after the first has taken its memory.
    servers["chain"].wait()
    servers["tree"] = Server("inter-tree", args.out, options(models, "tree", 1, 0.97, args.budget))
    try:
        servers["tree"].wait()
        times: dict[str, list[float]] = {"chain": [], "tree": []}
        for server in servers.values():
            round_ms(server, 1)
            round_ms(server, 1)
        for i in range(args.rounds):
            for arm in ("chain", "tree") if i % 2 == 0 else ("tree", "chain"):
                times[arm].append(round_ms(servers[arm], 1))
        chain, tree = (statistics.median(times[arm]) for arm in ("chain", "tree"))
        rounds = {arm: [round(x, 2) for x in values] for arm, values in times.items()}
        print(
            f"interleaved, 1 request, {args.rounds} rounds: stock chain-16 {chain:.2f} ms, "
            f"tree ({args.budget + 1} rows) {tree:.2f} ms a step, ratio {tree / chain:.3f}, "
            f"sign test p {sign_test(times['chain'], times['tree']):.3g}; rounds {json.dumps(rounds)}",
            flush=True,
        )
        for server in servers.values():
            round_ms(server, 1, SAMPLED)
        sampled = {arm: [round_ms(servers[arm], 1, SAMPLED) for _ in range(6)] for arm in ("chain", "tree")}
        chain, tree = (statistics.median(sampled[arm]) for arm in ("chain", "tree"))
        print(f"sampled {SAMPLED}, 6 rounds: stock chain-16 {chain:.2f} ms, tree {tree:.2f} ms, {tree / chain:.3f}")
        profile = args.out / "tree.profile"
        servers["tree"].control(profile={"count": 3, "file": str(profile)})
        round_ms(servers["tree"], 1)
        last = json.loads(profile.read_text().splitlines()[-1])
        print(f"device-to-host copies inside the profiled steps: {last['dtoh'] or 'none'}")
        total = sum(us for _, us in last["kernels"].values())
        print(f"kernels of one tree step over 100 us (device total {total / 1e3:.2f} ms):")
        for name, (count, us) in sorted(last["kernels"].items(), key=lambda item: -item[1][1])[:18]:
            if us > 100 or "tree" in name or "mask" in name or "accept" in name:
                print(f"  {us:9.0f} us  x{count:<4d} {name}")
        for name, (count, us) in last["kernels"].items():
            if any(part in name for part in ("build_tree", "verify_mask_kernel", "accept_walk", "compact_kv")):
                print(f"  {us:9.1f} us  x{count:<4d} {name}")
    finally:
        for server in servers.values():
            server.stop()


def sequential(args, models: Path) -> None:
    table: dict[tuple[str, int], float] = {}
    for arm in args.arms:
        server = Server(f"seq-{arm}", args.out, options(models, arm, 8, 0.85, args.budget), plugin=arm == "tree")
        try:
            server.wait()
            for requests in (1, 4, 8):
                round_ms(server, requests)
                times = [round_ms(server, requests) for _ in range(args.rounds)]
                table[arm, requests] = statistics.median(times)
                print(f"sequential, {arm}, {requests} at once: {table[arm, requests]:.2f} ms a step "
                      f"(median of {args.rounds}, {min(times):.2f}..{max(times):.2f})", flush=True)  # fmt: skip
        finally:
            server.stop()
    if {"chain", "tree"} <= set(args.arms):
        for requests in (1, 4, 8):
            print(f"tree / stock chain-16 at {requests}: {table['tree', requests] / table['chain', requests]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phases", nargs="+", default=["interleaved", "sequential"])
    parser.add_argument("--arms", nargs="+", default=["tree", "chain"])
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    models = args.out / "dummy-models"
    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        (models / name).mkdir(parents=True, exist_ok=True)
        (models / name / "config.json").write_text(json.dumps(config))
    failed = False
    for phase in args.phases:
        try:
            {"interleaved": interleaved, "sequential": sequential}[phase](args, models)
        except Exception as error:  # a phase that does not fit must not cost the other one's figures
            failed = True
            print(f"{phase}: {type(error).__name__}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
