"""Attention on the CPU, by definition: gather each request's keys, mask, softmax in fp32.

It replaces SGLang's `torch_native` backend under the same name (two upstream sites list backends by name) and
adds what DFLASH and trees need: TARGET_VERIFY as a chain or under a tree mask, ENCODER_ONLY draft blocks,
logit caps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


@dataclass(frozen=True)
class Span:
    """One request in one forward; filled by :func:`spans_of` once and read by every layer."""

    row: int
    """Row of the request table."""
    prefix: int
    """Keys that were cached before this forward."""
    new: int
    """Query tokens of this forward; their keys follow the prefix."""
    tree: torch.Tensor | None = None
    """bool `[new, prefix + new]`, True = visible; None = causal (or all, in encoder-only layers)."""
    depth: torch.Tensor | None = None
    """int `[new]`, position minus prefix of each node of a tree; None = 0..new-1."""

    @property
    def total(self) -> int:
        return self.prefix + self.new

    @property
    def query_positions(self) -> torch.Tensor:
        """int `[new]`."""
        return self.prefix + (torch.arange(self.new) if self.depth is None else self.depth)


def split_tree_mask(mask: torch.Tensor, prefixes: list[int], nodes: int) -> list[torch.Tensor]:
    """Per-request visibility `[nodes, prefix + nodes]` from a flat mask in either of SGLang's layouts.

    FULL_MASK concatenates `[nodes, prefix + nodes]` blocks, QLEN_ONLY `[nodes, nodes]` blocks with the prefix
    implied visible (`TreeMaskMode`, `kernels/ops/speculative/spec_tree.py`). They are told apart by size;
    they only agree in size when every prefix is empty, where they are the same.

    Raises ValueError if the mask is of neither size.
    """
    flat = mask.reshape(-1).bool()
    full = sum(nodes * (prefix + nodes) for prefix in prefixes)
    compact = len(prefixes) * nodes * nodes
    if flat.numel() == compact:
        blocks = flat.view(len(prefixes), nodes, nodes)
        seen = [torch.ones(nodes, prefix, dtype=torch.bool) for prefix in prefixes]
        return [torch.cat(pair, 1) for pair in zip(seen, blocks, strict=True)]
    if flat.numel() >= full:  # SGLang may pad the end
        sizes = [nodes * (prefix + nodes) for prefix in prefixes]
        return [block.view(nodes, -1) for block in flat[:full].split(sizes)]
    raise ValueError(
        f"tree mask: {flat.numel()} entries found, wanted {compact} (QLEN_ONLY) or {full} (FULL_MASK) for "
        f"{len(prefixes)} requests of {nodes} nodes; build it from the same batch"
    )


def spans_of(batch: Any) -> list[Span]:
    """The requests of a `ForwardBatch` (DECODE, IDLE, EXTEND, MIXED or TARGET_VERIFY)."""
    rows, lengths = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
    if batch.forward_mode.is_decode_or_idle():
        return [Span(row, length - 1, 1) for row, length in zip(rows, lengths, strict=True)]
    if not batch.forward_mode.is_target_verify():
        new = batch.extend_seq_lens.tolist()
        return [Span(row, length - n, n) for row, length, n in zip(rows, lengths, new, strict=True)]

    # seq_lens is the prefix in both kinds of verify input. seq_lens_cpu is not: a chain's (DFLASH) already
    # counts the block, a tree's (EAGLE) does not.
    nodes = batch.spec_info.draft_token_num
    mask = getattr(batch.spec_info, "custom_mask", None)
    if mask is None or mask.numel() == 0:
        return [Span(row, length, nodes) for row, length in zip(rows, lengths, strict=True)]
    masks = split_tree_mask(mask, lengths, nodes)
    depths = batch.positions.view(-1, nodes)[: len(rows)] - batch.seq_lens.view(-1, 1)
    return [Span(row, length, nodes, *tree) for row, length, *tree in zip(rows, lengths, masks, depths, strict=True)]


def visible(span: Span, window: int | None, causal: bool) -> torch.Tensor:
    """bool `[new, total]`: which keys each query of a request sees.

    `window` is SGLang's `sliding_window_size`: how far back a query sees, itself not counted, so `q - k <=
    window` and `window + 1` keys (transformers' `sliding_window` less one, `dflash_utils.py`); None or
    negative = no window. Without `causal` it also bounds the future, `k - q <= window`, as
    `extend_attention.py` does.

    Under a tree mask distances are taken between positions (prefix + depth). SGLang's Triton kernel takes
    them between rows, which drops up to `new` of the oldest keys that the same path would see as a chain.
    """
    query, key = span.query_positions.unsqueeze(1), torch.arange(span.total)
    if span.depth is not None:
        key[span.prefix :] = span.query_positions
    if span.tree is not None:
        seen = span.tree
    elif causal:
        seen = key <= query
    else:
        seen = torch.ones(span.new, span.total, dtype=torch.bool)
    if window is not None and window >= 0:
        seen = seen & (query - key <= window)
        if not causal:
            seen = seen & (key - query <= window)
    return seen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Masked softmax attention in fp32; query head h reads key head `h // (H / Hk)`.

    `q` `[Tq, H, D]`, `k` `[Tk, Hk, D]`, `v` `[Tk, Hk, Dv]`, `seen` bool `[Tq, Tk]`, each row with at least
    one True. A `logit_cap` > 0 bends scores to `cap * tanh(score / cap)`. Returns `[Tq, H, Dv]` in q's dtype.
    """
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v.float()).flatten(1, 2).to(q.dtype)


class CpuAttentionBackend(TorchNativeAttnBackend):
    """The backend SGLang builds for `--attention-backend torch_native` in CPU mode."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._spans = spans_of(forward_batch)

    def _forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool) -> torch.Tensor:
        if layer.is_cross_attention:
            raise NotImplementedError(
                f"attention layer {layer.layer_id}: cross attention found, wanted self attention in CPU mode"
            )
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        windowed = layer.sliding_window_size is not None and layer.sliding_window_size >= 0
        causal = layer.attn_type != AttentionType.ENCODER_ONLY

        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        start = 0
        for span in self._spans:
            if span.new == 0:
                continue
            end = start + span.new
            slots = table[span.row, : span.total].long()
            if windowed and self.use_sliding_window_kv_pool:
                slots = pool.translate_loc_from_full_to_swa(slots)
            seen = visible(span, layer.sliding_window_size, causal)
            out[start:end] = attend(
                queries[start:end], keys[slots], values[slots], seen, layer.scaling, layer.logit_cap or 0.0
            )
            start = end
        return out.flatten(1)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)
