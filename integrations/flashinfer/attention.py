"""`PagedAttentionWrapper`: FlashInfer's prefill call, also where FlashInfer cannot run."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Literal

import torch

from replayinfer import InputError, PlanError, UnsupportedError

from .gather import GatherAttention

__all__ = ["PagedAttentionWrapper"]

_TESTED = "0.7.4"
# Options of their plan that change nothing where they have these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "custom_mask": (None,),
    "packed_custom_mask": (None,),
    "pos_encoding_mode": ("NONE",),
    "logits_soft_cap": (None, 0, 0.0),
    "use_fp16_qk_reduction": (False,),
    "fixed_split_size": (None, -1),
    "use_token_head_sf": (False,),
}
# Options that only say how to go about it, or repeat what the arrays say.
_HINTS = frozenset({"seq_lens", "seq_lens_q", "uniform_q_len", "disable_split_kv", "block_tables"})


class PagedAttentionWrapper:
    """Attention over paged keys and values: ``plan`` once a step, ``run`` in every layer.

    The calls are those of FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper``, with fewer options.

    Parameters
    ----------
    float_workspace_buffer : Tensor
        On the device of the pages. FlashInfer recommends 128 MB; ``torch`` uses none of it, so an
        empty tensor will do.
    kv_layout : {"NHD", "HND"}
    use_cuda_graph : bool
        Keep every address, so that `run` can be captured and `plan` called before each replay. The
        batch is fixed then, and so are the query counts with ``backend="torch"``.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf : Tensor
        Required with `use_cuda_graph`; `MetadataBuffers.prefill_buffers` gives them.
    backend : {"auto", "flashinfer", "torch"}
        ``"auto"``: FlashInfer where it is installed and the workspace is on a GPU. `backend` says
        which was taken.
    kernel : str
        What FlashInfer calls its backend.

    Attributes
    ----------
    backend : str
    inner : object
        FlashInfer's wrapper, or what does it with torch.

    Examples
    --------
    >>> import torch
    >>> from replayinfer.integrations.flashinfer import KVPagePool
    >>> kv = KVPagePool([0], pages=4, page_size=4, kv_heads=1, head_dim=8, max_tokens=16)
    >>> kv.open([1])
    >>> meta = kv.step([1], 5, packed=True)
    >>> kv.append(0, torch.randn(5, 1, 8), torch.randn(5, 1, 8), meta)
    >>> attention = PagedAttentionWrapper(torch.empty(0))
    >>> at = meta.host
    >>> attention.plan(
    ...     at.qo_indptr, at.kv_indptr, at.kv_indices, at.last_page_len, 2, 1, 8, 4,
    ...     causal=True, q_data_type=torch.float32,
    ... )
    >>> attention.backend, attention.run(torch.randn(5, 2, 8), kv.cache(0)).shape
    ('torch', torch.Size([5, 2, 8]))
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: Literal["NHD", "HND"] = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        *,
        backend: Literal["auto", "flashinfer", "torch"] = "auto",
        kernel: str = "auto",
    ) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise InputError(f"kv_layout: got {kv_layout!r}; allowed 'NHD' or 'HND'; pick one")
        device = float_workspace_buffer.device
        self.backend = _choose(backend, device)
        self.device, self.kv_layout = device, kv_layout
        self._use_cuda_graph = use_cuda_graph
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        missing = [name for name, buffer in buffers.items() if buffer is None]
        if use_cuda_graph and missing:
            raise InputError(
                f"use_cuda_graph: got True without {', '.join(missing)}; allowed with all four "
                "buffers; take those of MetadataBuffers.prefill_buffers()"
            )
        self.inner: Any
        if self.backend == "flashinfer":
            peer = importlib.import_module("flashinfer")
            self.inner = peer.BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, **buffers, backend=kernel
            )
        else:
            fixed = None
            if use_cuda_graph:
                assert paged_kv_last_page_len_buf is not None
                assert paged_kv_indices_buf is not None
                fixed = (paged_kv_last_page_len_buf.numel(), paged_kv_indices_buf.numel())
            self.inner = GatherAttention(device, kv_layout, fixed)
        self._planned = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes of float and int workspace that `plan` would need for the same arguments."""
        if self.backend == "torch":
            return 0, 0
        floats, ints = self.inner.workspace_size(*args, **kwargs)
        return int(floats), int(ints)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        **options: Any,
    ) -> None:
        """Plan one step.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr : int32 [batch + 1]
        paged_kv_indices : int32 [paged_kv_indptr[-1]]
        paged_kv_last_page_len : int32 [batch]
            `StepMetadata` holds all four. Offsets on the host cost no sync.
        num_qo_heads, num_kv_heads, head_dim_qk, page_size : int
        causal : bool
            Whether a query sees no key after its own; the last query stands at the last key.
        sm_scale : float, optional
            ``1 / sqrt(head_dim_qk)`` if omitted.
        window_left : int
            Keys before its own that a query sees; -1: all.
        q_data_type, kv_data_type, o_data_type : torch.dtype
            Of queries, pages (the queries' if omitted) and outputs (likewise).
        **options
            Other options of FlashInfer's ``plan``; ``torch`` refuses those that change the result.

        Raises
        ------
        InputError
            Offsets that are none, heads that do not divide.
        UnsupportedError
            An option that ``torch`` does not serve.
        """
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            raise InputError(
                f"num_qo_heads: got {num_qo_heads} over {num_kv_heads} key heads; allowed a "
                "multiple; repeat the key heads"
            )
        if self.backend == "flashinfer":
            self.inner.plan(
                qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                num_qo_heads, num_kv_heads, head_dim_qk, page_size,
                causal=causal, sm_scale=sm_scale, window_left=window_left,
                q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
                non_blocking=non_blocking, **options,
            )  # fmt: skip
        else:
            _refuse_options(options, head_dim_qk)
            self.inner.plan(
                qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size,
                heads=(num_qo_heads, num_kv_heads, head_dim_qk), causal=causal, sm_scale=sm_scale,
                window_left=window_left,
                dtypes=(q_data_type, kv_data_type or q_data_type, o_data_type or q_data_type),
            )  # fmt: skip
        self._planned = True

    @torch.no_grad()
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend in one layer.

        Parameters
        ----------
        q : Tensor, [rows, num_qo_heads, head_dim]
        paged_kv_cache : Tensor or pair
            ``[pages, 2, page_size, num_kv_heads, head_dim]``, or keys and values apart; with
            ``HND`` heads come before tokens. `KVPagePool.cache` gives it.
        out : Tensor, optional
            As `q`.
        **options
            Other options of FlashInfer's ``run``; ``torch`` refuses them.

        Returns
        -------
        Tensor
            As `q`. With ``torch``: zeros for a query that sees no key.
        """
        if not self._planned:
            raise PlanError("run: got no plan; allowed after plan; call plan first")
        if self.backend == "flashinfer":
            y: torch.Tensor = self.inner.run(q, paged_kv_cache, out=out, **options)
            return y
        given = {name: value for name, value in options.items() if value not in (None, False)}
        if given:
            raise UnsupportedError(
                f"run: got {', '.join(given)}; allowed q, pages and out with backend='torch'; use "
                "backend='flashinfer'"
            )
        if out is not None and (out.shape != q.shape or out.device != q.device):
            raise InputError(
                f"out: got {list(out.shape)} on {out.device}; allowed {list(q.shape)} on "
                f"{q.device}, as q; leave it out"
            )
        y = self.inner.run(q, paged_kv_cache, out)
        return y


def _choose(backend: str, device: torch.device) -> str:
    if backend not in ("auto", "flashinfer", "torch"):
        raise InputError(
            f"backend: got {backend!r}; allowed auto, flashinfer or torch; pick one, and name "
            "FlashInfer's own with kernel="
        )
    installed = importlib.util.find_spec("flashinfer") is not None
    if backend == "auto":
        return "flashinfer" if installed and device.type == "cuda" else "torch"
    if backend == "flashinfer" and (not installed or device.type != "cuda"):
        where = "on " + str(device) if installed else "without the package"
        raise UnsupportedError(
            f"backend: got 'flashinfer' {where}; allowed on a GPU with flashinfer-python "
            f"{_TESTED}; pip install 'replayinfer[flashinfer]', or use backend='torch'"
        )
    return backend


def _refuse_options(options: dict[str, Any], head_dim: int) -> None:
    allowed = dict(_NEUTRAL) | {"head_dim_vo": (None, head_dim)}
    for name, value in options.items():
        if name in _HINTS:
            continue
        if name not in allowed or not any(value is v or value == v for v in allowed[name]):
            said = "a mask" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedError(
                f"{name}: got {said}; allowed {allowed.get(name, ('nothing',))[0]!r} with "
                "backend='torch'; use backend='flashinfer'"
            )
