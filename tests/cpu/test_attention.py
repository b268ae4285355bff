from types import SimpleNamespace

import pytest
import torch
from trees import ancestors_mask, path_to, random_parents

from sglang_dflash.cpu.stand_in import declare_torchvision_ops

declare_torchvision_ops()  # sglang pulls in torchvision

from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from sglang_dflash.cpu.attention import CpuAttentionBackend, spans_of, split_tree_mask  # noqa: E402

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 6
ROWS, SLOTS = 5, 120


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pool:
    """KV pool of one layer: `[slots, heads, dim]` buffers."""

    def __init__(self):
        self.keys, self.values = random(SLOTS, KV_HEADS, DIM, seed=1), random(SLOTS, KV_HEADS, V_DIM, seed=2)

    def get_key_buffer(self, _layer):
        return self.keys

    def get_value_buffer(self, _layer):
        return self.values

    def set_kv_buffer(self, _layer, where, k, v):
        self.keys[where.loc], self.values[where.loc] = k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, V_DIM)


def table():
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))
    return slots.view(ROWS, -1).to(torch.int32)


def layer(window=-1, cap=0.0, attn_type=AttentionType.DECODER):
    return SimpleNamespace(
        layer_id=0,
        is_cross_attention=False,
        sliding_window_size=window,
        logit_cap=cap,
        attn_type=attn_type,
        scaling=0.3,
        tp_q_head_num=HEADS,
        qk_head_dim=DIM,
        v_head_dim=V_DIM,
    )


def dense(q, keys, values, scale, cap):
    """One query of one request, float64: `q` `[HEADS, DIM]` over exactly the keys given."""
    outs = []
    for h in range(HEADS):
        kv = h // (HEADS // KV_HEADS)
        scores = keys[:, kv].double() @ q[h].double() * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        weights = torch.exp(scores - scores.max())
        outs.append(weights / weights.sum() @ values[:, kv].double())
    return torch.stack(outs)


def check(mode, lengths, new, layer, sees, **fields):
    """Run the backend on requests of `lengths` total keys, `new` of them queries of this forward, and
    compare.

    `sees(n, i)` lists the key positions (indices into the request's row) that query i of request n attends
    to.
    """
    rows = [3, 0, 4][: len(lengths)]
    pool, request_table = Pool(), table()
    runner = SimpleNamespace(
        device="cpu", token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=request_table)
    )
    backend = CpuAttentionBackend(runner)
    tokens = sum(new)
    q, k, v = random(tokens, HEADS * DIM, seed=4), random(tokens, KV_HEADS * DIM, seed=5), None
    v = random(tokens, KV_HEADS * V_DIM, seed=6)
    where = torch.cat([request_table[r, n - e : n] for r, n, e in zip(rows, lengths, new, strict=True)]).long()
    seq_lens = fields.pop("seq_lens", lengths)
    batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=len(lengths),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(seq_lens),
        extend_seq_lens=torch.tensor(new),
        out_cache_loc=where,
        **fields,
    )
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if mode.is_decode_or_idle() else backend.forward_extend
    out = forward(q, k, v, layer, batch).view(tokens, HEADS, V_DIM)

    assert torch.equal(pool.keys[where], k.view(-1, KV_HEADS, DIM))
    token = 0
    for n, row in enumerate(rows):
        for i in range(new[n]):
            slots = request_table[row, sees(n, i)].long()
            query = q[token].view(HEADS, DIM)
            expected = dense(query, pool.keys[slots], pool.values[slots], layer.scaling, layer.logit_cap)
            torch.testing.assert_close(out[token].double(), expected, atol=1e-5, rtol=1e-5)
            token += 1


# window: how far back, itself not counted; 0 sees only itself
WINDOWS = (-1, 0, 3, 100)


def last(position, window):
    return [p for p in range(position + 1) if window < 0 or position - p <= window]


@pytest.mark.parametrize("window", WINDOWS)
def test_extend(window):
    lengths, new = [9, 14, 5], [9, 4, 1]
    check(
        ForwardMode.EXTEND,
        lengths,
        new,
        layer(window),
        lambda n, i: last(lengths[n] - new[n] + i, window),
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_decode(window):
    lengths = [9, 1, 20]
    check(ForwardMode.DECODE, lengths, [1, 1, 1], layer(window), lambda n, i: last(lengths[n] - 1, window))


def test_logit_cap():
    check(ForwardMode.EXTEND, [9, 6], [5, 6], layer(cap=0.7), lambda n, i: last([4, 0][n] + i, -1))


PREFIXES, NODES = [7, 0, 12], 6


@pytest.mark.parametrize("window", WINDOWS)
def test_verify_chain(window):
    check(
        ForwardMode.TARGET_VERIFY,
        [p + NODES for p in PREFIXES],
        [NODES] * 3,
        layer(window),
        lambda n, i: last(PREFIXES[n] + i, window),
        seq_lens=PREFIXES,
        spec_info=SimpleNamespace(draft_token_num=NODES, custom_mask=None),
    )


@pytest.mark.parametrize("full", [False, True], ids=["QLEN_ONLY", "FULL_MASK"])
@pytest.mark.parametrize("window", WINDOWS)
def test_verify_tree(full, window):
    parents = random_parents(3, NODES, seed=7)
    paths = [[path_to(row, node) for node in range(NODES)] for row in parents.tolist()]
    mask = ancestors_mask(parents)
    if full:
        blocks = [
            torch.cat([torch.ones(NODES, p, dtype=torch.bool), m], 1) for p, m in zip(PREFIXES, mask, strict=True)
        ]
        flat = torch.cat([b.flatten() for b in blocks] + [torch.ones(5, dtype=torch.bool)])  # padded at the end
    else:
        flat = mask.flatten()

    def sees(n, node):
        # What this path would see as a plain chain: positions, not rows, are in the window.
        keys = [*range(PREFIXES[n]), *(PREFIXES[n] + p for p in paths[n][node])]
        return keys if window < 0 else keys[-window - 1 :]

    depths = torch.tensor([[len(path) - 1 for path in request] for request in paths])
    check(
        ForwardMode.TARGET_VERIFY,
        [p + NODES for p in PREFIXES],
        [NODES] * 3,
        layer(window),
        sees,
        seq_lens=PREFIXES,
        positions=(depths + torch.tensor(PREFIXES).unsqueeze(1)).flatten(),
        spec_info=SimpleNamespace(draft_token_num=NODES, custom_mask=flat),
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_encoder_only_draft_block(window):
    def sees(n, i):
        position = PREFIXES[n] + i
        return [p for p in range(PREFIXES[n] + NODES) if window < 0 or abs(position - p) <= window]

    check(
        ForwardMode.TARGET_VERIFY,
        [p + NODES for p in PREFIXES],
        [NODES] * 3,
        layer(window, attn_type=AttentionType.ENCODER_ONLY),
        sees,
        seq_lens=PREFIXES,
        spec_info=SimpleNamespace(draft_token_num=NODES, custom_mask=None),
    )


def test_mask_of_another_batch_is_refused():
    with pytest.raises(ValueError, match=r"17 entries found, wanted 18 .* or 45"):
        split_tree_mask(torch.ones(17, dtype=torch.bool), [4, 5], 3)


def test_empty_mask_means_chain():
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([4]),
        spec_info=SimpleNamespace(draft_token_num=3, custom_mask=torch.zeros(0, dtype=torch.bool)),
    )
    (span,) = spans_of(batch)
    assert span.tree is None
    assert span.query_positions.tolist() == [4, 5, 6]
