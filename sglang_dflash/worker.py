"""DFLASH's v2 worker with tree verification. Prefill, idle rounds and the KV append stay upstream's."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _resolve_dflash_embedding_module
from sglang.srt.speculative.eagle_utils import default_tree_mask_mode, eagle_prepare_for_verify
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask, draft_tp_context
from torch import Tensor

from sglang_dflash.accept import process_logits, sample_target_tokens
from sglang_dflash.args import drafter_path
from sglang_dflash.capture import start_capture
from sglang_dflash.capture_tee import CaptureTee
from sglang_dflash.commit import commit_recurrent_state, compact_hidden, compact_target_kv, kv_rows
from sglang_dflash.config import TreeConfig
from sglang_dflash.draft import TreeSampler, draft_forward_batch
from sglang_dflash.drafter import read_drafter_spec
from sglang_dflash.graph_runner import DDTreeCudaGraphRunner, check_graph
from sglang_dflash.kernels.accept_walk import AcceptedPaths, accept_walk
from sglang_dflash.kernels.verify_mask import write_verify_mask
from sglang_dflash.provenance import check_provenance, of_server
from sglang_dflash.target import check_ranks, check_target
from sglang_dflash.tree import DraftTree
from sglang_dflash.verify_input import DDTreeVerifyInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One decode step's view of the batch. Filled by ``DDTreeWorker._open_step``."""

    batch: Any  # ScheduleBatch
    carried: DFlashDraftInputV2  # anchor tokens and reserved KV lengths, from the previous step
    prefix_lens: Tensor  # [bs] int64, committed tokens whose KV is written
    window: Tensor  # [bs, width] int64, positions prefix .. prefix + width - 1
    plan: Any  # KVLocPlan of the window: the draft writes its first B columns, verify all

    @property
    def batch_size(self) -> int:
        return self.prefix_lens.shape[0]


class DDTreeWorker(DFlashWorkerV2):
    """Draft one block, verify a DDTree in one target pass, commit the accepted path.

    The bag publishes the tree (topk K, draft tokens N + 1), which the target's pools, backends and graphs
    need; upstream's worker and the drafter are chain-sized, so everything upstream runs inside
    ``_chain_view``.
    """

    _draft_sampler: TreeSampler | None
    _capture: CaptureTee | None = None

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        tree = TreeConfig.published()
        assert tree is not None, "create_worker hands out this worker only for a tree"
        self.tree = tree
        self.mask_mode = default_tree_mask_mode()
        with self._chain_view():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        assert self.block_size == tree.block_size
        check_ranks(self._tp_sync, get_parallel().tp_size)
        self.speculative_num_draft_tokens = tree.width
        # Triton's one-stage extend kernel (deterministic inference) and the CPU read the mask's prefix columns.
        self._reads_prefix_mask = (
            get_exec().deterministic.enable_deterministic_inference or torch.device(self.device).type == "cpu"
        )
        self._window_offsets = torch.arange(tree.width, device=self.device)
        # Before the target's graphs are captured (scheduler.py: target graphs, then draft graphs).
        target_worker.model_runner._decode_cuda_graph_runner_cls = lambda: DDTreeCudaGraphRunner

    # ---- start-up -----------------------------------------------------------------------------

    def _chain_view(self) -> AbstractContextManager:
        """The bag as upstream's chain expects it; without it block_size becomes N + 1 and the drafter's
        attention backend plans a masked tree that is not there."""
        return get_spec().override(
            speculative_num_draft_tokens=self.tree.block_size, speculative_num_steps=1, speculative_eagle_topk=1
        )

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        with self._chain_view():
            super().alloc_memory_pool(*args, **kwargs)

    def init_attention_backends(self) -> None:
        check_target(self.model_runner)
        with self._chain_view():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with self._chain_view():
            super().init_cuda_graphs()
        if self._draft_sampler is None:  # no draft graph to build it for
            self._draft_sampler = self._build_tree_sampler(max_bs=1)
        self._check_graphs()
        kv_rows(self.model_runner.token_to_kv_pool_allocator.get_kvcache())  # decided, and logged, at start-up
        self._check_provenance()

    def _check_provenance(self) -> None:
        """Compare the drafter's training with this server, and start the capture tee if one was asked for."""
        view = resolving_view(self.server_args)
        drafter = drafter_path(view)
        layer_ids = read_drafter_spec(drafter).target_layer_ids
        server = functools.cache(lambda: of_server(self.model_runner, view, layer_ids))  # hashes: only if asked for
        check_provenance(drafter, server)
        if get_parallel().tp_rank == 0:
            self._capture = start_capture(view, self.model_runner.model, server)

    def _check_graphs(self) -> None:
        """A captured width or batch that would fall back to eager is an error at start-up."""
        wants_graphs = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
        if not wants_graphs or torch.device(self.device).type != "cuda":
            return
        requests = int(self.model_runner.max_running_requests)
        target, draft = self.model_runner, self.draft_model_runner
        check_graph(target.decode_cuda_graph_runner, name="verify", width=self.tree.width, max_requests=requests)
        check_graph(draft.decode_cuda_graph_runner, name="draft", width=self.block_size, max_requests=requests)

    def _maybe_build_draft_sampler(self) -> TreeSampler:
        return self._build_tree_sampler(max_bs=max(get_exec().graph.cuda_graph_config.decode.bs))

    def _build_tree_sampler(self, max_bs: int) -> TreeSampler:
        lm_head = unwrap_lora_layer(self.target_worker.model_runner.model.lm_head)
        return TreeSampler(self.tree, lm_head=lm_head, tp_sync=self._tp_sync, max_bs=max_bs, device=self.device)

    def _defer_target_verify_gather(self) -> None:
        # Deferred logits stay sharded over the vocabulary; a node's token needs all of it.
        return None

    def prewarm_sampling(self) -> Any:
        # Upstream rehearses the chain's accept kernels, which a tree never runs; ours takes bounded pieces (accept.py).
        return self.model_runner.prewarm_sampling()

    # ---- one step -----------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Prefill and idle rounds are upstream's; a decode step is ours."""
        prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if prefill or batch.forward_mode.is_idle():
            with nullcontext() if self._capture is None else self._capture.prefill(batch):
                return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        step = self._open_step(batch)
        tree = self._draft(step)
        grammar_tree = (
            GrammarTree.from_device(tree.next_token, tree.next_sibling, tree.tokens) if batch.has_grammar else None
        )
        verify_input, output = self._verify(step, tree)
        accepted, target_tokens = self._accept(step, tree, verify_input, output, grammar_tree, grammar_barrier)
        return self._commit(step, output, accepted, target_tokens, on_publish)

    def _append_target_hidden_to_draft_kv_by_loc(self, *, target_hidden: Tensor, **kwargs: Any) -> None:
        if self._capture is not None:
            self._capture.take(target_hidden)
        super()._append_target_hidden_to_draft_kv_by_loc(target_hidden=target_hidden, **kwargs)

    def _open_step(self, batch: Any) -> Step:
        """Plan the step's KV window once: draft, verify and the KV append all write it."""
        carried = batch.spec_info
        if not isinstance(carried, DFlashDraftInputV2):
            raise RuntimeError(f"DDTree step: found {type(carried).__name__} as state, want DFlashDraftInputV2.")
        # Under overlap the lengths were written on another stream.
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        prefix = batch.seq_lens
        window = prefix.unsqueeze(1) + self._window_offsets
        rows = self.model_runner.req_to_token_pool.req_to_token[batch.req_pool_indices.unsqueeze(1), window]
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix,
            seq_lens_cpu=batch.seq_lens_cpu if batch.seq_lens_cpu is not None else carried.nxt_kv_lens_cpu,
            write_virtual=rows.reshape(-1).to(torch.int64),
            read_extent=self.tree.width,
        )
        return Step(batch=batch, carried=carried, prefix_lens=prefix, window=window, plan=plan)

    def _draft(self, step: Step) -> DraftTree:
        """Run the block ``[anchor, mask x (B - 1)]`` and grow the tree from its top-K."""
        block_ids = torch.full(
            (step.batch_size, self.block_size), int(self._mask_token_id), dtype=torch.int64, device=self.device
        )
        block_ids[:, 0] = step.carried.bonus_tokens
        forward = draft_forward_batch(
            batch=step.batch,
            block_ids=block_ids,
            embeddings=self._embed(block_ids),
            positions=step.window[:, : self.block_size],
            seq_lens_cpu=self._host_lengths(step),
            spec_info=self._draft_block_spec_info,
        )
        step.plan.bind(forward, self.draft_model_runner.kv_index_translator, cols=slice(0, self.block_size))
        sampler = self._draft_sampler
        assert sampler is not None, "built by init_cuda_graphs"
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            out = self.draft_model_runner.forward(forward)
            if out.can_run_graph:  # the sampler ran as the graph's tail
                return sampler.buffers.view(step.batch_size)
            return sampler.grow(out.logits_output.hidden_states, block_ids.view(-1))

    def _embed(self, block_ids: Tensor) -> Tensor:
        """Target embeddings of ``block_ids [bs, B]`` -> ``[bs * B, H]``."""
        target = self.target_worker.model_runner.model
        embed = unwrap_lora_layer(_resolve_dflash_embedding_module(self.draft_model, target))
        embeddings = embed(block_ids)
        if self._noise_embed_scale != 1.0:
            embeddings = embeddings * self._noise_embed_scale
        return embeddings.view(-1, embeddings.shape[-1])

    def _host_lengths(self, step: Step) -> Tensor:
        """Host upper bound of prefix + block, ``[bs]``: what attention planning may read without a device sync."""
        if step.batch.seq_lens_cpu is not None:
            return step.batch.seq_lens_cpu + self.block_size
        return step.carried.nxt_kv_lens_cpu

    def _verify(self, step: Step, tree: DraftTree) -> tuple[DDTreeVerifyInput, Any]:
        """All nodes through the target in one pass; logits and context features come back node by node."""
        mask, positions = self._mask_and_positions(step, tree)
        rows = torch.arange(step.batch_size * self.tree.width, device=self.device)
        verify_input = DDTreeVerifyInput.of_tree(
            self.tree,
            tokens=tree.tokens.reshape(-1),
            positions=positions.reshape(-1),
            next_token=tree.next_token,
            next_sibling=tree.next_sibling,
            retrieve_index=rows.view(step.batch_size, -1),
            mask=mask,
            out_cache_loc=step.plan.write_ids(self.model_runner.kv_index_translator),
            kv_loc_plan=step.plan,
        )
        step.batch.spec_info = verify_input
        forward, _ = eagle_prepare_for_verify(
            verify_input, self.model_runner.req_to_token_pool, step.batch, self.target_worker
        )
        return verify_input, self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True
        )

    def _mask_and_positions(self, step: Step, tree: DraftTree) -> tuple[Tensor | None, Tensor]:
        """The tree mask in the backend's layout (its own buffer under graphs) and ``[bs, width]`` positions.

        None, causal attention, when every tree is a chain. Only where asking costs nothing: on CUDA the shape is
        known on the device alone and captured graphs read a mask anyway, of which SGLang's two-stage kernel loads
        just the ``[width, width]`` cells.
        """
        if not tree.is_chain.is_cuda and bool(tree.is_chain.all()):
            return None, tree.positions(step.prefix_lens)
        bs, width = step.batch_size, self.tree.width
        full = self.mask_mode == TreeMaskMode.FULL_MASK
        shared = self.model_runner.attn_backend.verify_mask
        if shared is not None and shared.fits(bs):
            mask = shared.buffer
        else:
            prefix_cells = int(self._host_lengths(step).sum()) if full else 0
            mask = torch.empty((prefix_cells + bs * width) * width, dtype=torch.bool, device=self.device)
        positions = torch.empty((bs, width), dtype=torch.int64, device=self.device)
        write_verify_mask(
            tree, step.prefix_lens, mask, positions, full_mask=full, fill_prefix=full and self._reads_prefix_mask
        )
        return mask, positions

    def _accept(
        self,
        step: Step,
        tree: DraftTree,
        verify_input: DDTreeVerifyInput,
        output: Any,
        grammar_tree: GrammarTree | None,
        grammar_barrier: Any,
    ) -> tuple[AcceptedPaths, Tensor]:
        """One target token a node, then the walk. Returns the path and the tokens ``[bs * width]``."""
        batch, logits = step.batch, output.logits_output.next_token_logits
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
        process_logits(logits, batch.sampling_info, self.tree.width, grammar_mask)
        tokens = sample_target_tokens(logits, batch.sampling_info, self.tree.width, verify_input.positions)
        greedy = batch.sampling_info is None or batch.sampling_info.is_all_greedy
        site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        self._tp_sync.sync(site, tokens)
        # Fresh buffers: under overlap the previous step's are still being copied to the host.
        accepted = AcceptedPaths.allocate(step.batch_size, self.block_size, self.device)
        accept_walk(tree, tokens.view(step.batch_size, -1), step.prefix_lens, accepted)
        return accepted, tokens

    def _commit(
        self, step: Step, output: Any, accepted: AcceptedPaths, target_tokens: Tensor, on_publish: Any
    ) -> GenerationBatchResult:
        """Keep the accepted path and hand the next step its anchor."""
        batch, logits_output = step.batch, output.logits_output
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, target_tokens, accept_index=accepted.accept_index)
        commit_recurrent_state(self.target_worker, batch, accepted, self.tree.width)
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        compact_target_kv(batch, accepted, self.model_runner.token_to_kv_pool_allocator)
        self._append_draft_kv(step, compact_hidden(logits_output.hidden_states, accepted), accepted)
        logits_output.hidden_states = None  # large; overlap would copy it to the host
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=accepted.accept_lens,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=accepted.new_seq_lens
            ),
            speculative_num_draft_tokens=self.tree.width,
            speculative_output_stride=self.block_size,
            new_seq_lens=accepted.new_seq_lens,
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
        )

    def _append_draft_kv(self, step: Step, hidden: Tensor, accepted: AcceptedPaths) -> None:
        """The drafter's KV of the accepted path, at chain positions: compacted, it is a chain."""
        slots = self._draft_write_ids(step.plan).view(step.batch_size, -1)[:, : self.block_size].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden,
            cache_loc=slots.view(-1),
            cache_loc_2d=slots,
            positions=step.window[:, : self.block_size].reshape(-1),
            commit_lens=accepted.accept_lens,
        )
