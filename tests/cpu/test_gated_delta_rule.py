import pytest
import torch
from naive_gdn import gates, random_inputs, run
from trees import path_to, random_parents

from sglang_dflash.cpu.ops.gated_delta_rule import (
    chunk_gated_delta_rule_cpu,
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
)


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-5, rtol=2e-5)


def pool(slots=6):
    return torch.randn(slots, 4, 16, 32, generator=torch.Generator().manual_seed(3))


def test_gating():
    x = random_inputs(5, seed=0)
    g, beta = fused_gdn_gating_cpu(x.A_log, x.a, x.b, x.dt_bias)
    close(g[0], gates(x)[0])
    close(beta[0], gates(x)[1])


# Below, at, and across the 64-token chunk; a padded sequence (slot -1) and an empty one between live ones.
@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [130, 7, 0, 64], [5]])
def test_prefill_equals_the_recurrence(lengths):
    total = sum(lengths)
    x = random_inputs(total, seed=total)
    states = pool()
    slots = torch.tensor([4, -1, 0, 2][: len(lengths)], dtype=torch.int32)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    g, beta = (t.float().unsqueeze(0) for t in gates(x))
    updated = states.clone()

    out, same_pool, starts = chunk_gated_delta_rule_cpu(x.q, x.k, x.v, g, beta, updated, cu, False, True, slots)

    assert same_pool is updated
    expected_starts = []
    for n, slot in enumerate(slots.tolist()):
        tokens = list(range(cu[n], cu[n + 1]))
        begin = states[slot] if slot >= 0 else torch.zeros_like(states[0])
        if not tokens:
            continue
        naive_states, naive_out = run(begin, x, tokens)
        close(out[0, cu[n] : cu[n + 1]], naive_out)
        expected_starts += naive_states[:-1][::64]
        if slot >= 0:
            close(updated[slot], naive_states[-1])
    close(starts[0], torch.stack(expected_starts))
    untouched = [s for s in range(6) if s not in slots.tolist()]
    assert torch.equal(updated[untouched], states[untouched])


def test_prefill_survives_strong_decay():
    """Log decays whose differences overflow exp() if taken the wrong way round."""
    x = random_inputs(64, seed=1)
    g = torch.full((1, 64, 4), -30.0)
    beta = torch.full((1, 64, 4), 0.5)
    out, _, _ = chunk_gated_delta_rule_cpu(
        x.q, x.k, x.v, g, beta, pool(), torch.tensor([0, 64]), False, True, torch.tensor([1])
    )
    assert out.isfinite().all()


def test_prefill_resumes_where_it_stopped():
    x = random_inputs(100, seed=5)
    g, beta = (t.float().unsqueeze(0) for t in gates(x))
    whole, halves = pool(), pool()
    slot = torch.tensor([3])

    def prefill(states, a, b):
        args = (y[:, a:b] for y in (x.q, x.k, x.v, g, beta))
        return chunk_gated_delta_rule_cpu(*args, states, torch.tensor([0, b - a]), False, True, slot)[0]

    once = prefill(whole, 0, 100)
    twice = torch.cat([prefill(halves, 0, 37), prefill(halves, 37, 100)], 1)
    close(twice, once)
    close(halves, whole)


def test_decode_updates_the_pool_and_skips_padding():
    x = random_inputs(3, seed=2)
    states = pool()
    updated = states.clone()
    slots = torch.tensor([5, -1, 1], dtype=torch.int32)
    out = fused_sigmoid_gating_delta_rule_update_cpu(
        *x, initial_state_source=updated, initial_state_indices=slots, cu_seqlens=torch.arange(4)
    )
    for t, slot in ((0, 5), (2, 1)):
        naive_states, naive_out = run(states[slot], x, [t])
        close(out[0, t], naive_out[0])
        close(updated[slot], naive_states[-1])
    assert torch.equal(updated[[0, 2, 3, 4]], states[[0, 2, 3, 4]])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_verify_snapshots_every_node(tree):
    batch, nodes = 3, 9
    x = random_inputs(batch * nodes, seed=4)
    states = pool()
    updated = states.clone()
    slots = torch.tensor([2, 0, 5], dtype=torch.int32)
    # SGLang passes the pool's whole row range; only the first `batch` entries count. Row -1 keeps no
    # snapshot.
    rows = torch.tensor([1, -1, 0, 2, 3], dtype=torch.int32)
    parents = random_parents(batch, nodes, seed=8)
    snapshots = torch.full((4, nodes, 4, 16, 32), 7.0)

    out = fused_sigmoid_gating_delta_rule_update_cpu(
        *x,
        initial_state_source=updated,
        initial_state_indices=slots,
        cu_seqlens=torch.arange(batch + 1) * nodes,
        disable_state_update=True,
        intermediate_states_buffer=snapshots,
        intermediate_state_indices=rows,
        cache_steps=nodes,
        retrieve_parent_token=parents if tree else None,
    )

    assert torch.equal(updated, states)
    for n in range(batch):
        row, slot = int(rows[n]), int(slots[n])
        for node in range(nodes):
            as_tree = tree and row >= 0
            path = path_to(parents[n].tolist(), node) if as_tree else list(range(node + 1))
            naive_states, naive_out = run(states[slot], x, [n * nodes + p for p in path])
            close(out[0, n * nodes + node], naive_out[-1])
            if row >= 0:
                close(snapshots[row, node], naive_states[-1])
    assert (snapshots[2:] == 7.0).all()


def test_refuses_what_it_does_not_compute():
    x = random_inputs(1, seed=0)
    with pytest.raises(ValueError, match="is_kda"):
        fused_sigmoid_gating_delta_rule_update_cpu(*x, pool(), torch.tensor([0]), torch.tensor([0, 1]), is_kda=True)
    with pytest.raises(ValueError, match="head_first"):
        chunk_gated_delta_rule_cpu(x.q, x.k, x.v, x.a, x.b, pool(), torch.tensor([0, 1]), True, True, torch.tensor([0]))
