"""The table of the contract: every name, parameter, field and attribute of SGLang that this plugin uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """One upstream name. ``params`` must all be accepted (fields, for a class); ``use`` says how we rely on it.

    A member is a method, a class attribute, or what a method of the class assigns to ``self``.
    """

    path: str  # dotted, below the sglang package: module.path:Name or module.path:Class.member
    params: tuple[str, ...]
    use: str


def _members(owner: str, use: str, names: str) -> tuple[Need, ...]:
    return tuple(Need(f"{owner}.{name}", (), use) for name in names.split())


def _fields(owner: str, use: str, names: str) -> Need:
    return Need(owner, tuple(names.split()), use)


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
    *_members(
        "srt.managers.schedule_batch:Req",
        "requests refused",
        "origin_input_ids vocab_size multimodal_inputs logprob sampling_params custom_logit_processor lora_id "
        "input_embeds return_hidden_states return_sampling_mask return_routed_experts return_indexer_topk",
    ),
    _fields("srt.managers.schedule_batch:ReqLogprob", "requests refused", "top_logprobs_num"),
    _fields(
        "srt.sampling.sampling_params:SamplingParams",
        "requests refused",
        "top_k min_p sampling_seed min_new_tokens frequency_penalty presence_penalty repetition_penalty",
    ),
    Need(
        "srt.managers.tokenizer_manager:TokenizerManager._create_tokenized_object",
        ("self", "obj"),
        "hook: refuse early",
    ),
    Need("srt.managers.tokenizer_manager:TokenizerManager.model_config", (), "vocabulary of the target"),
    _fields(
        "srt.managers.io_struct:TokenizedGenerateReqInput",
        "requests refused early",
        "input_ids mm_inputs session_params sampling_params top_logprobs_num custom_logit_processor lora_id "
        "input_embeds return_hidden_states return_sampling_mask return_routed_experts return_indexer_topk",
    ),
    Need(
        "srt.managers.io_struct:GenerateReqInput.normalize_batch_and_arguments", ("self",), "hook: 400 instead of 500"
    ),
    _fields(
        "srt.managers.io_struct:GenerateReqInput",
        "requests refused",
        "text input_ids sampling_params logprob_start_len",
    ),
    Need("srt.entrypoints.openai.protocol:ChatCompletionRequest", (), "replaced: 400 instead of 500"),
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
    # the worker we subclass
    Need(_W + "__init__", ("server_args", "gpu_id", "nccl_port", "target_worker"), "built with chain values"),
    Need(
        _W + "alloc_memory_pool",
        ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
        "with chain values",
    ),
    Need(_W + "init_attention_backends", ("self",), "draft backend with chain values"),
    Need(_W + "init_cuda_graphs", ("self",), "draft graph with chain values"),
    Need(_W + "prewarm_sampling", ("self",), "replaced: the target's rehearsal, without the chain's"),
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
    Need(
        "srt.speculative.dflash_info_v2:DFlashDraftInputV2",
        ("bonus_tokens", "new_seq_lens", "nxt_kv_lens_cpu"),
        "carried state",
    ),
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
    Need(
        "srt.layers.logprob_processor:compute_spec_logprobs",
        ("batch", "logits_output", "predict", "accept_index"),
        "logprobs of the accepted path",
    ),
    Need(
        "srt.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch",
        ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions", "max_top_k"),
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
    *_members("srt.plugins.hook_registry:HookType", "kinds of our hooks", "AROUND AFTER REPLACE"),
    # options read and refused, by the namespace that declares them
    _fields(
        "srt.arg_groups.fields.spec:Spec",
        "a tree's sizes, and options it refuses",
        "speculative_algorithm speculative_eagle_topk speculative_num_draft_tokens speculative_num_steps "
        "speculative_dflash_block_size speculative_draft_model_path speculative_draft_model_revision "
        "speculative_draft_load_format speculative_draft_attention_backend speculative_draft_window_size "
        "speculative_adaptive speculative_use_rejection_sampling speculative_use_block_verification "
        "speculative_accept_threshold_single speculative_accept_threshold_acc",
    ),
    _fields(
        "srt.arg_groups.fields.exec_:ExecKernel",
        "backends of a tree",
        "attention_backend prefill_attention_backend decode_attention_backend sampling_backend",
    ),
    _fields(
        "srt.arg_groups.fields.exec_:ExecMamba",
        "linear attention of a tree",
        "enable_linear_replayssm enable_linear_replayssm_spec linear_attn_backend linear_attn_decode_backend "
        "linear_attn_verify_backend mamba_radix_cache_strategy mamba_track_interval",
    ),
    _fields(
        "srt.arg_groups.fields.exec_:ExecDeterministic",
        "seeded noise",
        "enable_deterministic_inference rl_on_policy_target",
    ),
    _fields("srt.arg_groups.fields.exec_:ExecOverlap", "option refused", "enable_two_batch_overlap"),
    _fields("srt.arg_groups.fields.exec_:ExecGraph", "graph sizes", "cuda_graph_config"),
    _fields("srt.arg_groups.fields.disagg:Disagg", "options refused", "disaggregation_mode enable_pdmux"),
    _fields("srt.arg_groups.fields.memory:Memory", "option refused", "enable_unified_memory"),
    _fields(
        "srt.arg_groups.fields.model:Model", "files and KV of the models", "kv_cache_dtype download_dir load_format"
    ),
    _fields(
        "srt.arg_groups.fields.schedule:Schedule", "requests that fit", "max_running_requests max_mamba_cache_size"
    ),
    _fields(
        "srt.arg_groups.fields.parallel:Parallel",
        "ranks that must agree, and options refused",
        "tp_size pp_size attn_dp_size enable_dp_attention dcp_size attn_cp_size",
    ),
    Need("srt.model_executor.cuda_graph_config:Backend.DISABLED", (), "whether graphs are wanted"),
    _fields("srt.model_executor.cuda_graph_config:PhaseConfig", "captured batches", "backend max_bs bs"),
    Need("srt.model_executor.cuda_graph_config:CudaGraphConfig.decode", (), "captured batches"),
    Need("srt.speculative.spec_utils:SIMULATE_ACC_LEN", (), "simulated acceptance is refused"),
    Need("srt.platforms:current_platform", (), "the verify backend of this platform"),
    *_members("srt.platforms.device_mixin:DeviceMixin", "the verify backend of this platform", "is_out_of_tree is_cpu"),
    Need("srt.runtime_context:get_exec", (), "published values"),
    Need("srt.runtime_context:get_parallel", (), "ranks that must agree"),
    Need("srt.runtime_context:get_schedule", (), "state slots"),
    Need("srt.runtime_context:_ConfigBag.override", (), "chain values around upstream's init"),
    # the target
    *_members("srt.configs.model_config:AttentionArch", "other attention is refused", "MHA"),
    *_members("srt.configs.model_config:ModelConfig", "target facts", "attention_arch context_len hf_config"),
    *_members(
        "srt.layers.radix_attention:RadixAttention",
        "rules by row, refused",
        "sliding_window_size xai_temperature_len",
    ),
    Need("srt.mem_cache.kv_cache_configurator:KVCacheConfigurator.is_draft_worker", (), "memory formula"),
    Need("srt.mem_cache.kv_cache_configurator:KVCacheConfigurator.mambaish_config", (), "memory formula"),
    Need("srt.configs.mamba_utils:BaseLinearStateParams.mamba_cache_per_req", ("self",), "bytes of one state"),
    *_members(
        "srt.model_executor.model_runner:ModelRunner",
        "read by the worker, at start-up and in a step",
        "attn_backend decode_cuda_graph_runner forward kv_cache_dtype kv_index_translator max_running_requests model "
        "model_config prewarm_sampling req_to_token_pool token_to_kv_pool_allocator",
    ),
    *_members(
        "srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
        "captured sizes, checked at start-up; its mask, captured",
        "captured_req_width max_bs buffers",
    ),
    Need(
        "srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.can_run_graph",
        ("self", "forward_batch"),
        "overridden: only trees replay a tree's graph",
    ),
    *_members(
        _W.rstrip("."),
        "built by upstream, read in a step",
        "block_size device draft_model draft_model_runner draft_parallel_layout model_runner "
        "_draft_block_spec_info _draft_sampler _mask_token_id _noise_embed_scale _tp_sync",
    ),
    # what a step reads and hands on
    _fields(
        "srt.managers.schedule_batch:ScheduleBatch",
        "the batch of a step",
        "can_run_decode_cuda_graph forward_mode has_grammar is_extend_in_batch out_cache_loc req_pool_indices reqs "
        "return_logprob sampling_info seq_lens seq_lens_cpu spec_info",
    ),
    _fields(
        "srt.sampling.sampling_batch_info:SamplingBatchInfo",
        "how a batch samples",
        "is_all_greedy max_top_k min_ps need_min_p_sampling need_top_k_sampling need_top_p_sampling sampling_seed "
        "temperatures top_ks top_ps",
    ),
    _fields(
        "srt.model_executor.forward_batch_info:ForwardBatch",
        "the drafter's forward",
        "forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc seq_lens_sum seq_lens_cpu positions "
        "input_embeds spec_algorithm spec_info capture_hidden_mode num_token_non_padded "
        "global_num_token_non_padded_cpu can_run_decode_cuda_graph",
    ),
    Need("srt.model_executor.forward_batch_info:ForwardMode.TARGET_VERIFY", (), "the drafter's forward"),
    *_members("srt.model_executor.forward_batch_info:ForwardMode", "prefill and idle rounds", "is_extend is_idle"),
    *_members("srt.model_executor.forward_batch_info:CaptureHiddenMode", "context features", "FULL NULL"),
    Need("srt.model_executor.forward_batch_info:enable_num_token_non_padded", (), "the drafter's forward"),
    *_members("srt.speculative.spec_info:SpeculativeAlgorithm", "the algorithm we serve", "DFLASH is_dflash"),
    Need("kernels.ops.speculative.spec_tree:TreeMaskMode.FULL_MASK", (), "layout of the mask"),
    Need("srt.speculative.eagle_info:EagleVerifyInput.max_tree_depth", ("self",), "overridden: the block size"),
    Need("srt.speculative.eagle_info:EagleVerifyInput.tree_topk", ("self",), "overridden: no fixed branching"),
    Need("srt.lora.layers:unwrap_lora_layer", ("module",), "head and embeddings of the target"),
    Need("srt.utils.async_probe:sanitize_nan_logits", ("logits", "msg"), "logits fit to sample"),
    Need("srt.constrained.base_grammar_backend:GrammarMask.apply", ("logits",), "grammar at every node"),
    *_members(
        "srt.speculative.spec_tp_sync:SpecTpSyncSite",
        "same tree and tokens on every rank",
        "DFLASH_SELECTOR DFLASH_ACCEPT_GREEDY DFLASH_ACCEPT_SAMPLE DFLASH_TARGET slug",
    ),
    Need("srt.speculative.spec_tp_sync:SpecTpSync.enabled", ("site",), "sites switched off are refused"),
    Need(
        "srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
        ("batch", "forward_batch", "is_verify"),
        "the verify pass",
    ),
    Need("srt.speculative.base_spec_worker:BaseSpecWorker.target_worker", ("self",), "the target"),
    Need("srt.managers.tp_worker:TpModelWorker.model_runner", ("self",), "the target"),
    _fields("srt.model_executor.model_runner:ModelRunnerOutput", "the drafter's output", "can_run_graph logits_output"),
    _fields("srt.layers.logits_processor:LogitsProcessorOutput", "output of a pass", "next_token_logits hidden_states"),
    Need(
        "srt.mem_cache.kv_index_translator:KVIndexTranslator.plan",
        ("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
        "the step's KV window",
    ),
    Need("srt.mem_cache.kv_loc_plan:KVLocPlan.write_ids", ("reader",), "slots the verify writes"),
    Need("srt.mem_cache.memory_pool:ReqToTokenPool.req_to_token", (), "slots of a request"),
    Need("srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.get_kvcache", ("self",), "the target's KV pool"),
    Need("srt.mem_cache.memory_pool:HybridLinearKVPool.full_kv_pool", (), "KV rows of a hybrid model"),
    *_members(
        "srt.mem_cache.memory_pool:MHATokenToKVPool",
        "rows our kernel moves, and pools it leaves alone",
        "k_buffer v_buffer layer_num kv_cache_layout quant_method use_native_move_kv_cache",
    ),
    Need("srt.layers.attention.verify_mask:VerifyMask.fits", ("bs",), "whether the batch has a shared mask"),
)
