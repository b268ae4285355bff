"""The contract's rows for capture and provenance."""

from __future__ import annotations

from sglang_dflash.contract_needs import Need, _fields, _members

_LINEAR = "srt.layers.attention.linear.gdn_backend:"
CAPTURE_NEEDS: tuple[Need, ...] = (
    # the tee
    Need("srt.speculative.dflash_worker_v2:DFlashWorkerV2.server_args", (), "settings of the tee"),
    *_members("srt.managers.schedule_batch:ScheduleBatch", "rows of a prefill", "prefix_lens extend_lens"),
    *_members("srt.managers.schedule_batch:Req", "whose rows, and whether it goes on", "rid to_finish finished"),
    *_members("srt.arg_groups.fields.memory:Memory", "refused beside capture", "disable_radix_cache"),
    Need("srt.model_executor.cuda_graph_config:CudaGraphConfig.prefill", (), "graphs do not run a hook"),
    Need(
        "srt.layers.layer_boundary.residual.access:final_norm_pair",
        (),
        "the final norm is called as a module, with the output and the residual",
    ),
    # the fingerprint
    *_members("srt.model_executor.model_runner:ModelRunner", "fingerprint", "dtype"),
    *_members(
        "srt.configs.model_config:ModelConfig", "fingerprint", "model_path revision quantization model_override_args"
    ),
    *_members("srt.arg_groups.fields.serving:Serving", "fingerprint", "tokenizer_path chat_template"),
    *_members(
        "srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend",
        "fingerprint: what runs in prefill",
        "full_attn_backend linear_attn_backend",
    ),
    Need("srt.layers.attention.hybrid_attn_backend:HybridAttnBackend.prefill_backend", (), "fingerprint"),
    Need(_LINEAR + "GDNAttnBackend.kernel_dispatcher", (), "fingerprint: the prefill kernel"),
    Need(_LINEAR + "GDNKernelDispatcher.extend_kernel", (), "fingerprint: the prefill kernel"),
    Need(_LINEAR + "causal_conv1d_fn", (), "fingerprint: the convolution that prefill calls"),
    Need(
        "srt.layers.attention.linear.kernels.gdn_triton:chunk_gated_delta_rule", (), "fingerprint: the prefill kernel"
    ),
    *_members("srt.mem_cache.memory_pool:MambaPool", "fingerprint: dtype of the states", "mamba_cache"),
    _fields("srt.mem_cache.memory_pool:MambaPool.State", "fingerprint: dtype of the states", "conv temporal"),
)
