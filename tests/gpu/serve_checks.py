#!/usr/bin/env python3
"""Exactness of the tree server on a GPU: AR against tree, overlap on and off, radix hits, pages of 16, the mask.

All servers of one model run at once on the one card (tiny models). Prints one line a finding and exits 1 when a
difference is not explained by rounding. Run from the repository root with PYTHONPATH as ``setup.sh`` leaves it:
    python3 tests/gpu/serve_checks.py --out DIR [--kinds hybrid dense] [--dtypes float32 float16]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import models  # noqa: E402
from server import Server  # noqa: E402

BLOCK, NEW = 8, 96
LIMITS = ["--max-total-tokens", "32768", "--max-running-requests", "8", "--mem-fraction-static", "0.5"]
LIMITS += ["--cuda-graph-max-bs-decode", "8", "--context-length", "2048"]
HYBRID = [
    "--mamba-radix-cache-strategy",
    "extra_buffer",
    "--mamba-track-interval",
    "64",
    "--max-mamba-cache-size",
    "96",
]
rounding: dict[str, float] = {}  # by model and dtype: largest |decode - prefill| log-prob of AR itself, measured
failures: list[str] = []


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def say(ok: bool, text: str) -> None:
    print(("ok    " if ok else "FAIL  ") + text, flush=True)
    if not ok:
        failures.append(text)


def gap_at_difference(ar: Server, prompt: list[int], want: list[int], got: list[int]) -> tuple[int, float]:
    """Where two greedy texts part, and how far apart AR's logits of the two tokens are there."""
    at = next(i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b)
    answer = ar.generate(prompt + want[:at], 1, return_logprob=True, top_logprobs_num=20)
    top = {token: value for value, token, _ in answer["meta_info"]["output_top_logprobs"][0]}
    return at, abs(top.get(want[at], 0.0) - top.get(got[at], -99.0))


def measure_rounding(ar: Server, prompts: list, wants: list) -> float:
    """AR against itself: log-probs of the same tokens from decoding and from a prefill of the whole text."""
    worst = 0.0
    for prompt, want in zip(prompts, wants, strict=False):
        decoded = ar.generate(prompt, len(want), return_logprob=True)["meta_info"]["output_token_logprobs"]
        body = {"return_logprob": True, "logprob_start_len": len(prompt) - 1}
        prefilled = ar.generate(prompt + want, 1, **body)["meta_info"]["input_token_logprobs"][-len(want) :]
        if [t[1] for t in decoded] == want:
            worst = max(worst, max(abs(a[0] - b[0]) for a, b in zip(decoded, prefilled, strict=False)))
    return worst


def compare(label: str, ar: Server, key: str, prompts: list, wants: list, outputs: list, *, judge: bool = True) -> None:
    """Equal, or parted where AR's own two logits are closer than twice AR's own rounding."""
    equal, gaps = 0, []
    for prompt, want, output in zip(prompts, wants, outputs, strict=False):
        got = output["output_ids"]
        if got == want:
            equal += 1
        else:
            gaps.append(gap_at_difference(ar, prompt, want, got))
    worst = max((gap for _, gap in gaps), default=0.0)
    say(
        not judge or worst <= 2 * rounding[key],
        f"{label}: {equal} of {len(prompts)} texts of {NEW} tokens equal AR's; largest logit gap at a first difference "
        f"{worst:.4f}; (token, gap): {[(at, round(gap, 4)) for at, gap in gaps]}",
    )


def check_model(kind: str, dtype: str, work: Path) -> None:
    home = work / "models"
    target, drafter = home / kind, home / f"{kind}-drafter"
    if not target.exists():
        getattr(models, f"make_{kind}")(target)
        models.make_drafter(drafter, target, block_size=BLOCK)
    base = ["--model-path", str(target), "--dtype", dtype, *LIMITS, *(HYBRID if kind == "hybrid" else [])]
    tree = [*base, "--speculative-algorithm", "dflash", "--speculative-draft-model-path", str(drafter)]
    tree += ["--speculative-ddtree-budget", "24"]
    # In fp32 Triton's dot products must not round to TF32 either.
    name, env = f"{kind}-{dtype}", {"SGLANG_MAMBA_CONV_DTYPE": dtype, "TRITON_F32_DEFAULT": "ieee"}
    chain = tree[:-2]  # without the budget
    servers = {
        "ar": Server(f"{name}-ar", work, base, env=env),
        "stock chain": Server(f"{name}-chain", work, chain, plugin=False, env=env),
        "tree": Server(f"{name}-tree", work, tree, env=env),
        "no overlap": Server(f"{name}-no-overlap", work, [*tree, "--disable-overlap-schedule"], env=env),
        "page 16": Server(f"{name}-page16", work, [*tree, "--page-size", "16"], env=env),
    }
    if dtype != "float32":  # its batch-invariant matrix products are 16-bit only
        servers["deterministic"] = Server(
            f"{name}-deterministic", work, [*tree, "--enable-deterministic-inference"], env=env
        )
    try:
        for server in servers.values():
            server.wait()
        run_checks(kind, dtype, servers, work)
    finally:
        for server in servers.values():
            server.stop()


def run_checks(kind: str, dtype: str, servers: dict[str, Server], work: Path) -> None:
    ar, tree = servers["ar"], servers["tree"]
    common = random_ids(130, 999)
    prompts = [random_ids(n, 100 + n) for n in (1, 5, 17, 33, 64, 65, 97, 150, 201, 300)]
    prompts += [common + random_ids(9 + i, 1000 + i) for i in range(6)]
    wants = [o["output_ids"] for o in ar.generate_all([(p, NEW) for p in prompts], 1)]
    again = [o["output_ids"] for o in ar.generate_all([(p, NEW) for p in prompts], 8)]
    agree = sum(a == b for a, b in zip(wants, again, strict=True))
    print(f"      {kind} {dtype}: AR alone and 8 at once agree on {agree} of {len(wants)}")
    truths = [p + w for p, w in zip(prompts, wants, strict=False)]
    key = f"{kind} {dtype}"
    rounding[key] = measure_rounding(ar, prompts[:8], wants[:8])
    print(f"      {key}: AR's own rounding, decode against prefill, is up to {rounding[key]:.4f} in log-prob")
    chain = servers["stock chain"].generate_all([(p, NEW) for p in prompts], 1)
    compare(f"{key} stock chain (for comparison)", ar, key, prompts, wants, chain, judge=False)
    for label, server in servers.items():
        if label in ("ar", "stock chain"):
            continue
        trace = work / f"{server.name}.trace"
        server.control(truths=truths, trace=str(trace))
        jobs = [(p, NEW) for p in prompts]
        alone = server.generate_all(jobs, 1)
        compare(f"{kind} {dtype} {label}, one at a time", ar, key, prompts, wants, alone)
        compare(f"{kind} {dtype} {label}, 8 at once", ar, key, prompts, wants, server.generate_all(jobs, 8))
        steps = [json.loads(line) for line in trace.read_text().splitlines()]
        lengths = Counter(len(s["path"]) for s in steps)
        moved = sum(s["path"] != list(range(len(s["path"]))) for s in steps)
        say(
            set(lengths) == set(range(1, BLOCK + 1)) and moved > 0.03 * len(steps),
            f"{kind} {dtype} {label}: {len(steps)} verifies, accepted lengths {dict(sorted(lengths.items()))}, "
            f"{moved} paths needed compaction, largest batch {max(s['batch'] for s in steps)}",
        )
        server.control(trace=None)
        texts = zip(prompts[6:12], wants[6:12], strict=True)
        cuts = [(p + w[:cut], len(w) - cut) for p, w in texts for cut in (17, 40)]
        outputs = [server.generate(ids, n) for ids, n in cuts]
        cached = [o["meta_info"]["cached_tokens"] for o in outputs]
        rests = [w[cut:] for w in wants[6:12] for cut in (17, 40)]
        same = sum(o["output_ids"] == rest for o, rest in zip(outputs, rests, strict=True))
        say(
            min(cached) > 0,
            f"{kind} {dtype} {label}, continued inside committed text: {same} of {len(cuts)} equal, cached {cached}",
        )
        compare(f"{key} {label}, continued", ar, key, [ids for ids, _ in cuts],
                rests, outputs)  # fmt: skip
    overlapped = servers["tree"].generate_all([(p, NEW) for p in prompts], 1)
    compare(f"{key}: overlap off against overlap on", ar, key, prompts, [o["output_ids"] for o in overlapped],
            servers["no overlap"].generate_all([(p, NEW) for p in prompts], 1))  # fmt: skip
    check_mask(kind, dtype, tree, prompts, wants, truths, work)
    check_steps(kind, dtype, tree, prompts, work)


def check_limit(kind: str, dtype: str, work: Path) -> None:
    """One request up to the context limit, reached inside a block of 16 with 128 verify rows, graphs on."""
    home = work / "models"
    target, drafter = home / f"{kind}-limit", home / f"{kind}-limit-drafter"
    getattr(models, f"make_{kind}")(target)
    models.make_drafter(drafter, target, block_size=16)
    base = ["--model-path", str(target), "--dtype", dtype, "--context-length", "200", "--max-total-tokens", "4096"]
    base += ["--mem-fraction-static", "0.5", "--max-running-requests", "1", "--cuda-graph-max-bs-decode", "1"]
    tree = [*base, "--speculative-algorithm", "dflash", "--speculative-draft-model-path", str(drafter)]
    name, env = f"{kind}-{dtype}-limit", {"SGLANG_MAMBA_CONV_DTYPE": dtype, "TRITON_F32_DEFAULT": "ieee"}
    ar = Server(f"{name}-ar", work, base, env=env)
    wide = Server(f"{name}-tree", work, [*tree, "--speculative-ddtree-budget", "127"], env=env)
    try:
        ar.wait(), wide.wait()
        key, prompts = f"{kind} {dtype}", [random_ids(n, 100 + n) for n in (3, 40, 100, 150)]
        wants = [ar.generate(p, 198 - len(p))["output_ids"] for p in prompts]  # the longest that SGLang admits
        # SGLang admits no prompt as long as the texts that it writes: the rounding is that of their beginnings.
        rounding.setdefault(
            key, measure_rounding(ar, prompts, [w[: 180 - len(p)] for p, w in zip(prompts, wants, strict=True)])
        )
        wide.control(truths=[p + w for p, w in zip(prompts, wants, strict=True)])
        outputs = [wide.generate(p, 198 - len(p)) for p in prompts]
        lengths = [len(p) + len(o["output_ids"]) for p, o in zip(prompts, outputs, strict=True)]
        wanted = [len(p) + len(w) for p, w in zip(prompts, wants, strict=True)]
        say(lengths == wanted, f"{key}, context limit 200 inside a block, 128 rows: lengths {lengths}, AR's {wanted}")
        compare(f"{key} at the context limit, 128 rows", ar, key, prompts, wants, outputs)
    finally:
        ar.stop(), wide.stop()


def check_mask(kind, dtype, tree, prompts, wants, truths, work) -> None:
    """In graph mode a changed leaf moves no other node's logits, and a causal mask in the buffer changes the text."""
    file = work / f"{tree.name}.disturb"
    tree.control(truths=truths, disturb={"count": 40, "file": str(file)})
    tree.generate_all([(p, 32) for p in prompts[:8]], 4)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    tree.control(disturb=None)
    others, repeat = max(line["others"] for line in lines), max(line["repeat"] for line in lines)
    leaf = min(line["leaf"] for line in lines)
    say(
        others <= repeat and leaf > 0,
        f"{kind} {dtype}: a changed leaf moved other nodes' logits by {others} (same verify twice: {repeat}), its own "
        f"by at least {leaf:.3f}, over {len(lines)} graph verifies of branching trees",
    )
    file = work / f"{tree.name}.paths"
    tree.control(paths={"count": 24, "file": str(file)})
    tree.generate_all([(p, 24) for p in prompts[:8]], 4)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    tree.control(paths=None)
    same, other = max(line["same"] for line in lines), min(line["other"] for line in lines)
    say(
        same < 0.2 * other,
        f"{kind} {dtype}: a node's logits against its root path verified as a chain differ by at most {same:.4f} "
        f"(another node's: at least {other:.2f}; logits up to {max(line['scale'] for line in lines):.1f}), "
        f"{len(lines)} graph verifies of {lines[0]['batch']}+ requests, 3 nodes a request",
    )
    tree.client.post("/flush_cache")
    tree.control(**{"break": "chainmask"})
    broken = tree.generate_all([(p, NEW) for p in prompts[:6]], 1)
    tree.control(**{"break": None})
    tree.client.post("/flush_cache")
    same = sum(o["output_ids"] == w for o, w in zip(broken, wants, strict=False))
    say(same < 3, f"{kind} {dtype}: negative control, a causal mask in the buffer: {same} of 6 texts still equal")


def check_steps(kind, dtype, tree, prompts, work) -> None:
    """No synchronising call and no device-to-host copy inside a decode step; sampled requests run."""
    file = work / f"{tree.name}.sync"
    tree.control(truths=None)
    tree.generate(prompts[0], 4)
    for label, sampling in (("greedy", {}), ("sampled", {"temperature": 1.0, "top_p": 0.9, "top_k": 50})):
        tree.control(sync=str(file))
        tree.generate_all([(p, 24) for p in prompts[:6]], 3, sampling=sampling)
        tree.control(sync=None)
        steps = len(file.read_text().splitlines()) if file.exists() else 0
        say(steps > 20, f"{kind} {dtype}: {steps} {label} decode steps under set_sync_debug_mode('error')")
        file.unlink(missing_ok=True)
    profile = work / f"{tree.name}.profile"
    tree.control(profile={"count": 5, "file": str(profile)})
    tree.generate(prompts[3], 24)
    tree.control(profile=None)
    lines = [json.loads(line) for line in profile.read_text().splitlines()]
    copies = [line["dtoh"] for line in lines]
    say(not any(copies), f"{kind} {dtype}: device-to-host copies in {len(lines)} profiled decode steps: {copies}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=["hybrid", "dense"], choices=["hybrid", "dense", "llama"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--parts", nargs="+", default=["model", "limit"], choices=["model", "limit"])
    parser.add_argument("--port", type=int, default=31000, help="first port; give parallel runs different ones")
    args = parser.parse_args()
    Server.next_port = args.port
    for dtype in args.dtypes:
        for kind in args.kinds:
            for part in args.parts:
                try:
                    {"model": check_model, "limit": check_limit}[part](kind, dtype, args.out)
                except Exception as error:  # one model's failure must not hide the others'
                    say(False, f"{kind} {dtype} {part}: {type(error).__name__}: {error}")
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
