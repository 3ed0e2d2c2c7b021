"""SGLang's KDA backend with ours on top, through windows of drafts, where no engine is at hand.

Its metadata builder, state pool, `forward_extend` of a verify, and commit, on made-up batches, are
compared with float64. Prints the largest errors.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang_runs import MARK

HEADS, DIM, STATE, TAPS, WINDOW, SLOTS = 2, 16, 16, 3, 4, 8
LAYERS = (1, 4)
PAD = -1


def main() -> None:
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import recurrences
    import sglang.srt.layers.attention.linear.kda_backend as home
    from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang_adapter.stand_ins import model

    from replayinfer import KDASpec
    from replayinfer.integrations.sglang import backends, speculation
    from replayinfer.integrations.sglang.layers import read_layers
    from replayinfer.integrations.sglang.options import Options
    from replayinfer.integrations.sglang.slots import SlotReplay
    from replayinfer.testing import layer_inputs, peak_error, recurrence

    home.causal_conv1d_update = recurrences.conv_update
    seed = random.randrange(2**32)
    rng, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    spec = KDASpec(heads=HEADS, dim=DIM, state=STATE, key_heads=HEADS, conv_width=0)
    whole, weights = model(spec, rng)
    shape = KimiLinearStateShape.create(
        tp_world_size=1, num_heads=HEADS, head_dim=DIM, head_k_dim=STATE,
        conv_kernel_size=TAPS + 1,
    )  # fmt: skip
    pool = speculation.pool_class(MambaPool)(
        size=SLOTS - 1, spec_state_size=4, mamba_layer_ids=list(LAYERS), device="cpu",
        cache_params=KimiLinearCacheParams(shape=shape, layers=list(LAYERS)),
        speculative_num_draft_tokens=WINDOW, speculative_eagle_topk=1,
    )  # fmt: skip
    cache = pool.mamba_cache
    assert cache.intermediate_ssm.numel() == 0
    replay = SlotReplay(
        read_layers(whole, "kda"), list(LAYERS), cache.temporal, torch.float32, Options(capacity=6),
        window=WINDOW,
    )  # fmt: skip
    pool.register_slot_state(replay)

    backend = object.__new__(backends._kda(home.KDAAttnBackend))
    mapping = torch.tensor([0, 2, 5, 3], dtype=torch.int32)  # slots by request
    backend.__dict__ |= {
        "device": "cpu", "topk": 1, "replay": replay, "prefill_graph_metadata": None,
        "accept_lens_pool": None, "_fused_chain_verify_fn": None, "pad_slot_id": PAD,
        "verify_intermediate_state_indices": torch.arange(4, dtype=torch.int32),
        "kernel_dispatcher": home.KDAKernelDispatcher(*[LinearAttnKernelBackend.TRITON] * 3),
        "_replay_kernel": backends._DeltaKernel(replay),
        "req_to_token_pool": SimpleNamespace(
            size=4, mamba_pool=pool,
            get_mamba_indices=lambda rows: mapping[rows],
            translate_mamba_indices=lambda slots: slots,
            get_speculative_mamba2_params_all_layers=pool.get_speculative_mamba2_params_all_layers,
            mamba2_layer_cache=lambda layer: pool.mamba2_layer_cache(LAYERS.index(layer)),
        ),
    }  # fmt: skip
    backend.kernel_dispatcher.verify_kernel = backend._replay_kernel
    hybrid = object.__new__(HybridLinearAttnBackend)
    hybrid.linear_attn_backend = backend
    hybrid._update_ple_state_after_mtp_verify = lambda *given: None

    sizes = {"q": HEADS * STATE, "k": HEADS * STATE, "v": HEADS * DIM}
    channels = sum(sizes.values())
    convolutions = {n: torch.randn(channels, TAPS + 1, generator=rng) for n in LAYERS}
    layers = {
        layer: SimpleNamespace(
            layer_id=layer, conv_weights=convolutions[layer], bias=None, lower_bound=None,
            q_dim=sizes["q"], k_dim=sizes["k"], v_dim=sizes["v"], head_q_dim=STATE,
            head_k_dim=STATE, head_v_dim=DIM, num_q_heads=HEADS, num_k_heads=HEADS,
            num_v_heads=HEADS, A_log=None, dt_bias=None,
        )
        for layer in LAYERS
    }  # fmt: skip

    start = (len(LAYERS), HEADS, DIM, STATE)
    truth = {2: torch.zeros(start).double(), 5: torch.zeros(start).double()}
    before = {slot: torch.zeros(len(LAYERS), TAPS, channels).double() for slot in truth}
    worst = {"outputs": 0.0, "states": 0.0, "convolutions": 0.0}

    def said(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        worst[name] = max(worst[name], float(peak_error(got, want)))

    for turn in range(10):
        rows = [1, 2] if turn % 3 else [2, 0, 1]  # request 0 is a pad
        slots = mapping[rows].tolist()
        batch = SimpleNamespace(
            batch_size=len(rows), forward_mode=ForwardMode.TARGET_VERIFY,
            logical_forward_mode=ForwardMode.TARGET_VERIFY, mamba_track_indices=None,
            mamba_track_mask=None, extend_start_loc=None, extend_seq_lens=None,
            req_pool_indices=torch.tensor(rows),
            input_ids=torch.zeros(WINDOW * len(rows)),
            spec_info=SimpleNamespace(draft_token_num=WINDOW, ragged_verify_layout=None),
        )  # fmt: skip
        backend.init_forward_metadata(batch)
        accepted = [choose.randint(1, WINDOW) for _ in rows]
        kept, at, copied = {}, {}, {}
        tracked = rows.index(1) if turn in (4, 7) else None  # of request 1, in slot 2
        step = choose.randrange(accepted[tracked]) if tracked is not None else -1
        for index, layer in enumerate(LAYERS):
            made = [layer_inputs(spec, WINDOW, 1, torch.float32, rng) for _ in rows]
            raw = torch.randn(len(rows), WINDOW, channels, generator=rng)
            a = torch.cat([m["a"][0].flatten(1) for m in made])
            b = torch.cat([m["b"][0] for m in made])
            y = backend.forward_extend(
                layer=layers[layer], forward_batch=batch, mixed_qkv=raw.flatten(0, 1), a=a, b=b
            )
            y = y.view(len(rows), WINDOW, HEADS, DIM)
            for i, slot in enumerate(slots):
                if slot == 0:
                    continue
                stream = torch.cat([before[slot][index], raw[i].double()])
                mixed = torch.nn.functional.silu(
                    (stream.unfold(0, TAPS + 1, 1) * convolutions[layer].double()).sum(-1)
                )
                inputs = {
                    n: part.view(1, WINDOW, HEADS, -1)
                    for n, part in zip("qkv", mixed.split(list(sizes.values()), -1), strict=True)
                }
                inputs |= {"a": made[i]["a"], "b": made[i]["b"]}
                state = truth[slot][index][None]
                want, _ = recurrence(spec, state, inputs, weights[layer])
                said("outputs", y[i], want[0])
                for tokens, into in (
                    (accepted[i], kept),
                    (step + 1 if i == tracked else 0, copied),
                ):
                    if tokens:
                        some = {n: v[:, :tokens] for n, v in inputs.items()}
                        _, after = recurrence(spec, state, some, weights[layer])
                        into[slot, index] = after[0]
                        at[slot, index, tokens] = stream[tokens : tokens + TAPS]
        targets = steps = None
        if tracked is not None:
            targets = torch.tensor([3 if i == tracked else 7 for i in range(len(rows))])
            steps = torch.tensor([step if i == tracked else -1 for i in range(len(rows))])
        speculation.accept(
            hybrid, torch.tensor(accepted, dtype=torch.int32) - 1, targets, steps, None
        )
        for i, slot in enumerate(slots):
            for index in range(len(LAYERS) if slot else 0):
                if i == tracked:
                    said("states", cache.temporal[index, 3], copied[slot, index])
                    said("convolutions", cache.conv[0][index, 3], at[slot, index, step + 1])
                truth[slot][index] = kept[slot, index]
                before[slot][index] = at[slot, index, accepted[i]]
    live = torch.tensor(sorted(truth), dtype=torch.int32)
    replay.before_extend(live)
    for slot in truth:
        said("states", cache.temporal[:, slot], truth[slot])
        said("convolutions", cache.conv[0][:, slot], before[slot])
    print(MARK + json.dumps({"seed": seed, **worst, "counts": replay.counters()}), flush=True)


if __name__ == "__main__":
    main()
