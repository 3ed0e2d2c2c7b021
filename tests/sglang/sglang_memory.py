"""SGLang's own sizing and state pool of a server that speculates, with our hooks and without.

``python sglang_memory.py '[flags ...]'`` prints bytes: what was divided, what was charged, and what
the pools then hold.
"""

from __future__ import annotations

import functools
import json
import sys
from types import SimpleNamespace

from sglang_runs import MARK

REST = 2.0**-5  # GiB to divide
ROWS = 4096  # bytes of a slot's rows, say


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_context, get_schedule, publish
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(json.loads(sys.argv[1]))
    arguments.resolve_once()
    publish(arguments, role="scheduler")
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from replayinfer.integrations.sglang import backends

    backends.charge = lambda configurator: ROWS
    config = hybrid_gdn_config(model_config_of(arguments))
    configurator = SimpleNamespace(
        mambaish_config=config, hybrid_gdn_config=config, hybrid_kda_config=None, pp_size=1,
        attn_dp_size=1, fused_entry_bytes=lambda kind: None, is_draft_worker=False,
        spec_algorithm=SpeculativeAlgorithm.NGRAM, extra_mamba_cache_bytes_per_req=0,
    )  # fmt: skip
    configurator._calculate_mamba_ratio = functools.partial(
        KVCacheConfigurator._calculate_mamba_ratio, configurator
    )
    hooked = KVCacheConfigurator._handle_max_mamba_cache
    said = {}
    for name, size, pool in (
        ("theirs", hooked.__wrapped__, MambaPool),
        ("ours", hooked, HybridReqToTokenPool.mamba_pool_cls),
    ):
        get_context().override("test", max_mamba_cache_size=None)
        left = size(configurator, REST)
        slots = get_schedule().max_mamba_cache_size
        requests = min(
            get_schedule().max_running_requests, slots // configurator._calculate_mamba_ratio()
        )
        made = pool(
            size=slots, spec_state_size=requests, cache_params=config.mamba2_cache_params,
            mamba_layer_ids=config.mamba2_cache_params.layers, device="cpu",
            speculative_num_draft_tokens=4, speculative_eagle_topk=1,
        )  # fmt: skip
        cache = made.mamba_cache
        windows = made._intermediate_conv_window_phys
        held = [*cache.conv, cache.temporal, cache.intermediate_ssm, *windows]
        said[name] = {
            "slots": slots,
            "requests": requests,
            "charged": round((REST - left) * 2**30),
            "held": sum(t.nbytes for t in held) + (ROWS * (slots + 1) if name == "ours" else 0),
            "reported": round(made.mem_usage * 2**30),
            "drafts": cache.intermediate_ssm.nbytes,
            "windows": [list(t.shape) for t in cache.intermediate_conv_window],
        }
    print(MARK + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
