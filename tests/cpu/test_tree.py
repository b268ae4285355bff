from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import ancestors_mask, links, path_to, random_parents

from sglang_dflash.cpu.ops.tree import reconstruct_indices_from_tree_mask, verify_tree_greedy_cpu


def brute_force(parents, tokens, wanted, limit):
    """The longest root path of which every node carries what the target wants after its parent."""
    best = [0]
    for node in range(len(parents)):
        path = path_to(parents, node)
        steps = pairwise(path)
        if all(tokens[b] == wanted[a] for a, b in steps) and len(best) < len(path) <= limit:
            best = path
    return best


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 12), limit=st.integers(1, 8))
def test_greedy_walk(seed, nodes, limit):
    batch = 3
    g = torch.Generator().manual_seed(seed)
    parents = random_parents(batch, nodes, seed)
    child, sibling = links(parents)
    # Few distinct tokens, so that walks go deep; siblings are made distinct, as a tree builder does.
    tokens = torch.randint(0, 3, (batch, nodes), generator=g)
    for b in range(batch):
        for node in range(nodes):
            children = [c for c in range(1, nodes) if parents[b, c] == node]
            tokens[b, children] = (torch.arange(len(children)) + seed) % max(3, len(children))
    wanted = torch.randint(0, 3, (batch, nodes), generator=g)
    rows = torch.arange(batch * nodes).view(batch, nodes)
    predicts = torch.full((batch * nodes,), -7, dtype=torch.int32)
    accept_index = torch.full((batch, limit), -1, dtype=torch.int32)
    accepted = torch.zeros(batch, dtype=torch.int32)

    verify_tree_greedy_cpu(predicts, accept_index, accepted, tokens, rows, child, sibling, wanted)

    expected = torch.full_like(predicts, -7)
    for b in range(batch):
        path = brute_force(parents[b].tolist(), tokens[b].tolist(), wanted[b].tolist(), limit)
        on_path = [b * nodes + node for node in path]
        assert accept_index[b].tolist() == on_path + [-1] * (limit - len(path))
        assert accepted[b] == len(path) - 1
        for node, row in zip(path, on_path, strict=True):
            expected[row] = wanted[b, node]
    assert torch.equal(predicts, expected)


def test_links_from_a_mask():
    batch, nodes = 4, 10
    parents = random_parents(batch, nodes, seed=1)
    child, sibling = links(parents)
    prefix = torch.tensor([0, 3, 17, 5])
    positions, index, found_child, found_sibling = (torch.zeros(batch, nodes, dtype=torch.int64) for _ in range(4))
    reconstruct_indices_from_tree_mask(
        ancestors_mask(parents).flatten(),
        prefix,
        positions.view(-1),
        index,
        found_child,
        found_sibling,
        batch,
        nodes,
    )
    depths = [[len(path_to(row, node)) - 1 for node in range(nodes)] for row in parents.tolist()]
    assert torch.equal(positions, torch.tensor(depths) + prefix.unsqueeze(1))
    assert index.flatten().tolist() == list(range(batch * nodes))
    assert torch.equal(found_child, child.long())
    assert torch.equal(found_sibling, sibling.long())
