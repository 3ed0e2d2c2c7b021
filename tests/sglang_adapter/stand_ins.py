"""SGLang's side of a slot, in a few lines: a state pool, and models as it lays them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from replayinfer import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from replayinfer.integrations.sglang.layers import read_layers
from replayinfer.integrations.sglang.options import Options
from replayinfer.integrations.sglang.slots import SlotReplay
from replayinfer.testing import layer_inputs, layer_weights, recurrence

LAYERS = (1, 4)
SLOTS = 9

SPECS: dict[str, LayerSpec] = {
    "gdn": GDNSpec(heads=4, dim=8, state=16, key_heads=2, conv_width=0),
    "kda": KDASpec(heads=2, dim=8, state=16, key_heads=2, conv_width=0),
    "kda-bounded": KDASpec(
        heads=2, dim=8, state=16, key_heads=2, conv_width=0, gate="bounded", lower_bound=-4.0
    ),
    "mamba2": Mamba2Spec(heads=4, dim=8, state=16, groups=2, conv_width=0),
}


class RadixLinearAttention(torch.nn.Module):
    """The attributes of SGLang's layer of the same name that the adapter reads."""

    def __init__(self, layer: int, spec: Any, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layer_id = layer
        self.num_q_heads = self.num_k_heads = spec.key_heads
        self.num_v_heads = spec.heads
        self.head_q_dim = self.head_k_dim = spec.state
        self.head_v_dim = spec.dim
        self.lower_bound = getattr(spec, "lower_bound", None) if spec.gate == "bounded" else None
        self.A_log = torch.nn.Parameter(weights["A_log"].view(1, 1, -1, 1))
        self.dt_bias = torch.nn.Parameter(weights["dt_bias"].flatten())


class MambaMixer2(torch.nn.Module):
    """Likewise."""

    def __init__(self, spec: Any, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tp_size = 2
        self.num_heads, self.n_groups = 2 * spec.heads, 2 * spec.groups
        self.head_dim, self.ssm_state_size = spec.dim, spec.state
        for name in ("A", "D", "dt_bias"):
            setattr(self, name, torch.nn.Parameter(weights[name]))


def model(spec: LayerSpec, rng: torch.Generator) -> tuple[torch.nn.Module, dict[int, Any]]:
    """A model of two recurrent layers among others, and their weights by layer."""
    weights = {layer: layer_weights(spec, rng) for layer in LAYERS}
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(6))
    for layer in LAYERS:
        own = {name: w.float() for name, w in weights[layer].items() if w is not None}
        if spec.family == "mamba2":
            module: Any = MambaMixer2(spec, own)
        else:
            module = RadixLinearAttention(layer, spec, own)
        layers[layer] = torch.nn.ModuleDict({"mixer": module})
    whole = torch.nn.Module()
    whole.model = torch.nn.ModuleDict({"layers": layers})
    return whole, weights


class Server:
    """State slots as SGLang moves them, with replay beside them, against an oracle of float64.

    ``truth[slot]`` is the state ``[layers, heads, dim, state]`` after every token of the slot.
    """

    def __init__(self, name: str, rng: torch.Generator, **options: Any) -> None:
        self.spec, self.rng = SPECS[name], rng
        backend = options.pop("backend", "torch")
        dtype = options.pop("dtype", torch.float32)
        window, windows = options.pop("window", 1), options.pop("windows", None)
        self.states = torch.full((len(LAYERS), SLOTS, *self.spec.state_shape), torch.nan)
        whole, self.weights = model(self.spec, rng)
        family = self.spec.family
        self.replay = SlotReplay(
            read_layers(whole, family), list(LAYERS), self.states, dtype,  # type: ignore[arg-type]
            Options(**options), window=window, windows=windows, backend=backend,
        )  # fmt: skip
        self.whole, self.dtype = whole, dtype
        self.states[:, 0] = torch.nan  # padded rows of SGLang may write anything there
        self.truth: dict[int, torch.Tensor] = {}

    def clear(self, *slots: int) -> None:
        at = torch.tensor(slots)
        self.replay.reset_slots(at)
        self.states[:, at] = 0
        for slot in slots:
            self.truth[slot] = torch.zeros(len(LAYERS), *self.spec.state_shape).double()

    def copy(self, source: int, target: int) -> None:
        a, b = torch.tensor([source]), torch.tensor([target])
        self.states[:, b] = self.states[:, a]
        self.replay.copy_slots(a, b)
        self.truth[target] = self.truth[source].clone()

    def move(self, source: int, target: int) -> None:
        """To the host and back, into another slot; the old one is poisoned."""
        a, b = torch.tensor([source]), torch.tensor([target])
        kept, ours = self.states[:, a].clone(), self.replay.get_cpu_slots(a)
        self.states[:, a] = torch.nan
        for field in self.replay.pool.inputs.fields.values():
            field[:, self.replay._input_pages(a)] = torch.nan
        self.states[:, b] = kept
        self.replay.load_cpu_slots(ours, b)
        self.truth[target] = self.truth.pop(source)

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        made = layer_inputs(self.spec, tokens, 1, torch.float32, self.rng)
        gates = ("dt", "a", "b", "g")
        return {n: v if n in gates else v.to(self.dtype) for n, v in made.items() if n != "z"}

    def advance(self, slot: int, index: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The oracle: outputs of these tokens, and the truth moved on."""
        state = self.truth[slot][index][None]
        y, after = recurrence(self.spec, state, inputs, self.weights[LAYERS[index]])
        self.truth[slot][index] = after[0]
        return y

    def extend(self, slots: list[int], tokens: int) -> None:
        """A prefill as SGLang does it: from the states as they lie in the slots, to them."""
        at = torch.tensor(slots, dtype=torch.int32)
        self.replay.before_extend(at)
        for slot in slots:
            if slot <= 0:
                continue
            for index, layer in enumerate(LAYERS):
                inputs = self.inputs(tokens)
                plain = self.states[index, slot][None].double()
                _, after = recurrence(self.spec, plain, inputs, self.weights[layer])
                self.states[index, slot] = after[0].float()
                self.advance(slot, index, inputs)
        self.replay.after_extend(at)

    def decode(self, slots: list[int], track: dict[int, int] | None = None) -> list[Any]:
        """A decode step; `track` names the slots that are copied after it, and where to.

        Returns pairs of an output and the oracle's.
        """
        at = torch.tensor(slots, dtype=torch.int32)
        self.replay.begin(at)
        pairs = []
        for index, layer in enumerate(LAYERS):
            each = [self.inputs(1) for _ in slots]
            joined = {name: torch.cat([one[name] for one in each]) for name in each[0]}
            y = self.replay.readout(layer, **joined)
            for i, slot in enumerate(slots):
                if slot <= 0:
                    assert not y[i].any()
                else:
                    pairs.append((y[i], self.advance(slot, index, each[i])[0]))
        self.replay.finish()
        if track is not None:
            mask = torch.tensor([slot in track for slot in slots])
            targets = torch.tensor([track.get(slot, -1) for slot in slots])
            self.replay.fold_now(at, mask)
            for source, target in track.items():
                self.states[:, target] = self.states[:, source]
                self.truth[target] = self.truth[source].clone()
            self.replay.written(targets, mask, plain=False)
        return pairs

    def verify(
        self,
        slots: list[int],
        accepted: list[int],
        track: dict[int, tuple[int, int]] | None = None,
        pads: int = 0,
    ) -> list[Any]:
        """A verify of windows, of which so many tokens are taken.

        `track` names slots whose states after some token of the window are wanted, by that token
        and the slot to write to. `pads` rows are the graph's own: SGLang's counts have none for
        them.
        """
        window, bucket = self.replay.window, len(slots) + pads
        self.replay.begin(torch.tensor([*slots, *[-1] * pads], dtype=torch.int32), verify=True)
        pairs = []
        track = track or {}
        tracked = {slot: self.truth[slot].clone() for slot in track}
        for index, layer in enumerate(LAYERS):
            each = [self.inputs(window) for _ in range(bucket)]
            joined = {name: torch.cat([one[name] for one in each]) for name in each[0]}
            y = self.replay.readout(layer, **joined)
            assert not y[len(slots) :].any()
            for i, slot in enumerate(slots):
                if slot <= 0:
                    assert not y[i].any()
                    continue
                before = self.truth[slot][index][None].clone()
                want, _ = recurrence(self.spec, before, each[i], self.weights[layer])
                pairs.append((y[i], want[0]))
                cuts = {"kept": accepted[i]}
                if slot in track:
                    cuts["tracked"] = track[slot][0] + 1
                for name, tokens in cuts.items():
                    if not tokens:
                        continue
                    some = {n: v[:, :tokens] for n, v in each[i].items()}
                    _, after = recurrence(self.spec, before, some, self.weights[layer])
                    (self.truth if name == "kept" else tracked)[slot][index] = after[0]
        self.replay.pause()
        last = torch.tensor(accepted, dtype=torch.int32) - 1
        if track:
            steps = torch.tensor([track[s][0] if s in track else -1 for s in slots])
            # Where nothing is tracked, a slot that is still somebody's.
            targets = torch.tensor([track[s][1] if s in track else max(slots) for s in slots])
            self.replay.accept(bucket, last, targets, steps)
        else:
            self.replay.accept(bucket, last)
        for slot, (_, target) in track.items():
            self.truth[target] = tracked[slot]
        return pairs

    def state(self, slot: int) -> torch.Tensor:
        """The whole state of a slot, as a prefill would find it."""
        self.replay.before_extend(torch.tensor([slot], dtype=torch.int32))
        whole = self.states[:, slot].clone()
        self.replay.after_extend(torch.tensor([slot], dtype=torch.int32))
        return whole


def namespace(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)
