"""What this plugin relies on in SGLang, checked before it serves anything.

The check parses SGLang's source files instead of importing them: it costs a fraction of a second in
every process that loads plugins, has no side effects, and can be pointed at any copy of the package.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SGLANG_VERSION = "0.5.23"


@dataclass(frozen=True)
class Need:
    """One upstream name. ``params`` must all be accepted (fields, for a class); ``use`` says how we rely on it."""

    path: str  # dotted, below the sglang package: module.path:Name or module.path:Class.member
    params: tuple[str, ...]
    use: str


@dataclass(frozen=True)
class Drift:
    """A need that this SGLang does not meet."""

    need: Need
    found: str

    def __str__(self) -> str:
        return f"sglang.{self.need.path.replace(':', '.')}: {self.found}"


_W = "srt.speculative.dflash_worker_v2:DFlashWorkerV2."
NEEDS: tuple[Need, ...] = (
    # hooks
    Need("srt.plugins.hook_registry:HookRegistry.register", ("target", "hook", "hook_type"), "installs every hook"),
    Need("srt.arg_groups.pipeline:run_resolution_pipeline", ("server_args",), "hook: declare the tree first"),
    Need("srt.arg_groups.speculative_hook:_handle_dflash", ("server_args",), "hook: chain checks, then the tree"),
    Need("srt.server_args:ServerArgs.add_cli_args", ("parser",), "hook: --speculative-ddtree-* flags"),
    Need("srt.server_args:ServerArgs.from_cli_args", ("cls", "args"), "hook: map the flags"),
    Need("srt.entrypoints.engine:Engine.server_args_class", (), "replaced: the flags as Engine keywords"),
    Need("srt.speculative.spec_info:SpeculativeAlgorithm.create_worker", ("self", "server_args"), "hook: our worker"),
    Need(
        "srt.speculative.spec_info:create_dummy_verify_input",
        ("spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker"),
        "hook: warm-up with a mask and links",
    ),
    Need("srt.speculative.dflash_utils:validate_dflash_request", ("req", "enable_overlap"), "hook: refuse with 400"),
    Need("srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len", (), "hook: row headroom of a tree"),
    Need("srt.mem_cache.allocation_sizing:get_alloc_len_per_decode", (), "hook: a step allocates the width"),
    Need(
        "srt.layers.attention.verify_mask:maybe_create_verify_mask",
        ("is_draft_runner", "max_context_len"),
        "hook: mask room past the context limit",
    ),
    Need("srt.mem_cache.allocation_sizing:get_alloc_page_size", (), "row headroom rounds to a page"),
    Need(
        "srt.mem_cache.kv_cache_configurator:KVCacheConfigurator.resolve_max_num_reqs",
        ("self", "token_capacity"),
        "hook: memory formula of hybrid models",
    ),
    Need("srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._calculate_mamba_ratio", ("self",), "memory formula"),
    Need(
        "srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._handle_max_mamba_cache",
        ("self", "total_rest_memory"),
        "hook: memory formula in its error",
    ),
    # configuration
    Need("srt.arg_groups.overrides:declare_resolution", ("server_args", "source"), "publish the tree's values"),
    Need("srt.arg_groups.model_override_base:resolving_view", ("server_args",), "read values under resolution"),
    Need(
        "srt.arg_groups.model_override_base:model_config_of",
        ("server_args",),
        "the target's facts for the drafter check",
    ),
    Need("srt.runtime_context:get_spec", (), "published values; override() around upstream's chain-sized init"),
    Need("srt.runtime_context:max_speculative_num_draft_tokens", (), "widest verify"),
    # the worker we subclass
    Need(_W + "__init__", ("server_args", "gpu_id", "nccl_port", "target_worker"), "built with chain values"),
    Need(
        _W + "alloc_memory_pool",
        ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
        "with chain values",
    ),
    Need(_W + "init_attention_backends", ("self",), "draft backend with chain values"),
    Need(_W + "init_cuda_graphs", ("self",), "draft graph with chain values"),
    Need(_W + "prewarm_sampling", ("self",), "replaced: rehearse node sampling"),
    Need(_W + "_maybe_build_draft_sampler", ("self",), "replaced: top-K and tree in the draft graph"),
    Need(_W + "_defer_target_verify_gather", ("self",), "replaced: full-vocabulary logits"),
    Need(
        _W + "forward_batch_generation",
        ("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
        "prefill is upstream's, decode ours",
    ),
    Need(_W + "_draft_write_ids", ("plan",), "draft KV slots"),
    Need(
        _W + "_append_target_hidden_to_draft_kv_by_loc",
        ("target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens"),
        "draft KV of the accepted path",
    ),
    Need(_W + "_make_next_draft_input_decode", ("bonus_tokens", "new_seq_lens"), "state of the next step"),
    Need("srt.speculative.dflash_worker_v2:_resolve_dflash_embedding_module", ("draft_model", "target_model"), "embed"),
    Need("srt.speculative.draft_worker_common:make_draft_sampler_capture_hook", ("draft_sampler",), "draft graph tail"),
    Need("srt.models.dflash:candidate_topk", ("hidden", "lm_head", "k", "with_partition"), "top-K with log-partition"),
    # one step
    Need(
        "srt.speculative.eagle_info:EagleVerifyInput",
        (
            "draft_token",
            "custom_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "spec_steps",
            "topk",
            "draft_token_num",
            "capture_hidden_mode",
            "prepared_out_cache_loc",
            "kv_loc_plan",
        ),
        "the tree as attention and linear-attention backends read it",
    ),
    Need(
        "srt.speculative.eagle_utils:eagle_prepare_for_verify",
        ("verify_input", "req_to_token_pool", "batch", "target_worker"),
        "verify batch and graph load",
    ),
    Need("srt.speculative.eagle_utils:default_tree_mask_mode", (), "FULL_MASK or QLEN_ONLY"),
    Need("srt.speculative.dflash_info_v2:DFlashDraftInputV2", ("bonus_tokens", "new_seq_lens"), "carried state"),
    Need(
        "srt.speculative.dflash_utils:apply_dflash_verify_logits_adjustments",
        ("next_token_logits", "sampling_info", "draft_token_num"),
        "logit bias at every node",
    ),
    Need(
        "srt.speculative.spec_utils:commit_mamba_states_after_verify",
        ("target_worker", "batch", "accept_lens", "accept_index", "draft_token_num"),
        "recurrent state of the accepted node",
    ),
    Need(
        "srt.speculative.spec_utils:move_accept_tokens_to_target_kvcache",
        ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
        "KV compaction",
    ),
    Need("srt.mem_cache.memory_pool:MHATokenToKVPool.move_kv_cache", ("tgt_loc", "src_loc"), "our kernel's stand-in"),
    Need(
        "srt.mem_cache.memory_pool:MHATokenToKVPool.is_quantized_kv_cache", ("self",), "pools our kernel leaves alone"
    ),
    Need("srt.mem_cache.memory_pool:HybridLinearKVPool.move_kv_cache", ("tgt_loc", "src_loc"), "as its full_kv_pool"),
    Need(
        "srt.speculative.spec_utils:build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
        "grammar at every node",
    ),
    Need(
        "srt.speculative.spec_utils:GrammarTree.from_device",
        ("retrieve_next_token", "retrieve_next_sibling", "draft_token"),
        "grammar over the tree",
    ),
    Need("srt.speculative.spec_utils:draft_tp_context", ("layout",), "drafter's tensor-parallel scope"),
    Need("srt.speculative.spec_tp_sync:SpecTpSync.sync", ("site", "values"), "same tree and tokens on every rank"),
    Need("srt.speculative.spec_tp_sync:SpecTpSyncSite.DFLASH_SELECTOR", (), "same tree on every rank"),
    Need(
        "srt.layers.logprob_processor:compute_spec_logprobs",
        ("batch", "logits_output", "predict", "accept_index"),
        "logprobs of the accepted path",
    ),
    Need(
        "srt.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch",
        ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions"),
        "node sampling, as plain decoding samples",
    ),
    Need("srt.layers.sampler:sampling_from_probs_torch", ("probs", "sampling_seed", "positions"), "node sampling"),
    Need("srt.mem_cache.kv_loc_plan:KVLocPlan.bind", ("batch", "reader", "cols"), "draft columns"),
    Need(
        "srt.managers.utils:GenerationBatchResult",
        ("next_token_ids", "accept_lens", "next_draft_input", "speculative_output_stride", "new_seq_lens"),
        "result of a step; the output row is narrower than the tree",
    ),
    # graphs and attention
    Need(
        "srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.get_spec_info",
        ("self", "num_tokens"),
        "overridden: the graph is captured with a mask",
    ),
    Need(
        "srt.model_executor.model_runner:ModelRunner._decode_cuda_graph_runner_cls", ("self",), "replaced on the target"
    ),
    Need("srt.layers.attention.verify_mask:VerifyMask", ("buffer", "mode", "max_bs"), "mask buffer written in place"),
    Need("srt.layers.attention.triton_backend:TritonAttnBackend.verify_mask", ("self",), "the graph's mask buffer"),
    Need("srt.platforms.interface:PlatformCapabilities", (), "CPU platform"),
)


def sglang_root() -> Path:
    """Folder of the installed sglang package, without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed, want sglang==" + SGLANG_VERSION)
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _module(root: Path, dotted: str) -> ast.Module | None:
    base = root.joinpath(*dotted.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text())
    return None


def _scope(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of one scope, those under its conditions included; not what functions or classes hold."""
    for node in body:
        yield node
        for name in ("body", "handlers", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _scope(getattr(node, name, []))


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in _scope(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node
    return None


def _accepted(node: ast.stmt) -> tuple[set[str], bool]:
    """Parameter or field names of a definition, and whether it takes any others."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = node.args
        return {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)}, a.kwarg is not None
    if isinstance(node, ast.ClassDef):
        fields = {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
        return fields, False
    return set(), True


def _check_one(root: Path, need: Need) -> Drift | None:
    module, _, qualname = need.path.partition(":")
    tree = _module(root, module)
    if tree is None:
        return Drift(need, f"module sglang.{module} not found")
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in qualname.split("."):
        node = _find(body, part)
        if node is None:
            return Drift(need, f"{part} not found")
        body = node.body if isinstance(node, ast.ClassDef) else []
    assert node is not None
    names, open_ended = _accepted(node)
    missing = [p for p in need.params if p not in names]
    if missing and not open_ended:
        return Drift(need, f"parameters {', '.join(missing)} not found, has {', '.join(sorted(names))}")
    return None


def installed_version() -> str | None:
    """The installed SGLang's version, None when its metadata is missing."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check(root: Path | None = None) -> list[Drift]:
    """Every need that the SGLang below ``root`` does not meet; the default is the installed one, version included."""
    drifts = []
    if root is None and (version := installed_version()) != SGLANG_VERSION:
        need = Need("version", (), "the release this plugin was written against")
        drifts.append(Drift(need, f"found {version}, want {SGLANG_VERSION}"))
    root = root or sglang_root()
    return drifts + [drift for need in NEEDS if (drift := _check_one(root, need)) is not None]
