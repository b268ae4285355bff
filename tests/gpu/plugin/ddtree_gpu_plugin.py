"""Runs inside the GPU test servers: calibrated drafts inside the captured graph, and checks of single steps.

A control file (``DDTREE_TEST_CONTROL``, JSON, read again whenever it changes) selects:
- ``truths``: full token sequences; requests that begin one of them get a draft whose true token sits at a random
  rank of its depth. The draft CUDA graph reads it from static buffers that the host fills before each replay.
- ``trace``: one JSON line a request and step. ``disturb``: for ``count`` steps, verify again with one leaf's token
  changed and write how far every other node's logits moved. ``break``: ``chainmask``.
- ``paths``: for ``count`` steps, verify a few nodes' root paths as chains and write how far the node's logits moved.
- ``sync``: forbid every synchronising CUDA call inside a decode step. ``profile``: profile ``count`` steps.
"""

import functools
import json
import os
import random
import sys
from pathlib import Path

import torch


def register():
    """Runs before sglang-dflash's own entry point: PYTHONPATH names this folder first."""
    from sglang_dflash import plugin

    create_worker = plugin.create_worker
    plugin.create_worker = lambda *args: instrument(create_worker(*args))
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The host has no cutlass DSL; without it SGLang's fused gate/up projection of dense MLPs cannot be imported.
    try:
        import cutlass  # noqa: F401
    except ImportError:
        HookRegistry.register("sglang.srt.layers.dual_gemm.DualGemm._select_mode", lambda *_: None, HookType.REPLACE)
    # sgl_kernel's norms, activations and rope are 16-bit only; for fp32 SGLang's own torch twins stand in.
    for name in ("layernorm.RMSNorm", "layernorm.GemmaRMSNorm", "activation.SiluAndMul",
                 "rotary_embedding.base.RotaryEmbedding"):  # fmt: skip
        HookRegistry.register(f"sglang.srt.layers.{name}.forward_cuda", native_in_fp32, HookType.AROUND)
    extend = "sglang.srt.layers.attention.linear.kernels.gdn_triton.chunk_gated_delta_rule"
    HookRegistry.register(extend, prefill_in_bf16, HookType.AROUND)


def native_in_fp32(original, self, *args, **kwargs):
    fp32 = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float32 for arg in args)
    return self.forward_native(*args, **kwargs) if fp32 else original(self, *args, **kwargs)


def prefill_in_bf16(original, *, q, k, v, beta, **kwargs):
    """The chunked prefill kernel takes 16 bits only. Decoding and verification, what is compared, stay fp32."""
    if q.dtype != torch.float32:
        return original(q=q, k=k, v=v, beta=beta, **kwargs)
    q, k, v, beta = (x.bfloat16() for x in (q, k, v, beta))
    out, *rest = original(q=q, k=k, v=v, beta=beta, **kwargs)
    return out.float(), *rest


def draft_like(rng, truth, anchor, depth, topk, vocab):
    """Candidates and log-probs ``[depth][topk]``: the true token at a rank drawn from a random marginal, absent 5%."""
    ids, log_probs = [], []
    for d in range(depth):
        probs = [rng.uniform(0.35, 0.98)]
        for _ in range(topk - 1):
            probs.append((1 - sum(probs)) * rng.uniform(0.4, 0.8))
        probs.sort(reverse=True)
        true = truth[anchor + 1 + d] if anchor + 1 + d < len(truth) else None
        tokens = rng.sample([t for t in range(vocab) if t != true], topk)
        if true is not None and rng.random() > 0.05:
            tokens[rng.choices(range(topk), probs)[0]] = true
        ids.append(tokens)
        log_probs.append(torch.tensor(probs).log().tolist())
    return ids, log_probs


def instrument(worker_class):
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # tests/: step_checks
    if worker_class.__name__ != "DDTreeWorker":
        return worker_class
    from step_checks import Control, disturb_leaf, repeatable, verify_paths

    from sglang_dflash.draft import TreeSampler

    control, rng = Control(os.environ["DDTREE_TEST_CONTROL"]), random.Random(0)
    seen = {"disturb": 0, "profiled": 0, "paths": 0}

    def around(owner, name):
        def decorate(function):
            setattr(owner, name, functools.partialmethod(function, getattr(owner, name)))
            return function

        return decorate

    @around(TreeSampler, "__init__")
    def __init__(self, original, config, *, max_bs, device, **kwargs):
        original(self, config, max_bs=max_bs, device=device, **kwargs)
        shape = (max(max_bs, 64), config.depth, config.topk)
        self.oracle_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.oracle_log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.oracle_use = torch.zeros(shape[0], dtype=torch.bool, device=device)

    @around(TreeSampler, "candidates")
    def candidates(self, original, hidden):
        ids, log_probs = original(self, hidden)
        bs = ids.shape[0]
        use = self.oracle_use[:bs].view(-1, 1, 1)
        return (
            torch.where(use, self.oracle_ids[:bs], ids),
            torch.where(use, self.oracle_log_probs[:bs], log_probs),
        )

    def fill_oracle(worker, step):
        sampler, prefix = worker._draft_sampler, step.prefix_lens.tolist()
        sampler.oracle_use.zero_()
        for i, req in enumerate(step.batch.reqs):
            prompt = list(req.origin_input_ids)
            truth = next((t for t in control["truths"] if t[: len(prompt)] == prompt), None)
            if truth is not None:
                ids, log_probs = draft_like(rng, truth, prefix[i], worker.tree.depth, worker.tree.topk, 256)
                sampler.oracle_ids[i] = torch.tensor(ids, device=sampler.oracle_ids.device)
                sampler.oracle_log_probs[i] = torch.tensor(log_probs, device=sampler.oracle_ids.device)
                sampler.oracle_use[i] = True

    @around(worker_class, "_draft")
    def _draft(self, original, step):
        if control["truths"]:
            fill_oracle(self, step)
        elif not control["sync"] and not control["profile"]:
            self._draft_sampler.oracle_use.zero_()
        return original(self, step)

    @around(worker_class, "_mask_and_positions")
    def _mask_and_positions(self, original, step, tree):
        mask, positions = original(self, step, tree)
        if control["break"] == "chainmask":
            width, start = self.tree.width, 0
            for prefix in step.prefix_lens.tolist():
                rows = mask[start : start + width * (prefix + width)].view(width, -1)
                rows[:, prefix:] = torch.ones(width, width, dtype=rows.dtype, device=rows.device).tril()
                start += width * (prefix + width)
        return mask, positions

    @around(worker_class, "_verify")
    def _verify(self, original, step, tree):
        verify = repeatable(self, step, functools.partial(original, self, step))
        for name, check in (("disturb", disturb_leaf), ("paths", verify_paths)):
            if control[name] and seen[name] < control[name]["count"]:
                seen[name] += 1
                line = {"batch": step.batch_size, "branching": int((tree.next_sibling >= 0).sum())}
                with open(control[name]["file"], "a") as file:
                    file.write(json.dumps(line | check(verify, tree, rng)) + "\n")
        return original(self, step, tree)

    @around(worker_class, "_accept")
    def _accept(self, original, step, tree, *args):
        accepted, tokens = original(self, step, tree, *args)
        if control["trace"]:
            width = tree.num_nodes + 1
            with open(control["trace"], "a") as file:
                for i in range(step.batch_size):
                    length = int(accepted.accept_lens[i])
                    path = [int(n) - i * width for n in accepted.accept_index[i, :length]]
                    line = {"path": path, "branching": int((tree.next_sibling[i] >= 0).sum()), "batch": step.batch_size}
                    file.write(json.dumps(line) + "\n")
        return accepted, tokens

    @around(worker_class, "forward_batch_generation")
    def forward_batch_generation(self, original, batch, *args, **kwargs):
        decode = batch.forward_mode.is_decode()
        if decode and control["sync"]:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(self, batch, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                with open(control["sync"], "a") as file:
                    file.write("step\n")
        if decode and control["profile"] and seen["profiled"] < control["profile"]["count"]:
            seen["profiled"] += 1
            return profiled(control["profile"]["file"], functools.partial(original, self, batch, *args, **kwargs))
        return original(self, batch, *args, **kwargs)

    return worker_class


def profiled(path, step):
    """Run one decode step under the profiler; append device time by kernel and every copy that left the device."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        result = step()
        torch.cuda.synchronize()
    kernels = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:90]
            count, total = kernels.get(name, (0, 0.0))
            kernels[name] = (count + 1, total + event.time_range.elapsed_us())
    line = {"dtoh": {k: v for k, v in kernels.items() if "DtoH" in k}, "kernels": kernels}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
    return result
