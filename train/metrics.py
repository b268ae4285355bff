"""Teacher-forced figures of a drafter: what it would have committed had the target written the data's text.

tau counts tokens committed a verify, pooled: 1 + accepted / blocks. A chain accepts the leading run of slots whose
argmax is the text's token; a tree accepts as deep as the text's path is in it. The top-8 streak is the leading run of
slots whose token is among the 8 best: a ceiling for every width-8 tree, not a tau.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_dflash.tree import build_draft_tree

TOP = 8


def leading_run(hits: Tensor) -> Tensor:
    """Length of the run of True at the start of the last axis: ``[..., T] bool -> [...]`` int64."""
    return hits.long().cumprod(dim=-1).sum(dim=-1)


def tree_depth_accepted(token_ids: Tensor, log_probs: Tensor, labels: Tensor, valid: Tensor, budget: int) -> Tensor:
    """How deep the text's path is in each block's DDTree of ``budget`` nodes.

    ``token_ids, log_probs [n, depth, K]`` (fp32), ``labels, valid [n, depth]`` -> ``[n]`` int64. The tree is the served
    one (`sglang_dflash.tree.build_draft_tree`), the walk is greedy verification.
    """
    tree = build_draft_tree(token_ids.contiguous(), log_probs.contiguous(), budget)
    at = torch.zeros(labels.shape[0], 1, dtype=tree.parents.dtype, device=labels.device)
    alive = torch.ones(labels.shape[0], dtype=torch.bool, device=labels.device)
    accepted = torch.zeros(labels.shape[0], dtype=torch.int64, device=labels.device)
    for depth in range(labels.shape[1]):
        child = (tree.parents == at) & (tree.tokens == labels[:, depth : depth + 1])
        child[:, 0] = False  # the root's parent is -1, and so is that of unused rows
        alive = alive & child.any(dim=1) & valid[:, depth]
        accepted += alive
        at = torch.where(alive.unsqueeze(1), child.int().argmax(dim=1, keepdim=True).to(at.dtype), -2)
    return accepted


@dataclass
class Tally:
    """Sums over blocks, on the device until read. ``slots`` is B - 1."""

    slots: int
    blocks: Tensor | float = 0.0
    accepted: Tensor | float = 0.0
    streak: Tensor | float = 0.0
    counted: Tensor | float = 0.0  # [slots]
    correct: Tensor | float = 0.0  # [slots]
    cross_entropy: Tensor | float = 0.0  # [slots]
    tree_accepted: dict[int, Tensor | float] = field(default_factory=dict)
    tree_blocks: Tensor | float = 0.0

    def add(self, cross_entropy: Tensor, rank: Tensor, valid: Tensor) -> None:
        """All ``[b, N, B-1]``: the slots behind the anchor."""
        live = valid.any(dim=-1)
        hit = (rank == 0) & valid
        self.blocks = self.blocks + live.sum()
        self.accepted = self.accepted + leading_run(hit).sum()
        self.streak = self.streak + leading_run((rank < TOP) & valid).sum()
        self.counted = self.counted + valid.sum(dim=(0, 1))
        self.correct = self.correct + hit.sum(dim=(0, 1))
        self.cross_entropy = self.cross_entropy + (cross_entropy.detach() * valid).sum(dim=(0, 1))

    def add_trees(
        self, token_ids: Tensor, log_probs: Tensor, labels: Tensor, valid: Tensor, budgets: tuple[int, ...]
    ) -> None:
        """``[n, B-1, K]`` candidates and ``[n, B-1]`` labels of some blocks."""
        self.tree_blocks = self.tree_blocks + valid.any(dim=-1).sum()
        for budget in budgets:
            got = tree_depth_accepted(token_ids, log_probs, labels, valid, budget)
            self.tree_accepted[budget] = self.tree_accepted.get(budget, 0.0) + got.sum()

    def reduced(self) -> Tally:
        """The sum over all ranks. Collective."""

        def total(value: Tensor | float) -> Tensor | float:
            if not isinstance(value, Tensor):
                return value
            out = value.double()
            dist.all_reduce(out)
            return out

        return Tally(
            self.slots,
            blocks=total(self.blocks),
            accepted=total(self.accepted),
            streak=total(self.streak),
            counted=total(self.counted),
            correct=total(self.correct),
            cross_entropy=total(self.cross_entropy),
            tree_accepted={budget: total(value) for budget, value in self.tree_accepted.items()},
            tree_blocks=total(self.tree_blocks),
        )

    def read(self) -> dict[str, float]:
        """The figures; waits for the device. Keys are stable: they are TensorBoard's."""
        blocks = max(float(self.blocks), 1.0)
        counted = torch.as_tensor(self.counted).double().cpu().reshape(-1).expand(self.slots).clamp(min=1)
        correct = torch.as_tensor(self.correct).double().cpu().reshape(-1).expand(self.slots) / counted
        losses = torch.as_tensor(self.cross_entropy).double().cpu().reshape(-1).expand(self.slots)
        out = {
            "tau/chain": 1 + float(self.accepted) / blocks,
            "streak/top8": float(self.streak) / blocks,
            "accuracy/all": float((correct * counted).sum() / counted.sum()),
            "cross_entropy": float(losses.sum() / counted.sum()),
        }
        out |= {f"accuracy/slot_{i + 1:02d}": float(x) for i, x in enumerate(correct)}
        tree_blocks = max(float(self.tree_blocks), 1.0)
        out |= {f"tau/ddtree8_{n}": 1 + float(x) / tree_blocks for n, x in self.tree_accepted.items()}
        return out
