"""Entry point: check the contract, install the hooks, and fail closed.

SGLang only logs a plugin's exceptions and failed hooks, and DFLASH without our hooks would quietly
serve the chain. So a drifted SGLang gets hooks that refuse DFLASH, and the hooks assert each other.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from sglang_dflash import contract
from sglang_dflash.config import ContractError, SettingError
from sglang_dflash.startup_errors import one_line_errors

logger = logging.getLogger(__name__)

_SEAMS = (  # any one of these can refuse DFLASH
    "sglang.srt.arg_groups.pipeline.run_resolution_pipeline",
    "sglang.srt.arg_groups.speculative_hook._handle_dflash",
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
)
_ADD_FLAGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
_PARSED = "sglang.srt.server_args.ServerArgs.from_cli_args"
_MANAGERS = "sglang.srt.managers."
_hooked: list[str] = []


def _off() -> bool:
    """Whether SGLANG_DFLASH asks for stock DFLASH; raises SettingError on a value that says neither."""
    value = os.environ.get("SGLANG_DFLASH") or "on"
    if value.lower() not in ("on", "off"):
        raise SettingError(f"SGLANG_DFLASH: found {value!r}, want on or off (unset is on); set one of them.")
    return value.lower() == "off"


def register() -> None:
    """``sglang.srt.plugins`` entry point, called once in every SGLang process."""
    try:
        if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
            from sglang_dflash.cpu.hooks import register_hooks

            register_hooks()
        if _off():
            logger.info("SGLANG_DFLASH=off: DFLASH is stock SGLang's.")
            _accept_flags(ignored=True)
            return
        drifts = contract.check()
        if not drifts:
            _install_hooks()
            return
        refusal: Exception = ContractError(_wrong_installation("; ".join(map(str, drifts))))
    except SettingError as error:
        refusal = error
    except Exception as error:  # SGLang would only log it, and serve the chain
        if _first_process():
            logger.exception("sglang-dflash did not load.")
        refusal = ContractError(_wrong_installation(f"{type(error).__name__}: {error}"))
    if _first_process():
        logger.error(refusal)
    _accept_flags(ignored=False)
    _refuse_dflash(refusal)


def _first_process() -> bool:
    """A server loads its plugins in at least three processes; what they all find is said by one."""
    return multiprocessing.parent_process() is None


def _wrong_installation(reason: str) -> str:
    return (
        f"sglang-dflash: DFLASH is refused, this installation is not the one it was written for: {reason}. Install "
        f"sglang=={contract.SGLANG_VERSION} (python -m sglang_dflash.check says what is off), or set SGLANG_DFLASH=off "
        "for stock DFLASH."
    )


def _accept_flags(*, ignored: bool) -> None:
    """Let a command line or --config file that names the ddtree flags be parsed although no tree is served: with
    DFLASH off they are ignored; with DFLASH refused the refusal must be what the user reads, not argparse."""
    try:
        from sglang_dflash import args

        if _ADD_FLAGS not in _hooked:  # a load that failed half way may have got as far as this one
            _hook(_ADD_FLAGS, args.add_flags, "AFTER")
        if _PARSED not in _hooked:
            _hook(_PARSED, args.ignore_flags if ignored else args.leave_flags, "AROUND")
    except Exception:
        logger.exception("sglang-dflash could not add its flags to this SGLang.")


def _hook(target: str, hook: Callable, kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType[kind])
    _hooked.append(target)


def _install_hooks() -> None:
    from sglang_dflash import allocation, args, memory, refusals

    _hook(_ADD_FLAGS, args.add_flags, "AFTER")
    _hook(_PARSED, args.from_cli_args, "AROUND")
    _hook("sglang.srt.arg_groups.pipeline.run_resolution_pipeline", args.resolve_pipeline, "AROUND")
    _hook("sglang.srt.arg_groups.speculative_hook._handle_dflash", args.handle_dflash, "AROUND")
    _hook("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", create_worker, "AROUND")
    _hook("sglang.srt.speculative.spec_info.create_dummy_verify_input", create_dummy_verify_input, "AROUND")
    _hook("sglang.srt.speculative.dflash_utils.validate_dflash_request", refusals.validate_request, "AFTER")
    _hook(_MANAGERS + "tokenizer_manager.TokenizerManager._create_tokenized_object", refusals.refuse_tokenized, "AFTER")
    _hook(_MANAGERS + "io_struct.GenerateReqInput.normalize_batch_and_arguments", refusals.normalize_request, "AROUND")
    _hook("sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest", refusals.chat_request(), "REPLACE")
    sizing = "sglang.srt.mem_cache.allocation_sizing."
    _hook(sizing + "get_req_to_token_extra_context_len", allocation.extra_context_len, "AFTER")
    _hook(sizing + "get_alloc_len_per_decode", allocation.alloc_len_per_decode, "AFTER")
    masks = "sglang.srt.layers.attention.verify_mask.maybe_create_verify_mask"
    _hook(masks, allocation.verify_mask_context, "AROUND")
    pools = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
    _hook(pools + "resolve_max_num_reqs", memory.resolve_max_num_reqs, "AROUND")
    _hook(pools + "_handle_max_mamba_cache", memory.handle_max_mamba_cache, "AROUND")
    # Engine.__init__ loads the plugins, so where an Engine is built its module is already here;
    # importing it in every other process would cost seconds for nothing.
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None and not isinstance(engine.Engine.server_args_class, args.EngineArgs):
        engine.Engine.server_args_class = args.EngineArgs(engine.Engine.server_args_class)


def create_worker(original: Callable, self: Any, server_args: Any) -> Any:
    """AROUND hook of ``SpeculativeAlgorithm.create_worker``: DFLASH with K > 1 gets the tree worker."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    if not self.is_dflash() or (resolving_view(server_args).speculative_eagle_topk or 1) <= 1:
        return original(self, server_args)
    assert_hooks_applied()
    from sglang_dflash.worker import DDTreeWorker

    return DDTreeWorker


def create_dummy_verify_input(
    original: Callable, spec_algorithm: Any, custom_mask: Any, num_tokens_per_req: int, is_draft_worker: bool
) -> Any:
    """AROUND hook of ``create_dummy_verify_input``: upstream's DFLASH dummy has no mask, so a forward warmed up
    from it would treat a tree as a chain."""
    from sglang_dflash.config import TreeConfig

    tree = TreeConfig.published()
    if tree is None or is_draft_worker or not spec_algorithm.is_dflash():
        return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    from sglang_dflash.verify_input import DDTreeVerifyInput

    return DDTreeVerifyInput.dummy(tree, custom_mask)


def assert_hooks_applied() -> None:
    """Raise ContractError naming every hook that SGLang failed to install (it only logs that)."""
    missing = [target for target in _hooked if not _is_wrapped(target)]
    if missing or not _hooked:
        raise ContractError(
            f"sglang-dflash: hooks not installed: {', '.join(missing) or 'none registered'}; want every one; "
            "see the log above, or set SGLANG_DFLASH=off for stock DFLASH."
        )


def _is_wrapped(target: str) -> bool:
    owner, _, name = target.rpartition(".")
    value = getattr(pkgutil.resolve_name(owner), name)
    # A replaced class is not wrapped, but ours.
    return hasattr(value, "__wrapped__") or value.__module__.startswith(f"{__package__}.")


def _refuse_dflash(refusal: Exception) -> None:
    def is_dflash(subject: Any) -> bool:
        name = getattr(subject, "speculative_algorithm", None) or getattr(subject, "name", None) or ""
        return str(name).upper() == "DFLASH"

    def refuse(original: Callable, *args: Any, **kwargs: Any) -> Any:
        if any(is_dflash(value) for value in (*args, *kwargs.values())):
            with one_line_errors():
                raise refusal
        return original(*args, **kwargs)

    if not sum(_refuse_at(seam, refuse) for seam in _SEAMS):
        # Nothing left to hook, and an exception would only be logged and the chain served.
        sys.exit(str(refusal))


def _refuse_at(seam: str, refuse: Callable) -> bool:
    """Put ``refuse`` before ``seam``, by SGLang's registry or, where that has drifted too, by hand."""
    owner, _, name = seam.rpartition(".")
    try:
        parent = pkgutil.resolve_name(owner)
        original = getattr(parent, name)
    except (ImportError, AttributeError):
        return False
    try:
        _hook(seam, refuse, "AROUND")
    except Exception:
        logger.exception("sglang-dflash: SGLang's hook registry refused %s.", seam)

        @functools.wraps(original)
        def refusing(*args: Any, **kwargs: Any) -> Any:  # a function, so that it binds as a method
            return refuse(original, *args, **kwargs)

        setattr(parent, name, refusing)
    return True
