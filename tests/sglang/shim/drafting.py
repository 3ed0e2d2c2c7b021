"""SGLang's kernels around a verify of drafts in plain torch, for a CPU; chains only."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
from pathlib import Path

import torch


def install() -> None:
    _scatter()
    _attention()
    _tokens()
    _corpus()
    _draft_model()


def _scatter() -> None:
    import sglang.kernels.ops.mamba.mamba_state_scatter_triton as scatter

    def with_mask(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw=None):
        for row, (slot, step) in enumerate(
            zip(dst_indices_raw.tolist(), step_indices_raw.tolist(), strict=True)
        ):
            if slot >= 0 and step >= 0:
                dst[:, slot] = src[:, row, step]

    scatter.fused_conv_window_scatter_with_mask = with_mask


def _attention() -> None:
    """Full attention of a window: an extend of each sequence by its drafts."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(self, q, k, v, layer, forward_batch, *args, **kwargs):
        if forward_batch.forward_mode.is_target_verify():
            window = forward_batch.spec_info.draft_token_num
            forward_batch = copy.copy(forward_batch)
            forward_batch.extend_prefix_lens = forward_batch.seq_lens
            forward_batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, window)
            forward_batch.seq_lens = forward_batch.seq_lens + window
        return extend(self, q, k, v, layer, forward_batch, *args, **kwargs)

    TorchNativeAttnBackend.forward_extend = forward_extend


def _tokens() -> None:
    import sglang.srt.speculative.eagle_utils as utils
    import sglang.srt.speculative.ngram_worker as ngram

    def extend_locations(
        req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num,
        device,
    ):  # fmt: skip
        rows = zip(
            req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
        )
        return torch.cat([req_to_token[r, a:b] for r, a, b in rows]).long()

    def links(
        tree_mask, seq_lens, positions, index, next_token, next_sibling, batch, nodes
    ):  # fmt: skip
        """Of chains, which are all that may come."""
        chain = torch.ones(nodes, nodes).tril().bool()
        assert torch.equal(tree_mask.view(batch, nodes, nodes).bool(), chain.expand(batch, -1, -1))
        each = torch.arange(nodes)
        positions.copy_((seq_lens[:, None] + each).flatten())
        index.copy_(torch.arange(batch * nodes).view(batch, nodes))
        next_token.copy_(torch.where(each < nodes - 1, each + 1, -1).expand(batch, -1))
        next_sibling.fill_(-1)

    def judge(
        *, predicts, accept_index, accept_token_num, candidates, retrieve_index, target_predict,
        **links,
    ):  # fmt: skip
        right = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(1).sum(1)
        accept_token_num.copy_(right)
        for row, count in enumerate(right.tolist()):
            kept = retrieve_index[row, : count + 1]
            accept_index[row, : count + 1] = kept.int()
            predicts[kept] = target_predict[row, : count + 1].int()
        return predicts, accept_index, accept_token_num

    ngram.assign_extend_cache_locs_func = extend_locations
    ngram.reconstruct_indices_from_tree_mask_func = links
    # Of a chain they lie where they belong.
    ngram.move_accept_tokens_to_target_kvcache = lambda *args: None
    utils.verify_tree_greedy_func = judge


def _seen() -> list[list[int]]:
    """Of the file ``TEST_CORPUS``, which is there before the first request."""
    path = os.environ.get("TEST_CORPUS")
    return json.loads(Path(path).read_text()) if path else []


def _corpus() -> None:
    """What an NGRAM drafter has seen before the first request: the token lists of `_seen`."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    look_up = NgramCorpus.batch_get

    def with_tokens(self, *args, **kwargs):
        if not getattr(self, "began", False):
            self.began = True
            self.batch_put(_seen())
            self.synchronize()
        return look_up(self, *args, **kwargs)

    NgramCorpus.batch_get = with_tokens


def _draft_model() -> None:
    """A draft model of one step: its attention, and the window that is verified.

    What it says is replaced by what follows the last token in `_seen`, so that some of it is right.
    """
    import sglang.kernels.ops.speculative.cache_locs as locations
    import sglang.srt.speculative.draft_utils as backends
    import sglang.srt.speculative.eagle_utils as utils
    import sglang.srt.speculative.eagle_worker_common as common
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def create(self, name, backend_map, error_template, stamps_children=False):
        backend = TorchNativeAttnBackend(self.draft_model_runner)
        backend.prefill_attention_backend_str = backend.decode_attention_backend_str = name
        return backend

    def window(req_pool_indices, req_to_token, start_offset, draft_token_num, **options):
        rows = zip(req_pool_indices.tolist(), start_offset.tolist(), strict=True)
        return torch.cat([req_to_token[r, a : a + draft_token_num] for r, a in rows]).long()

    def draft_locations(rows, req_to_token, seq_lens, out, topk, columns, **options):
        out.copy_(
            window(
                req_pool_indices=rows, req_to_token=req_to_token, start_offset=seq_lens,
                draft_token_num=topk * columns,
            )
        )  # fmt: skip

    def build(
        parents, scores, seq_lens, mask, positions, index, next_token, next_sibling, topk, steps,
        nodes, mode,
    ):  # fmt: skip
        batch, each = seq_lens.numel(), torch.arange(nodes)
        positions.copy_((seq_lens[:, None] + each).flatten())
        index.copy_(torch.arange(batch * nodes).view(batch, nodes))
        next_token.copy_(torch.where(each < nodes - 1, each + 1, -1).expand(batch, -1))

    following = functools.cache(
        lambda: {a: b for tokens in _seen() for a, b in itertools.pairwise(tokens)}
    )
    tree = common.build_tree_kernel_efficient

    def with_hints(bonus, parents, scores, drafts, *args, **options):
        said = zip(bonus.tolist(), drafts[:, 0].tolist(), strict=True)
        drafts[:, 0] = torch.tensor([following().get(last, own) for last, own in said])
        return tree(bonus, parents, scores, drafts, *args, **options)

    common.build_tree_kernel_efficient = with_hints
    backends.DraftBackendFactory._create_backend = create
    locations.assign_extend_cache_locs_uniform_func = window
    common.assign_draft_cache_locs_contiguous_func = draft_locations
    utils.build_tree_kernel_efficient_func = build
