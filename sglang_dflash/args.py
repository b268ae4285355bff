"""Arguments: the flags a DDTree user looks for, and how they become SGLang's own.

Two places act on SGLang's resolution. ``resolve_pipeline`` runs before it, so that every upstream
rule that depends on the tree (attention backend, mamba tracking, KV sizing) already sees the tree;
``handle_dflash`` wraps upstream's DFLASH step, which only knows chains: it is shown chain values
and the tree is declared again afterwards (the last declaration wins, ``overrides.py``).
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dflash.capture import check_capture
from sglang_dflash.config import DEFAULT_TOPK, SettingError, TreeConfig
from sglang_dflash.drafter import check_drafter, read_drafter_spec, resolve_drafter_path, target_facts
from sglang_dflash.provenance import accepted_provenance, of_files, only_warns
from sglang_dflash.startup_errors import note_command_line, one_line_errors

logger = logging.getLogger(__name__)

#: Reasons for refusing a server option beside a tree: (field, is it fine?, wanted, why).
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("pp_size", lambda v: v == 1, "1", "pipeline stages do not share the drafted tree"),
    ("attn_dp_size", lambda v: v in (None, 1), "1", "idle data-parallel ranks do not take part in a tree step"),
    ("enable_dp_attention", lambda v: not v, "off", "idle data-parallel ranks do not take part in a tree step"),
    ("dcp_size", lambda v: v == 1, "1", "a context split over ranks is not checked under a tree mask"),
    ("attn_cp_size", lambda v: v == 1, "1", "a context split over ranks is not checked under a tree mask"),
    ("disaggregation_mode", lambda v: v == "null", "null", "the decode side cannot rebuild the drafter's KV"),
    ("speculative_draft_window_size", lambda v: v is None, "unset", "the compact draft cache is chain-only"),
    ("enable_pdmux", lambda v: not v, "off", "multiplexed streams replay other graphs than the tree's"),
    ("enable_two_batch_overlap", lambda v: not v, "off", "a split batch would split the tree mask"),
    ("enable_unified_memory", lambda v: not v, "off", "its KV pool cannot move accepted tokens"),
    ("enable_linear_replayssm", lambda v: not v, "off", "the replayed state is chain-only"),
    ("enable_linear_replayssm_spec", lambda v: not v, "off", "the replayed state is chain-only"),
    ("speculative_adaptive", lambda v: not v, "off", "steps and width of a tree are fixed"),
    ("speculative_use_rejection_sampling", lambda v: not v, "off", "a tree is verified by exact matching"),
    ("speculative_use_block_verification", lambda v: not v, "off", "a tree is verified by exact matching"),
    ("speculative_accept_threshold_single", lambda v: v in (None, 1.0), "1.0", "a lower threshold is not lossless"),
    ("speculative_accept_threshold_acc", lambda v: v in (None, 1.0), "1.0", "a lower threshold is not lossless"),
    ("rl_on_policy_target", lambda v: v is None, "unset", "it samples plain decoding by another formula"),
    (
        "kv_cache_dtype",
        lambda v: not str(v).startswith(("fp8", "fp4", "mxfp", "nvfp", "int8", "int4")),
        "auto or bfloat16",
        "verify reads the step's own keys unquantised where plain decoding reads them back from the cache",
    ),
    ("sampling_backend", lambda v: v in (None, "pytorch"), "pytorch", "nodes are sampled by its rule, so all must be"),
    ("linear_attn_backend", lambda v: v in (None, "triton"), "triton", "only it verifies trees on linear attention"),
    (
        "linear_attn_decode_backend",
        lambda v: v in (None, "triton"),
        "triton",
        "only it verifies linear-attention trees",
    ),
    (
        "linear_attn_verify_backend",
        lambda v: v in (None, "triton"),
        "triton",
        "only it verifies linear-attention trees",
    ),
)

#: Fields that choose an attention backend the verify pass may run on.
_ATTENTION_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def _whole(flag: str, value: int | str | None) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        raise SettingError(f"--{flag}: found {value!r}, want a whole number; correct it.") from None


def merge_flags(
    ddtree_topk: int | str | None,
    ddtree_budget: int | str | None,
    eagle_topk: int | None,
    num_draft_tokens: int | None,
) -> tuple[int | None, int | None]:
    """Map ``--speculative-ddtree-*`` onto the existing fields.

    Returns ``(speculative_eagle_topk, speculative_num_draft_tokens)``; raises SettingError when a
    setting is given under both names with different values, or a value is no whole number.
    """
    ddtree_topk = _whole("speculative-ddtree-topk", ddtree_topk)
    ddtree_budget = _whole("speculative-ddtree-budget", ddtree_budget)
    if ddtree_topk is not None:
        if eagle_topk is not None and int(eagle_topk) != ddtree_topk:
            raise SettingError(
                f"--speculative-ddtree-topk {ddtree_topk} and --speculative-eagle-topk {eagle_topk} are the same "
                "setting with two values; give one of them."
            )
        eagle_topk = ddtree_topk
    if ddtree_budget is not None:
        width = ddtree_budget + 1
        if num_draft_tokens is not None and int(num_draft_tokens) != width:
            raise SettingError(
                f"--speculative-ddtree-budget {ddtree_budget} asks for {width} verify rows (nodes + root) but "
                f"--speculative-num-draft-tokens is {num_draft_tokens}; give one of them."
            )
        num_draft_tokens = width
    return eagle_topk, num_draft_tokens


def add_flags(result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER hook of ``ServerArgs.add_cli_args``; ``--config`` files read the same parser.

    The values stay text here: argparse would bury "invalid int" under 480 lines of usage.
    """
    group = parser.add_argument_group("DDTree (sglang-dflash)")
    group.add_argument(
        "--speculative-ddtree-topk",
        metavar="K",
        help=f"Candidates a depth, K (default {DEFAULT_TOPK}; 1 is the upstream chain). Same setting as "
        "--speculative-eagle-topk.",
    )
    group.add_argument(
        "--speculative-ddtree-budget",
        metavar="N",
        help="Tree nodes without the root, N (default: block size - 1, the cost of the chain). Same setting as "
        "--speculative-num-draft-tokens N+1.",
    )


def from_cli_args(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    """AROUND hook of ``ServerArgs.from_cli_args``: unknown namespace entries are dropped there."""
    note_command_line()
    with one_line_errors():
        args.speculative_eagle_topk, args.speculative_num_draft_tokens = merge_flags(
            getattr(args, "speculative_ddtree_topk", None),
            getattr(args, "speculative_ddtree_budget", None),
            args.speculative_eagle_topk,
            args.speculative_num_draft_tokens,
        )
    return original(cls, args)


def leave_flags(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    """AROUND hook of ``ServerArgs.from_cli_args`` where DFLASH is refused: only the refusal needs to know of it."""
    note_command_line()
    return original(cls, args)


def ignore_flags(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    """AROUND hook of ``ServerArgs.from_cli_args`` under SGLANG_DFLASH=off: the flags mean nothing to the chain."""
    for name in ("speculative_ddtree_topk", "speculative_ddtree_budget"):
        if (value := getattr(args, name, None)) is not None:
            logger.warning("--%s %s is ignored: SGLANG_DFLASH is off.", name.replace("_", "-"), value)
    return original(cls, args)


class EngineArgs:
    """Stands in for ``Engine.server_args_class``, so that ``sglang.Engine(speculative_ddtree_topk=...)`` works.

    ServerArgs is a msgspec Struct: its constructor cannot be hooked, and it refuses unknown keywords.
    """

    def __init__(self, server_args_class: type):
        self._class = server_args_class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        topk, budget = kwargs.pop("speculative_ddtree_topk", None), kwargs.pop("speculative_ddtree_budget", None)
        if topk is not None or budget is not None:
            kwargs["speculative_eagle_topk"], kwargs["speculative_num_draft_tokens"] = merge_flags(
                topk, budget, kwargs.get("speculative_eagle_topk"), kwargs.get("speculative_num_draft_tokens")
            )
        return self._class(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._class, name)


def verify_backend() -> str:
    """The one attention backend whose tree verification this project has checked on this platform."""
    from sglang.srt.platforms import current_platform

    return "torch_native" if current_platform.is_out_of_tree() and current_platform.is_cpu() else "triton"


def wants_tree(cfg: Any) -> bool:
    """DFLASH with K != 1. SGLang upper-cases the name later; compare without case."""
    return (cfg.speculative_algorithm or "").upper() == "DFLASH" and cfg.speculative_eagle_topk != 1


def drafter_path(cfg: Any) -> Path:
    """The drafter's folder; a hub id is fetched to where SGLang will look for it."""
    return resolve_drafter_path(
        cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision, cache_dir=cfg.download_dir
    )


def _given(value: Any, default: Any) -> Any:
    """0 is a value, and a wrong one; only None stands for the default."""
    return default if value is None else value


def resolve_tree(cfg: Any) -> TreeConfig:
    """Block from the flag or the drafter, K and N from their flags or defaults. Raises SettingError."""
    path = drafter_path(cfg)
    trained = read_drafter_spec(path).block_size
    block_size = int(_given(cfg.speculative_dflash_block_size, trained))
    if block_size > trained:
        raise SettingError(
            f"--speculative-dflash-block-size: found {block_size}, want at most {trained}, the block size in "
            f"{os.path.join(path, 'config.json')}; a drafter cannot draft past the block it was trained with."
        )
    return TreeConfig(
        block_size=block_size,
        topk=int(_given(cfg.speculative_eagle_topk, DEFAULT_TOPK)),
        budget=int(_given(cfg.speculative_num_draft_tokens, block_size)) - 1,
    )


def choose_attention(cfg: Any) -> str:
    """The verify backend; raises SettingError when the user named another one."""
    wanted = verify_backend()
    for field in _ATTENTION_FIELDS:
        found = getattr(cfg, field)
        if found not in (None, wanted):
            raise SettingError(
                f"--{field.replace('_', '-')}: found {found!r}, want {wanted!r}: tree verification is checked on "
                f"{wanted} only; drop the flag, or set --speculative-eagle-topk 1 for the upstream chain."
            )
    return wanted


def refuse_unsupported(cfg: Any) -> None:
    """Raise SettingError for a server option under which a tree would not be served exactly."""
    for field, fine, wanted, why in _REFUSED:
        value = getattr(cfg, field, None)
        if not fine(value):
            raise SettingError(
                f"--{field.replace('_', '-')}: found {value!r}, want {wanted} with DDTree: {why}; change it, or set "
                "--speculative-eagle-topk 1 for the upstream chain."
            )
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    if SIMULATE_ACC_LEN > 0:
        raise SettingError(
            f"SGLANG_SIMULATE_ACC_LEN: found {SIMULATE_ACC_LEN}, want unset: simulated acceptance changes the text; "
            "unset it."
        )
    if os.environ.get("SGLANG_DFLASH_EAGER_DRAFT_SAMPLER", "").lower() in ("1", "true", "yes"):
        raise SettingError(
            "SGLANG_DFLASH_EAGER_DRAFT_SAMPLER: found it set, want unset: a tree is grown inside the draft graph; "
            "unset it."
        )


def check_steps(cfg: Any, tree: TreeConfig) -> None:
    """Raise SettingError for ``--speculative-num-steps`` other than the chain's 1 or the tree's own depth."""
    if cfg.speculative_num_steps not in (None, 1, tree.depth):
        raise SettingError(
            f"--speculative-num-steps: found {cfg.speculative_num_steps}, want {tree.depth} (block size - 1) or none: "
            "a DFlash drafter drafts its whole block in one step; drop it."
        )


def check_requests(cfg: Any) -> None:
    """Raise SettingError for a request limit below 1; upstream serves one and says nothing."""
    if cfg.max_running_requests is not None and cfg.max_running_requests < 1:
        raise SettingError(
            f"--max-running-requests: found {cfg.max_running_requests}, want at least 1; raise it, or drop the flag."
        )


def check_track_interval(cfg: Any, tree: TreeConfig) -> None:
    """Raise SettingError when one step could pass two tracked states; upstream only asserts it, without a word."""
    interval = cfg.mamba_track_interval
    if cfg.mamba_radix_cache_strategy != "no_buffer" and interval is not None and interval < tree.width:
        raise SettingError(
            f"--mamba-track-interval: found {interval}, want at least {tree.width}, the tree's verify width: a step "
            "tracks one state; raise it, or lower --speculative-ddtree-budget."
        )


def default_requests(cfg: Any) -> int | None:
    """Running requests when the user named none: upstream's 48, or fewer where fewer are captured as graphs."""
    decode = cfg.cuda_graph_config.decode
    if cfg.max_running_requests is not None or decode.backend == "disabled" or not decode.max_bs:
        return None
    return min(48, int(decode.max_bs))


def resolve_pipeline(original: Callable, server_args: Any) -> None:
    """AROUND hook of ``run_resolution_pipeline``: declare the tree before anything reads it."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sglang_dflash.plugin import assert_hooks_applied

    with one_line_errors():
        cfg = resolving_view(server_args)
        if wants_tree(cfg):
            if cfg.speculative_draft_model_path is None:
                raise SettingError(
                    "--speculative-draft-model-path: found none, want a DFlash drafter's directory or hub id; give it."
                )
            assert_hooks_applied()
            refuse_unsupported(cfg)
            tree = resolve_tree(cfg)
            check_requests(cfg)
            check_steps(cfg, tree)
            check_track_interval(cfg, tree)
            backend = choose_attention(cfg)
            if cfg.attention_backend is None:
                logger.info("DDTree: attention backend %s (the one whose tree verification is checked).", backend)
            declare_resolution(
                server_args,
                "sglang_dflash.resolve_pipeline",
                speculative_dflash_block_size=tree.block_size,
                speculative_eagle_topk=tree.topk,
                speculative_num_draft_tokens=tree.width,
                attention_backend=backend,
                sampling_backend="pytorch",
            )
        original(server_args)
        check_capture(cfg, tree=wants_tree(cfg))
        only_warns()  # raises on a value that says neither, also where no drafter has a provenance


def handle_dflash(original: Callable, server_args: Any) -> None:
    """AROUND hook of ``_handle_dflash``: upstream's checks with chain values, then the tree again."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    cfg = resolving_view(server_args)
    if cfg.speculative_eagle_topk == 1 or cfg.speculative_draft_model_path is None:
        return original(server_args)
    tree = resolve_tree(cfg)
    model_config = model_config_of(server_args)
    spec = check_drafter(
        drafter_path(cfg),
        target_facts(model_config.hf_config, context_len=model_config.context_len),
        # Dummy weights are made up by the loader: there is no file to check.
        tensors=(cfg.speculative_draft_load_format or cfg.load_format) != "dummy",
    )
    accepted_provenance(drafter_path(cfg), lambda: of_files(model_config, cfg, spec.target_layer_ids))
    for warning in spec.warnings:
        logger.warning(warning)
    if (requests := default_requests(cfg)) is not None:
        declare_resolution(server_args, "sglang_dflash.default_requests", max_running_requests=requests)
    declare_resolution(
        server_args,
        "sglang_dflash.chain_view",
        speculative_num_draft_tokens=tree.block_size,
        speculative_eagle_topk=1,
        speculative_num_steps=1,
    )
    original(server_args)
    # An upstream default may have moved the backend since the pipeline began.
    backend = choose_attention(cfg)
    declare_resolution(
        server_args,
        "sglang_dflash.tree",
        speculative_dflash_block_size=tree.block_size,
        speculative_eagle_topk=tree.topk,
        speculative_num_draft_tokens=tree.width,
        speculative_num_steps=tree.depth,
        attention_backend=backend,
    )
    logger.info(
        "DDTree-%d: block size %d, budget %d nodes, verify width %d, attention %s, draft attention %s.",
        tree.topk,
        tree.block_size,
        tree.budget,
        tree.width,
        backend,
        cfg.speculative_draft_attention_backend,
    )
    return None
