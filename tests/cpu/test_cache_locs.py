import torch

from sglang_dflash.cpu.ops import cache_locs

ROWS = torch.tensor([2, 0, 3])
START, END = torch.tensor([1, 4, 5]), torch.tensor([4, 4, 7])  # 3 slots, none, 2


def test_table_writes_and_reads_are_inverse():
    table = torch.full((4, 8), -1, dtype=torch.int32)
    slots = torch.tensor([11, 12, 13, 14, 15])
    cache_locs.assign_req_to_token_pool_cpu(ROWS, table, START, END, slots, 8)
    expected = torch.full((4, 8), -1, dtype=torch.int32)
    expected[2, 1:4] = torch.tensor([11, 12, 13], dtype=torch.int32)
    expected[3, 5:7] = torch.tensor([14, 15], dtype=torch.int32)
    assert torch.equal(table, expected)

    packed = torch.zeros(6, dtype=torch.int64)  # one longer than needed: the rest is left alone
    cache_locs.assign_extend_cache_locs_cpu(ROWS, table, START, END, packed, 8)
    assert packed.tolist() == [11, 12, 13, 14, 15, 0]


def test_accepted_slots_are_packed_in_order():
    accept_index = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    packed = torch.full((6,), -1, dtype=torch.int64)
    cache_locs.fill_accept_out_cache_loc_cpu(accept_index, torch.tensor([40, 41, 42, 43, 44, 45]), packed)
    assert packed.tolist() == [40, 42, 43, -1, -1, -1]


def test_kv_rows_move_in_every_buffer_at_once():
    buffers = [torch.randn(9, 2, 4), torch.randn(9, 6), torch.randn(9, 4).bfloat16()]
    before = [b.clone() for b in buffers]
    addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].nbytes for b in buffers])
    # 2 -> 1 while 3 -> 2: reads must precede writes. Pairs with a negative slot are dropped.
    target, source = torch.tensor([1, 2, -1, 5, 8]), torch.tensor([2, 3, 7, -1, 6])
    cache_locs.copy_all_layer_kv_cache_cpu(addresses, strides, target, source)
    for after, old in zip(buffers, before, strict=True):
        expected = old.clone()
        expected[1], expected[2], expected[8] = old[2], old[3], old[6]
        assert torch.equal(after, expected)


def test_moving_nothing_touches_nothing():
    none = torch.zeros(0, dtype=torch.int64)
    cache_locs.copy_all_layer_kv_cache_cpu(torch.tensor([8]), torch.tensor([4]), none, none)
