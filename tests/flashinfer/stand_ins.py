"""FlashInfer's wrappers, as far as a planner can tell: their signatures, rules and results.

Each records its ``plan`` calls, checks what theirs check, and attends by gathering. The signatures
are held against FlashInfer's source in `test_planner`.
"""

from __future__ import annotations

from typing import Any

import torch

from replayinfer.integrations.flashinfer.gather import GatherAttention


class _Recorder:
    def __init__(self, kv_layout: str, device: torch.device) -> None:
        self.calls: list[dict[str, Any]] = []
        self._gather = GatherAttention(device, kv_layout)
        self.fails: Exception | None = None

    def _plan(self, given, qo, kv, ids, last, heads, page_size, causal):
        if self.fails is not None:
            raise self.fails
        self.calls.append({k: v for k, v in given.items() if k not in ("self", "__class__")})
        dtype = given["q_data_type"]
        self._gather.plan(
            qo, kv, ids, last, page_size, heads=heads, causal=causal, sm_scale=given["sm_scale"],
            window_left=given.get("window_left", -1), dtypes=(dtype, given["kv_data_type"], dtype),
        )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(_Recorder):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        super().__init__(kv_layout, float_workspace_buffer.device)
        self._graph = use_cuda_graph
        self._buffers = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        self._frozen = None
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ):
        if deprecated_positional_args:
            raise TypeError(f"deprecated: {deprecated_positional_args}")
        self._plan_impl(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            **kwargs,
        )  # fmt: skip

    def _plan_impl(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        is_causal=None,
        use_token_head_sf=False,
    ):
        given = dict(locals())
        batch = len(last_page_len)
        if q_len_per_req > 1 and not self._tensor_cores:
            raise ValueError("q_len_per_req > 1 requires tensor-core decode")
        if self._graph:
            if self._frozen not in (None, q_len_per_req):
                raise ValueError(f"planned with {self._frozen}, got {q_len_per_req}")
            if batch != len(self._buffers[2]):
                raise ValueError(f"the runtime batch size {batch} mismatches")
            self._frozen = q_len_per_req
            self._buffers[0].copy_(indptr)
            self._buffers[1][: len(indices)].copy_(indices)
            self._buffers[2].copy_(last_page_len)
        if q_len_per_req > 1 and int(seq_lens.min()) < q_len_per_req:
            raise ValueError(f"a request with kv_len={int(seq_lens.min())}")
        qo = torch.arange(batch + 1, dtype=torch.int32) * q_len_per_req
        heads = (num_qo_heads, num_kv_heads, head_dim)
        self._plan(given, qo, indptr, indices, last_page_len, heads, page_size, True)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        return self._gather.run(q, paged_kv_cache, out)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Theirs is a subclass as well."""


class BatchPrefillWithPagedKVCacheWrapper(_Recorder):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
        max_total_num_rows=None,
    ):
        super().__init__(kv_layout, float_workspace_buffer.device)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
        use_token_head_sf=False,
    ):
        given = dict(locals())
        if uniform_q_len is not None:
            assert (qo_indptr.diff() == uniform_q_len).all()
        self._plan(
            given, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk), page_size, causal,
        )  # fmt: skip

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        return self._gather.run(q, paged_kv_cache, out)


class BatchAttention(_Recorder):
    def __init__(self, kv_layout="NHD", device="cuda"):
        super().__init__(kv_layout, torch.device(device))

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo,
        page_size,
        causal=False,
        sm_scale=None,
        logits_soft_cap=None,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        use_profiler=False,
    ):
        given = dict(locals())
        pages = kv_indptr.diff()
        assert torch.equal(pages, (kv_len_arr + page_size - 1) // page_size)
        last = torch.where(pages > 0, kv_len_arr - (pages - 1) * page_size, 1)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._plan(given, qo_indptr, kv_indptr, kv_indices, last, heads, page_size, causal)

    def run(
        self,
        q,
        kv_cache,
        out=None,
        lse=None,
        k_scale=None,
        v_scale=None,
        logits_soft_cap=0.0,
        profiler_buffer=None,
        kv_cache_sf=None,
    ):
        return self._gather.run(q, kv_cache, out), None
