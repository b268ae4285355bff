"""The tree walk keeps the target's distribution: many draws from a small target that depends on the whole path."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from statistics_checks import excess, filtered

from sglang_dflash.cpu.stand_in import declare_torchvision_ops
from sglang_dflash.kernels.accept_walk import AcceptedPaths, accept_walk
from sglang_dflash.tree import build_draft_tree

declare_torchvision_ops()  # before the import of SGLang

from sglang_dflash.accept import sample_target_tokens  # noqa: E402

VOCAB, LENGTH, DEPTH, TOPK, NODES = 5, 4, 3, 3, 9
BLOCK = DEPTH + 1
DRAFT_TASTE = torch.linspace(-1.5, 1.5, VOCAB)
DRAWS = 20_000


class Target:
    """Logits for every path of fewer than ``LENGTH + BLOCK`` tokens; a path is numbered in base VOCAB."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.tables = [torch.randn(VOCAB**d, VOCAB, generator=generator) * 1.2 for d in range(LENGTH + BLOCK)]

    def logits(self, lengths, codes):
        out = torch.empty(*lengths.shape, VOCAB)
        for length in lengths.unique().tolist():
            here = lengths == length
            out[here] = self.tables[length][codes[here]]
        return out

    def joint(self, **sampling):
        """path -> probability, over all paths of LENGTH tokens."""
        probabilities = {(): 1.0}
        for length in range(LENGTH):
            rows = [filtered(row, **sampling).tolist() for row in self.tables[length]]
            probabilities = {
                (*path, token): mass * rows[number(path)][token]
                for path, mass in probabilities.items()
                for token in range(VOCAB)
            }
        assert len(probabilities) == VOCAB**LENGTH
        return probabilities


def number(path):
    code = 0
    for token in path:
        code = code * VOCAB + token
    return code


def sampling_info(bs, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return SimpleNamespace(
        is_all_greedy=False,
        sampling_seed=None,
        temperatures=torch.full((bs, 1), temperature),
        top_ks=torch.full((bs,), top_k or 1 << 30, dtype=torch.int32),
        top_ps=torch.full((bs,), top_p),
        min_ps=torch.full((bs,), min_p),
        need_top_k_sampling=top_k > 0,
        need_top_p_sampling=top_p < 1,
        need_min_p_sampling=min_p > 0,
        max_top_k=top_k or None,
    )


def target_walk(tree, logits, info, prefix_lens, out):
    """The product's acceptance."""
    bs, width = tree.tokens.shape
    positions = tree.positions(prefix_lens).view(-1)
    tokens = sample_target_tokens(logits.view(bs * width, VOCAB), info, width, positions)
    accept_walk(tree, tokens.view(bs, width), prefix_lens, out)


def draft_walk(tree, logits, info, prefix_lens, out):
    """A mistake: nodes with children choose one of them, whatever the target says."""
    bs, width = tree.tokens.shape
    positions = tree.positions(prefix_lens).view(-1)
    tokens = sample_target_tokens(logits.view(bs * width, VOCAB), info, width, positions).view(bs, width)
    child = tree.next_token
    chosen = torch.where(child >= 0, tree.tokens.gather(1, child.clamp(min=0)), tokens)
    accept_walk(tree, chosen, prefix_lens, out)


def second_chance_walk(tree, logits, info, prefix_lens, out):
    """A subtle mistake: a node whose draw misses every child draws once more, which favours drafted tokens."""
    bs, width = tree.tokens.shape
    flat = logits.view(bs * width, VOCAB)
    positions = tree.positions(prefix_lens).view(-1)
    first, second = (sample_target_tokens(flat, info, width, positions).view(bs, width) for _ in range(2))
    rows = torch.arange(width)
    is_child = tree.parents.unsqueeze(1) == rows.view(1, -1, 1)  # [bs, parent, child]
    hit = (is_child & (tree.tokens.unsqueeze(1) == first.unsqueeze(2))).any(-1)
    has_child = is_child.any(-1)
    accept_walk(tree, torch.where(has_child & ~hit, second, first), prefix_lens, out)


def draw(target, walk, seed, **sampling):
    """``DRAWS`` texts of LENGTH tokens by tree steps, and how often a step committed 1..BLOCK tokens."""
    torch.manual_seed(seed)
    lengths = torch.zeros(DRAWS, dtype=torch.int64)
    text = torch.zeros(DRAWS, LENGTH + BLOCK, dtype=torch.int64)
    accepted_lengths = Counter()
    out = AcceptedPaths.allocate(DRAWS, BLOCK, "cpu")
    while (live := (lengths < LENGTH).nonzero().view(-1)).numel():
        bs = len(live)
        # Another draft every step and request, and one with tastes of its own: a symmetric one hides some biases.
        scores = (torch.randn(bs, DEPTH, VOCAB) + DRAFT_TASTE).log_softmax(-1).topk(TOPK)
        roots = text[live, lengths[live] - 1]
        tree = build_draft_tree(scores.indices, scores.values, NODES, roots)
        codes = torch.zeros_like(tree.tokens)
        base = torch.zeros(bs, dtype=torch.int64)
        for i in range(LENGTH):
            base = torch.where(i < lengths[live], base * VOCAB + text[live, i], base)
        codes[:, 0] = base
        for row in range(1, NODES + 1):
            parent = tree.parents[:, row].clamp(min=0)
            codes[:, row] = codes.gather(1, parent.unsqueeze(1)).squeeze(1) * VOCAB + tree.tokens[:, row]
        depths = lengths[live].unsqueeze(1) + tree.depths
        logits = target.logits(depths, codes)
        paths = out.view(bs)
        walk(tree, logits, sampling_info(bs, **sampling), lengths[live], paths)
        accepted_lengths.update(paths.accept_lens.tolist())
        for i in range(BLOCK):
            fits = i < paths.accept_lens
            text[live[fits], lengths[live[fits]] + i] = paths.out_tokens[fits, i]
        lengths[live] = paths.new_seq_lens
    return Counter(map(tuple, text[:, :LENGTH].tolist())), accepted_lengths


SAMPLINGS = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.25},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_texts_follow_the_target(sampling):
    target = Target(seed=3)
    counts, accepted = draw(target, target_walk, seed=11, **sampling)
    assert sum(counts.values()) == DRAWS
    assert set(accepted) == set(range(1, BLOCK + 1))  # the walk was taken at every length
    assert excess(counts, target.joint(**sampling)) < 6


@pytest.mark.parametrize("walk", [draft_walk, second_chance_walk], ids=lambda walk: walk.__name__)
def test_a_biased_walk_is_seen(walk):
    target = Target(seed=3)
    counts, _ = draw(target, walk, seed=11)
    assert excess(counts, target.joint()) > 50


def test_impossible_paths_have_no_mass():
    joint = Target(seed=3).joint(top_k=2)
    assert sum(mass > 0 for mass in joint.values()) == 2**LENGTH
    assert len(list(product(range(VOCAB), repeat=LENGTH))) == len(joint)
