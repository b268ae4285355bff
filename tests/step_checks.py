"""Inside a test server, GPU or not: its settings, and one verify step run again with another tree to compare logits."""

import dataclasses
import json
import os

import torch


class Control:
    """The settings of a running test server: the values of a JSON file, read again whenever it changes."""

    def __init__(self, path):
        self.path, self.stamp, self.values = path, None, {}

    def __getitem__(self, key):
        stamp = os.stat(self.path).st_mtime_ns
        if stamp != self.stamp:
            with open(self.path) as file:
                self.values = json.load(file)
            self.stamp = stamp
        return self.values.get(key)


def repeatable(worker, step, verify_tree):
    """``tree -> logits [bs, width, V]`` fp32, callable again and again for one step.

    A verify leaves its last input in the conv state, which only the commit puts right: it is restored in between.
    """
    pool = worker.model_runner.req_to_token_pool
    hybrid = hasattr(pool, "get_speculative_mamba2_params_all_layers")
    conv = list(pool.get_speculative_mamba2_params_all_layers().conv) if hybrid else []
    kept = [state.clone() for state in conv]

    def verify(tree):
        _, out = verify_tree(tree)
        for state, copy in zip(conv, kept, strict=True):
            state.copy_(copy)
        return out.logits_output.next_token_logits.float().view(step.batch_size, tree.num_nodes + 1, -1).clone()

    return verify


def disturb_leaf(verify, tree, rng):
    """Change one leaf's token a request: how far the other nodes' logits move, and the leaf's own."""
    before, again = verify(tree), verify(tree)
    changed, leaves = tree.tokens.clone(), []
    for b in range(tree.batch_size):
        rows = [r for r in range(1, tree.num_nodes + 1) if int(tree.parents[b, r]) >= 0]
        leaves.append(rng.choice([r for r in rows if int(tree.next_token[b, r]) < 0]))
        changed[b, leaves[-1]] = (changed[b, leaves[-1]] + 7) % 256
    moved = (verify(dataclasses.replace(tree, tokens=changed)) - before).abs().amax(-1)
    others = tree.used.clone()
    for b, leaf in enumerate(leaves):
        others[b, leaf] = False
    own = [float(moved[b, leaf]) for b, leaf in enumerate(leaves)]
    return {
        "repeat": float((again - before).abs().max()),
        "others": float(moved[others].max()),
        "leaf": min(own),
    }


def verify_paths(verify, tree, rng):
    """Node t of each tree against its root path verified as a chain: largest logit difference, and what the same
    logits are away from those of another node (what a wrong mask, position or parent would show)."""
    logits = verify(tree)
    same, other = 0.0, float("inf")
    for _ in range(3):
        bs, width = tree.tokens.shape
        chain = {name: torch.full_like(tree.tokens, -1) for name in ("parents", "next_token", "next_sibling")}
        tokens, depths = torch.zeros_like(tree.tokens), torch.zeros_like(tree.depths)
        ancestors, ends = tree.ancestors.clone(), []
        node_bits = [[0, 0] for _ in range(width)]
        for row in range(1, width):
            node_bits[row][(row - 1) // 64] = 1 << ((row - 1) % 64)
        for b in range(bs):
            node = rng.choice([r for r in range(1, width) if int(tree.parents[b, r]) >= 0])
            path = [node]
            while path[0] != 0:
                path.insert(0, int(tree.parents[b, path[0]]))
            ends.append((node, len(path) - 1))
            bits = [0, 0]
            for row in range(width):
                if row < len(path):
                    tokens[b, row], depths[b, row] = tree.tokens[b, path[row]], row
                    chain["parents"][b, row] = row - 1
                    chain["next_token"][b, row] = row + 1 if row + 1 < len(path) else -1
                    bits = [x | y for x, y in zip(bits, node_bits[row], strict=True)]
                words = bits if row < len(path) else node_bits[row]
                words = [w - (1 << 64) if w >= 1 << 63 else w for w in words]
                ancestors[b, row] = torch.tensor(words, device=ancestors.device)
        as_chain = verify(dataclasses.replace(tree, tokens=tokens, depths=depths, ancestors=ancestors, **chain))
        for b, (node, row) in enumerate(ends):
            same = max(same, float((as_chain[b, row] - logits[b, node]).abs().max()))
            wrong = rng.choice([r for r in range(width) if r != node and int(tree.depths[b, r]) > 0])
            if wrong != node:
                other = min(other, float((as_chain[b, row] - logits[b, wrong]).abs().max()))
    return {"same": same, "other": other, "scale": float(logits.abs().max())}
