"""Acceptance: one target token at every node, then a walk. Lossless for any tree fixed before sampling.

The token at a node is drawn from the target's fully processed distribution given that node's path,
exactly as plain decoding would draw it; the walk follows the child that carries it. Draft
probabilities play no part, so the committed text has the target's distribution whatever was drafted,
and noise keyed by (seed, position) makes seeded text that of plain decoding. Greedy is the case of a
point mass.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import sampling_from_probs_torch, top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch import Tensor

# Vocabulary cells sampled at once: 256 MiB of fp32, and a few times that in sorted copies. Bounds the memory of a large
# batch of nodes, which nothing reserves; 16 rows of a 248k vocabulary are one piece.
_SAMPLED_CELLS = 1 << 26


def process_logits(logits: Tensor, sampling_info: Any, width: int, grammar_mask: Any) -> None:
    """Apply in place what the request adds to ``logits [bs * width, V]``: logit bias, then the grammar.

    The grammar mask has a row a node: it was built along each node's own path.
    """
    sanitize_nan_logits(logits, "DDTree verify: next_token_logits")
    if sampling_info is not None:
        apply_dflash_verify_logits_adjustments(
            next_token_logits=logits, sampling_info=sampling_info, draft_token_num=width
        )
    if grammar_mask is not None:
        grammar_mask.apply(logits)


def sample_target_tokens(logits: Tensor, sampling_info: Any, width: int, positions: Tensor) -> Tensor:
    """The target's token at every node, ``[bs * width]`` int64, from ``logits [bs * width, V]``.

    ``positions [bs * width]`` are those of the nodes' own tokens, the key of seeded noise in plain decoding
    (``Sampler.forward`` gets a decode step's positions). Mirrors ``Sampler.forward`` with the pytorch sampling
    backend: temperature, then joint top-k / top-p, then min-p.
    """
    if sampling_info is None or sampling_info.is_all_greedy:
        return logits.argmax(-1)

    def per_node(values: Tensor) -> Tensor:
        return values.repeat_interleave(width, 0)

    seed = None if sampling_info.sampling_seed is None else per_node(sampling_info.sampling_seed)
    temperatures = per_node(sampling_info.temperatures)
    top_ks, top_ps, min_ps = map(per_node, (sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps))
    filtered = (
        sampling_info.need_top_p_sampling or sampling_info.need_top_k_sampling or sampling_info.need_min_p_sampling
    )
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    piece = max(1, _SAMPLED_CELLS // logits.shape[-1])
    for start in range(0, len(logits), piece):
        rows = slice(start, start + piece)
        probs = torch.softmax(logits[rows].float() / temperatures[rows], dim=-1)
        row_seed = None if seed is None else seed[rows]
        if not filtered:
            drawn = sampling_from_probs_torch(probs, sampling_seed=row_seed, positions=positions[rows])
        else:
            drawn = top_k_top_p_min_p_sampling_from_probs_torch(
                probs,
                top_ks[rows],
                top_ps[rows],
                min_ps[rows],
                sampling_info.need_min_p_sampling,
                row_seed,
                positions[rows],
                max_top_k=sampling_info.max_top_k,
            )
        tokens[rows] = drawn.view(-1)
    return tokens
