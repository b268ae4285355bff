"""Runs inside the test server: partly right drafts, deliberate mistakes, and a trace of every step.

A control file (``DDTREE_TEST_CONTROL``, JSON, read again whenever it changes) selects:
- ``truths``: full token sequences (prompt + greedy continuation). Requests that begin one of them get a
  calibrated draft: the true token sits at a random rank of its depth and is absent ``miss`` of the time.
- ``break``: one deliberate mistake (see ``BREAKS``); the tests must notice each.
- ``trace``: a file that receives one JSON line a request and step.
- ``logits``: a folder that receives one file a request and step: the tree and the logits of every node.
- ``steps``: a file that receives, for every step, what ``step_checks`` finds on running it again.
- ``full_mask``: verify with FULL_MASK instead of the platform's mask mode.
"""

import dataclasses
import functools
import json
import os
import random
import sys
from pathlib import Path

import torch

BREAKS = ("nocompact", "chainpos", "chainmask", "chaincommit", "hidden", "draftpos")


class Oracle:
    """A calibrated random marginal a depth, the true token at a rank drawn from it.

    Depends on the prompt's length and the position alone: the same trees in every run and batch.
    """

    def propose(self, control, step, ids, log_probs):
        ids, log_probs = ids.clone(), log_probs.clone()
        _, depth, topk = ids.shape
        for i, req in enumerate(step.batch.reqs[: ids.shape[0]]):
            prompt = list(req.origin_input_ids)
            truth = next((t for t in control["truths"] or () if t[: len(prompt)] == prompt), None)
            if truth is None:
                continue
            anchor = int(step.prefix_lens[i])  # index of the anchor in the sequence
            rng = random.Random(anchor * 4099 + len(prompt))
            for d in range(depth):
                probs = [rng.uniform(0.35, 0.98)]
                for _ in range(topk - 1):
                    probs.append((1 - sum(probs)) * rng.uniform(0.4, 0.8))
                probs.sort(reverse=True)
                true = truth[anchor + 1 + d] if anchor + 1 + d < len(truth) else None
                tokens = rng.sample([t for t in range(256) if t != true], topk)
                if true is not None and rng.random() > (control["miss"] or 0.05):
                    tokens[rng.choices(range(topk), probs)[0]] = true
                ids[i, d] = torch.tensor(tokens)
                log_probs[i, d] = torch.tensor(probs).log()
        return ids, log_probs


def register():
    """Runs before sglang-dflash's own entry point: PYTHONPATH comes before site-packages."""
    from sglang_dflash import plugin

    create_worker = plugin.create_worker
    plugin.create_worker = lambda *args: instrument(create_worker(*args))


def instrument(worker_class):
    """Patch the tree worker, in the scheduler process only."""
    if worker_class.__name__ != "DDTreeWorker":
        return worker_class
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # tests/: step_checks
    from sglang.srt.speculative.eagle_utils import TreeMaskMode
    from step_checks import Control, disturb_leaf, repeatable, verify_paths

    from sglang_dflash import worker
    from sglang_dflash.draft import TreeSampler

    control, oracle, now = Control(os.environ["DDTREE_TEST_CONTROL"]), Oracle(), {}
    rng = random.Random(0)

    def around(owner, name):
        def decorate(function):
            original = getattr(owner, name)
            setattr(owner, name, functools.partialmethod(function, original))
            return function

        return decorate

    @around(worker_class, "_draft")
    def _draft(self, original, step):
        now["step"] = step
        now["tree"] = original(self, step)
        return now["tree"]

    @around(TreeSampler, "candidates")
    def candidates(self, original, hidden):
        ids, log_probs = original(self, hidden)
        now["raw"] = (ids, log_probs)
        return oracle.propose(control, now["step"], ids, log_probs)

    @around(worker_class, "_mask_and_positions")
    def _mask_and_positions(self, original, step, tree):
        self.mask_mode = TreeMaskMode.FULL_MASK if control["full_mask"] else TreeMaskMode.QLEN_ONLY
        mask, positions = original(self, step, tree)
        if control["break"] == "chainpos":
            positions = step.window.clone()
        if control["break"] == "chainmask":
            width = self.tree.width
            mask = torch.ones(width, width, dtype=torch.bool).tril().repeat(step.batch_size, 1, 1).view(-1)
        return mask, positions

    @around(worker_class, "_verify")
    def _verify(self, original, step, tree):
        if control["steps"]:
            verify = repeatable(self, step, functools.partial(original, self, step))
            line = disturb_leaf(verify, tree, rng) | verify_paths(verify, tree, rng)
            with open(control["steps"], "a") as file:
                file.write(json.dumps(line) + "\n")
        return original(self, step, tree)

    @around(worker_class, "_accept")
    def _accept(self, original, step, tree, verify_input, output, *args):
        output_logits = output.logits_output.next_token_logits.clone()  # accepting changes them in place
        accepted, tokens = original(self, step, tree, verify_input, output, *args)
        if control["trace"]:
            trace(step, tree, accepted)
        if control["logits"]:
            save_logits(step, tree, output_logits)
        return accepted, tokens

    @around(worker_class, "_append_draft_kv")
    def _append_draft_kv(self, original, step, hidden, accepted):
        if control["break"] == "draftpos":
            step = dataclasses.replace(step, window=step.prefix_lens.unsqueeze(1) + now["tree"].depths)
        original(self, step, hidden, accepted)

    def patch(name, function):
        original = getattr(worker, name)
        setattr(worker, name, functools.partial(function, original))

    def compact_target_kv(original, *args):
        if control["break"] != "nocompact":
            original(*args)

    def compact_hidden(original, hidden, accepted):
        if control["break"] == "hidden":
            bs, block = accepted.accept_index.shape
            return hidden.view(bs, -1, hidden.shape[-1])[:, :block].reshape(-1, hidden.shape[-1])
        return original(hidden, accepted)

    def commit_recurrent_state(original, target_worker, batch, accepted, width):
        if control["break"] == "chaincommit":
            bs, block = accepted.accept_index.shape
            chain = torch.arange(bs).unsqueeze(1) * width + torch.arange(block)
            accepted = dataclasses.replace(accepted, accept_index=chain.to(torch.int32))
        original(target_worker, batch, accepted, width)

    patch("compact_target_kv", compact_target_kv)
    patch("compact_hidden", compact_hidden)
    patch("commit_recurrent_state", commit_recurrent_state)

    def save_logits(step, tree, logits):
        logits = logits.view(step.batch_size, tree.num_nodes + 1, -1)
        for i, req in enumerate(step.batch.reqs):
            record = {
                "prompt": list(req.origin_input_ids),
                "prefix": int(step.prefix_lens[i]),
                "tokens": tree.tokens[i].tolist(),
                "parents": tree.parents[i].tolist(),
                "logits": logits[i].clone(),
            }
            now["saved"] = now.get("saved", 0) + 1
            torch.save(record, os.path.join(control["logits"], f"{now['saved']}.pt"))

    def trace(step, tree, accepted):
        ids, log_probs = now["raw"]
        width = tree.num_nodes + 1
        with open(control["trace"], "a") as file:
            for i, req in enumerate(step.batch.reqs):
                length = int(accepted.accept_lens[i])
                path = [int(n) - i * width for n in accepted.accept_index[i, :length]]
                line = {
                    "rid": req.rid,
                    "prompt": len(req.origin_input_ids),
                    "prefix": int(step.prefix_lens[i]),
                    "batch": step.batch_size,
                    "path": path,
                    "parents": tree.parents[i].tolist(),
                    "raw_ids": ids[i, :, 0].tolist(),
                    "raw_log_probs": log_probs[i].reshape(-1).tolist(),
                }
                file.write(json.dumps(line) + "\n")

    return worker_class
