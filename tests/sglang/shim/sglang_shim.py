"""What SGLang's engine lacks on a CPU, so that it can be tested there: a plugin of the tests only.

Kernels that Triton's interpreter cannot run, or runs too slowly, are written in torch here, the
same for every backend under test. Nothing of the decode recurrence of `replayinfer` is here;
``TEST_TWO_KERNELS=1`` has it take the launches of large batches for small ones.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types


def install() -> None:
    import torch

    if torch.cuda.is_available():
        return
    _device()
    _triton()
    _platform()
    _weights()
    import drafting
    import recurrences

    recurrences.install()
    drafting.install()
    if os.environ.get("TEST_TWO_KERNELS") == "1":
        import launches

        launches.install()


def _device() -> None:
    import torch

    given = torch.get_device_module
    torch.get_device_module = lambda device=None: torch.cpu if device is None else given(device)
    torch.cuda.synchronize = lambda *args: None
    torch.cpu.device = lambda index=None: contextlib.nullcontext()
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    if "vllm" not in sys.modules:  # its rotary embedding is asked for off CUDA, and not called
        vllm, ops = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
        ops.rotary_embedding = None
        vllm._custom_ops = ops
        sys.modules.update({"vllm": vllm, "vllm._custom_ops": ops})


def _triton() -> None:
    """The first configuration of every autotuner, and functions that the interpreter knows."""
    import sglang.kernels.ops.attention.fla.layernorm_gated as norm
    import sglang.kernels.ops.attention.fla.op as op
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **{**kwargs, **self.configs[0].all_kwargs()})

    Autotuner.run = run
    norm._get_sm_count = lambda device: 1
    new = {
        "exp": lambda x: tl.exp(x),
        "exp2": lambda x: tl.math.exp2(x),
        "log": lambda x: tl.log(x),
        "log2": lambda x: tl.log2(x),
    }
    old = {name: getattr(op, name) for name in new}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang.kernels"):
            for attribute, value in list(vars(module).items()):
                for name, function in old.items():
                    if value is function:
                        setattr(module, attribute, new[name])


def _platform() -> None:
    import sglang.srt.arg_groups.mamba_hook as hook
    from sglang.srt.platforms.interface import SRTPlatform

    SRTPlatform.support_mamba_cache_extra_buffer = lambda self: True
    hook._platform_supports_mamba_cache_extra_buffer = lambda: True


def _weights() -> None:
    """``load_format="dummy"`` with weights that make states and logits move, seeded by name."""
    import math
    import zlib

    import sglang.srt.model_loader.loader as loader
    import torch

    @torch.no_grad()
    def initialize(model, *args, **kwargs) -> None:
        for name, p in model.state_dict().items():
            if not torch.is_floating_point(p):
                continue
            last = name.rpartition(".")[2]
            rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            if last == "A_log":
                p.uniform_(0.0, math.log(16.0), generator=rng)
            elif last == "A":
                p.uniform_(-8.0, -0.5, generator=rng)
            elif last == "dt_bias":  # softplus of it log-uniform in [1e-3, 1e-1]
                u = torch.empty(p.shape).uniform_(math.log(1e-3), math.log(1e-1), generator=rng)
                p.copy_(torch.log(torch.expm1(u.exp())))
            elif last == "D" or "norm" in name:
                gemma = "gemma" in type(_owner(model, name)).__name__.lower()
                p.fill_(0.0 if gemma else 1.0)
            elif last in ("cos_sin_cache", "inv_freq"):
                continue
            elif "conv1d" in name:
                p.normal_(0, 0.5, generator=rng)
            elif "embed_tokens" in name or "embeddings" in name:
                p.normal_(0, 1.0, generator=rng)
            elif p.dim() >= 2:
                p.normal_(0, 1.5 / math.sqrt(p.shape[-1]), generator=rng)
            else:
                p.zero_()

    loader.initialize_dummy_weights = initialize


def _owner(model, name: str):
    return model.get_submodule(name.rpartition(".")[0])
