import pytest
import torch
from trees import links, path_to, random_parents

from sglang_dflash.cpu.ops.causal_conv1d import causal_conv1d_fn_cpu, causal_conv1d_update_cpu

DIM = 6


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def conv(sequence, weight, bias, activation):
    """torch's own convolution of one whole sequence `[dim, n]` in float64; output i sees inputs i-K+1..i."""
    layer = torch.nn.Conv1d(DIM, DIM, weight.shape[1], groups=DIM, bias=bias is not None).double()
    layer.weight.data = weight.double().unsqueeze(1)
    if bias is not None:
        layer.bias.data = bias.double()
    y = layer(sequence.double().unsqueeze(0))[0].detach()
    return y * torch.sigmoid(y) if activation == "silu" else y


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(("with_bias", "activation"), [(True, "silu"), (False, None)])
def test_prefill(width, with_bias, activation):
    lengths, slots, resume = [1, 10, 2, 0, 3], [4, 0, -1, 2, 5], [True, False, True, True, True]
    x, weight = random(DIM, sum(lengths), seed=1), random(DIM, width, seed=2)
    bias = random(DIM, seed=3) if with_bias else None
    states = random(7, DIM, width - 1, seed=4)
    updated = states.clone()
    cu = torch.tensor([0, *lengths]).cumsum(0)

    out = causal_conv1d_fn_cpu(
        x,
        weight,
        bias,
        activation=activation,
        conv_states=updated,
        has_initial_state=torch.tensor(resume),
        cache_indices=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=cu,
        seq_lens_cpu=lengths,
    )

    for n, slot in enumerate(slots):
        if slot < 0 or not lengths[n]:
            continue
        past = states[slot] if resume[n] else torch.zeros(DIM, width - 1)
        sequence = torch.cat([past, x[:, cu[n] : cu[n + 1]]], 1)
        close(out[:, cu[n] : cu[n + 1]], conv(sequence, weight, bias, activation))
        close(updated[slot], sequence[:, 1 - width :])
    assert torch.equal(updated[[1, 2, 3, 6]], states[[1, 2, 3, 6]])


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_verify(width, tree):
    batch, nodes = 3, 8
    # The layout of the caller: a transposed view, whose strides the output must keep.
    x = random(batch, nodes, DIM, seed=5).transpose(1, 2)
    weight, bias, states = random(DIM, width, seed=6), random(DIM, seed=7), random(6, DIM, width - 1, seed=8)
    updated = states.clone()
    slots = torch.tensor([3, -1, 1], dtype=torch.int32)
    rows = torch.tensor([2, 1, 0, 3], dtype=torch.int32)
    windows = torch.full((4, nodes, DIM, width - 1), 9.0)
    parents = random_parents(batch, nodes, seed=9)
    child, sibling = links(parents)
    found = torch.full_like(parents, -5)

    out = causal_conv1d_update_cpu(
        x,
        updated,
        weight,
        bias,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=rows,
        retrieve_next_token=child if tree else None,
        retrieve_next_sibling=sibling if tree else None,
        retrieve_parent_token=found if tree else None,
    )

    assert out.stride() == x.stride()
    for n in (0, 2):
        for node in range(nodes):
            path = path_to(parents[n].tolist(), node) if tree else list(range(node + 1))
            sequence = torch.cat([states[slots[n]], x[n][:, path]], 1)
            close(out[n, :, node], conv(sequence, weight, bias, "silu")[:, -1])
            close(windows[rows[n], node], sequence[:, 1 - width :])
        close(updated[slots[n]], torch.cat([states[slots[n]], x[n]], 1)[:, 1 - width :])
        if tree:
            assert torch.equal(found[n], parents[n])
    assert torch.equal(updated[[0, 2, 4, 5]], states[[0, 2, 4, 5]])
    assert (windows[[1, 3]] == 9.0).all()
    assert (out[1] == 0).all()


def test_verify_into_overlapping_windows():
    """Without a tree SGLang keeps one shared `[dim, steps + K - 2]` strip; step t's window is a view into
    it."""
    batch, nodes, width = 2, 5, 4
    x = random(batch, DIM, nodes, seed=1)
    states, weight = random(3, DIM, width - 1, seed=2), random(DIM, width, seed=3)
    strip = torch.zeros(2, DIM, nodes + width - 2)
    s = strip.stride()
    windows = strip.as_strided((2, nodes, DIM, width - 1), (s[0], s[2], s[1], s[2]))
    causal_conv1d_update_cpu(
        x,
        states.clone(),
        weight,
        conv_state_indices=torch.tensor([2, 0]),
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([1, 0]),
    )
    for n, (slot, row) in enumerate(((2, 1), (0, 0))):
        assert torch.equal(strip[row], torch.cat([states[slot], x[n]], 1)[:, 1:])


def test_decode_is_a_chain_of_one():
    x, weight = random(3, DIM, seed=1), random(DIM, 4, seed=2)
    states = random(5, DIM, 3, seed=3)
    updated = states.clone()
    out = causal_conv1d_update_cpu(x, updated, weight, None, "silu", conv_state_indices=torch.tensor([4, -1, 2]))
    for n, slot in ((0, 4), (2, 2)):
        sequence = torch.cat([states[slot], x[n].unsqueeze(1)], 1)
        close(out[n], conv(sequence, weight, None, "silu")[:, 0])
        close(updated[slot], sequence[:, 1:])
    assert torch.equal(updated[[0, 1, 3]], states[[0, 1, 3]])


def test_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="'gelu'"):
        causal_conv1d_update_cpu(random(1, DIM), random(1, DIM, 3), random(DIM, 4), activation="gelu")
