import torch

from sglang_dflash.cpu.ops import mamba_state


def test_scatter_of_accepted_snapshots():
    layers, slots, rows, steps = 2, 6, 4, 3
    dst, src = torch.randn(layers, slots, 5, 2), torch.randn(layers, rows, steps, 5, 2)
    before = dst.clone()
    target, step = torch.tensor([4, -1, 2, 0]), torch.tensor([2, 1, -1, 0])
    mamba_state.scatter_with_mask(dst, src, target, step)
    expected = before.clone()
    expected[:, 4], expected[:, 0] = src[:, 0, 2], src[:, 3, 0]
    assert torch.equal(dst, expected)

    dst = before.clone()
    mamba_state.scatter_with_mask(dst, src, target, step, torch.tensor([1, 0, 0, -1]))
    expected = before.clone()
    expected[:, 4] = src[:, 1, 2]
    assert torch.equal(dst, expected)


def test_tracking_copies_masked_requests_only():
    conv, ssm = torch.randn(2, 6, 3), torch.randn(2, 6, 4, 4)
    old_conv, old_ssm = conv.clone(), ssm.clone()
    source, target = torch.tensor([1, 2, -1, 3, 1]), torch.tensor([5, 4, 0, -1, 0])
    mask = torch.tensor([True, False, True, True, True])
    mamba_state.track_all_layers(conv, ssm, source, mask, target, 4)  # the fifth is padding
    old_conv[:, 5], old_ssm[:, 5] = old_conv[:, 1], old_ssm[:, 1]
    assert torch.equal(conv, old_conv)
    assert torch.equal(ssm, old_ssm)

    mamba_state.track_one_layer(conv[0], ssm[0], source, mask, torch.tensor([2, 4, 0, -1, 0]), 4)
    old_conv[0, 2], old_ssm[0, 2] = old_conv[0, 1], old_ssm[0, 1]
    assert torch.equal(conv, old_conv)
    assert torch.equal(ssm, old_ssm)
