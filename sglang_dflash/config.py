"""The shape of one speculative step, read from SGLang's published configuration."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOPK = 16  # candidates a depth the tree kernel holds
MAX_BUDGET = 128  # nodes without the root: the ancestor mask is 128 bits a node
MAX_BLOCK_SIZE = 32  # depth 31, the tree kernel's limit
DEFAULT_TOPK = 8


class SettingError(ValueError):
    """A server setting that must not be served. One line: name, value found, value wanted, remedy."""


class ContractError(RuntimeError):
    """This SGLang is not the one the plugin was written against, or did not take every hook."""


@dataclass(frozen=True)
class TreeConfig:
    """Block, candidates and budget of a DDTree (arXiv 2604.12989).

    In SGLang's bag they are published as ``speculative_dflash_block_size = block_size``,
    ``speculative_eagle_topk = topk``, ``speculative_num_draft_tokens = width`` and
    ``speculative_num_steps = depth`` (UNO's convention).
    """

    block_size: int  # B: the anchor and B - 1 mask tokens
    topk: int  # K: candidates a depth
    budget: int  # N: nodes without the root

    def __post_init__(self) -> None:
        if not 2 <= self.block_size <= MAX_BLOCK_SIZE:
            raise SettingError(
                f"block size: found {self.block_size}, want 2..{MAX_BLOCK_SIZE}; "
                "set --speculative-dflash-block-size to the size the drafter was trained with."
            )
        if not 2 <= self.topk <= MAX_TOPK:
            raise SettingError(
                f"--speculative-ddtree-topk: found {self.topk}, want 2..{MAX_TOPK} "
                "(1 selects the upstream chain); choose a value in that range."
            )
        if not 1 <= self.budget <= MAX_BUDGET:
            raise SettingError(
                f"--speculative-ddtree-budget: found {self.budget} nodes, want 1..{MAX_BUDGET}; "
                "choose a value in that range (--speculative-num-draft-tokens is budget + 1)."
            )
        if self.width < self.block_size:
            # The draft block writes B slots of the window that the verify pass then reuses.
            raise SettingError(
                f"--speculative-ddtree-budget: found {self.budget} nodes (verify width {self.width}), want at least "
                f"{self.block_size - 1} for block size {self.block_size}; raise the budget or lower "
                "--speculative-dflash-block-size."
            )

    @property
    def width(self) -> int:
        """N + 1: rows a request brings to the verify pass, the root included."""
        return self.budget + 1

    @property
    def depth(self) -> int:
        """Longest path below the root: the block's mask tokens."""
        return self.block_size - 1

    @classmethod
    def published(cls) -> TreeConfig | None:
        """The running server's tree, or None when it does not serve one (AR, chain, another algorithm)."""
        from sglang.srt.runtime_context import get_spec

        spec = get_spec()
        if (spec.speculative_algorithm or "").upper() != "DFLASH" or (spec.speculative_eagle_topk or 1) <= 1:
            return None
        return cls(
            block_size=int(spec.speculative_dflash_block_size),
            topk=int(spec.speculative_eagle_topk),
            budget=int(spec.speculative_num_draft_tokens) - 1,
        )
