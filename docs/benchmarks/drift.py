"""How far a state is from float64 after many decoded tokens: `python docs/benchmarks/drift.py`.

Every format of the library through its own pool, planner and folds; beside them a plain float32
recurrence, and two schemes that others use: a bf16 state written at every token, and a float32
state that is fed corrected values of 16 bits. Writes drift.json and drift.md beside this file.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

from replayinfer import (
    GDNSpec,
    KDASpec,
    LayerSpec,
    Mamba2Spec,
    ReplayDecodeWrapper,
    StatePool,
)
from replayinfer.testing import layer_inputs, layer_weights, recurrence, relative_error

LENGTHS = (64, 256, 1024, 4096)
CAPACITY = 16
HERE = Path(__file__).parent
SPECS: dict[str, LayerSpec] = {
    "mamba2": Mamba2Spec(heads=2, dim=64, state=128, conv_width=0),
    "gdn": GDNSpec(
        heads=2, key_heads=1, dim=128, state=128, gate="log", beta="given", norm="none",
        conv_width=0,
    ),
    "kda": KDASpec(
        heads=2, key_heads=2, dim=128, state=128, gate="log", beta="given", norm="none",
        conv_width=0,
    ),
}  # fmt: skip
FORMATS = ("fp32", "fp32_split", "bf16", "fp16")
PLAIN, WRITTEN, FED = "plain fp32 recurrence", "bf16, written every token", "fp32, fed a 16-bit u"


def short_values(spec: LayerSpec, state: torch.Tensor, token: dict[str, torch.Tensor]):
    """One token of a delta rule in float32, its corrected value rounded to bf16."""
    ratio = spec.heads // spec.key_heads
    k = token["k"].float().repeat_interleave(ratio, 1)
    g = token["g"].float()
    decay = g.exp()[..., None, :] if g.dim() == 3 else g.exp()[..., None, None]
    state = decay * state
    u = token["b"].float()[..., None] * (token["v"].float() - (state @ k[..., None])[..., 0])
    return state + u.bfloat16().float()[..., None] * k[..., None, :]


def measure(family: str, gates: str) -> list[dict[str, object]]:
    spec, generator = SPECS[family], torch.Generator().manual_seed(0)
    weights = layer_weights(spec, generator, gates)
    dtype = torch.bfloat16
    wrappers = {}
    for name in FORMATS:
        pool = StatePool(spec, [0], 1, capacity=CAPACITY, format=name, dtype=dtype)
        pool.bind(0, **weights)
        wrappers[name] = ReplayDecodeWrapper(pool, backend="torch"), pool.alloc(1)
    zero = torch.zeros(1, *spec.state_shape)
    states = {PLAIN: zero, WRITTEN: zero} | ({} if family == "mamba2" else {FED: zero})
    exact, rows = zero.double(), []
    for length in range(1, LENGTHS[-1] + 1):
        token = layer_inputs(spec, 1, 1, dtype, generator, gates)
        _, exact = recurrence(spec, exact, token, weights)
        for name, state in states.items():
            if name == FED:
                states[name] = short_values(spec, state, {n: v[:, 0] for n, v in token.items()})
            else:
                rounding = torch.bfloat16 if name == WRITTEN else None
                _, states[name] = recurrence(
                    spec, state, token, weights, torch.float32, state_rounding=rounding
                )
        for wrapper, sequences in wrappers.values():
            wrapper.plan(sequences)
            wrapper.fold()
            wrapper.run(0, **token)
            wrapper.commit()
        if length in LENGTHS:
            got = {n: w.materialize(int(s[0]))[0][None] for n, (w, s) in wrappers.items()}
            rows += [
                {"family": family, "gates": gates, "tokens": length, "scheme": name,
                 "error": float(f"{relative_error(state, exact):.2e}")}
                for name, state in {**states, **got}.items()
            ]  # fmt: skip
    return rows


def table(rows: list[dict[str, object]]) -> str:
    lines = []
    for family in SPECS:
        for gates in dict.fromkeys(r["gates"] for r in rows):
            here = [r for r in rows if r["family"] == family and r["gates"] == gates]
            lines += ["", f"**{family}**, {gates.replace('_', ' ')} gates:", ""]
            lines += ["| scheme | " + " | ".join(f"{n:,} tokens" for n in LENGTHS) + " |"]
            lines += ["| --- |" + " --- |" * len(LENGTHS)]
            for scheme in (*FORMATS, PLAIN, FED, WRITTEN):
                errors = [f"{r['error']:.1e}" for r in here if r["scheme"] == scheme]
                if errors:
                    lines.append(f"| {scheme} | " + " | ".join(errors) + " |")
    return "\n".join(lines)


def main() -> None:
    torch.set_grad_enabled(False)
    rows = [
        r for family in SPECS for gates in ("realistic", "near_one") for r in measure(family, gates)
    ]
    run = {
        "command": "python docs/benchmarks/drift.py", "torch": torch.__version__,
        "device": platform.processor() or platform.machine(), "capacity": CAPACITY, "rows": rows,
    }  # fmt: skip
    (HERE / "drift.json").write_text(json.dumps(run, indent=1) + "\n")
    (HERE / "drift.md").write_text(
        f"`{run['command']}`: relative error of the state against float64, bf16 inputs, "
        f"L = {CAPACITY}, torch {run['torch']} on a CPU. The first four are this library's "
        "formats; `fp32_split` is read as bf16, yet its recurrence is that of float32.\n"
        + table(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
