"""A dictionary of sequences that knows nothing of pages, rows or folds, for stateful tests.

Each sequence is the list of its float64 states, one for every committed token, and the list of its
pre-convolution rows. So fork is a copy, rollback is a shorter list, a rejected window is never
appended, and a property test can compare a pool and its wrapper with it after any operation. Only
meant for small layers: it keeps everything.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError, StaleHandleError
from ..spec import LayerSpec
from .reference import causal_conv, recurrence


@dataclass
class _Sequence:
    """One sequence; ``base`` is the token count that it was allocated or seeded with."""

    base: int
    states: dict[int, list[Tensor]]  # by layer: the state at base, then after each token
    rows: dict[int, Tensor]  # by layer: pre-convolution rows so far, [count, channels]

    @property
    def committed(self) -> int:
        return len(next(iter(self.states.values()))) - 1

    def copy(self) -> _Sequence:
        states = {layer: list(states) for layer, states in self.states.items()}
        return _Sequence(self.base, states, dict(self.rows))


class DictModel:
    """Sequences of one layer family, advanced by the float64 oracle.

    Handles are the caller's: pass the pool's own, so that both sides speak of the same sequence.

    Parameters
    ----------
    spec : the layer
    layers : model layer indices, as the pool's
    dtype : computing type; float32 makes it the plain float32 computation

    Examples
    --------
    >>> from replayinfer.spec import Mamba2Spec
    >>> spec = Mamba2Spec(heads=2, dim=4, state=8, conv_width=0)
    >>> model = DictModel(spec, layers=[0])
    >>> model.bind(0, A=-torch.ones(2))
    >>> model.alloc(7)
    >>> x, B = torch.ones(3, 2, 4), torch.ones(3, 1, 8)
    >>> y = model.step(7, {0: {"x": x, "dt": torch.zeros(3, 2), "B": B, "C": B}}, accepted=2)
    >>> y[0].shape, model.tokens(7)
    (torch.Size([3, 2, 4]), 2)
    """

    def __init__(
        self,
        spec: LayerSpec,
        layers: list[int],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.spec = spec
        self.layers = list(layers)
        self.dtype = dtype
        self._weights: dict[int, dict[str, Tensor | None]] = {}
        self._sequences: dict[Hashable, _Sequence] = {}

    def bind(self, layer: int, **weights: Tensor | None) -> None:
        """Take the weights of a layer, with the keywords of ``pool.bind``."""
        self._weights[layer] = weights

    def live(self) -> list[Hashable]:
        """Return the handles that exist, in the order of their creation."""
        return list(self._sequences)

    def alloc(self, seq: Hashable) -> None:
        """Start an empty sequence: zero states, zero convolution windows, no tokens."""
        zero = torch.zeros(self.spec.state_shape, dtype=self.dtype)
        self.seed_new(seq, dict.fromkeys(self.layers, zero), tokens=0)

    def seed_new(
        self,
        seq: Hashable,
        states: Mapping[int, Tensor],
        *,
        conv: Mapping[int, Tensor] | None = None,
        tokens: int,
    ) -> None:
        """Start a sequence from a prefill's final states: ``alloc``, then :meth:`seed`."""
        if seq in self._sequences:
            raise InputError(
                f"seq: got {seq!r}, which is live; allowed a new handle; free it first"
            )
        self._sequences[seq] = _Sequence(0, {}, {})
        self.seed(seq, states, conv=conv, tokens=tokens)

    def seed(
        self,
        seq: Hashable,
        states: Mapping[int, Tensor],
        *,
        conv: Mapping[int, Tensor] | None = None,
        tokens: int,
        layout: str = "vk",
    ) -> None:
        """Replace all of a sequence, as ``pool.seed``: ``conv`` by layer is [channels, taps]."""
        self._find(seq)
        first = {
            layer: [(states[layer].mT if layout == "kv" else states[layer]).to(self.dtype)]
            for layer in self.layers
        }
        none = torch.zeros(0, self.spec.conv_channels)
        rows = {layer: none if conv is None else conv[layer].mT for layer in self.layers}
        self._sequences[seq] = _Sequence(tokens, first, rows)

    def fork(self, seq: Hashable, child: Hashable) -> None:
        """Copy a sequence under a new handle."""
        if child in self._sequences:
            raise InputError(f"child: got {child!r}, which is live; allowed a new handle")
        self._sequences[child] = self._find(seq).copy()

    def free(self, seq: Hashable) -> None:
        """Forget a sequence."""
        self._find(seq)
        del self._sequences[seq]

    def rollback(self, seq: Hashable, rows: int) -> None:
        """Take back the last ``rows`` committed tokens; what came with a seed stays."""
        found = self._find(seq)
        if not 0 <= rows <= found.committed:
            raise InputError(f"rows: got {rows}; allowed 0..{found.committed}")
        if rows:
            for layer in self.layers:
                del found.states[layer][-rows:]
                # Rows are only there if the convolutions were run here as well.
                found.rows[layer] = found.rows[layer][: max(0, len(found.rows[layer]) - rows)]

    def step(
        self,
        seq: Hashable,
        inputs: Mapping[int, Mapping[str, Tensor]],
        accepted: int | None = None,
        *,
        conv: Mapping[int, Tensor] | None = None,
    ) -> dict[int, Tensor]:
        """Run a window through every layer and commit its first ``accepted`` tokens.

        Parameters
        ----------
        seq : the handle
        inputs : by layer, the keywords of ``wrapper.run``, each [window, ...] without a batch axis
        accepted : 0..window; None commits all of it
        conv : by layer, the window's pre-convolution rows [window, channels], whose accepted part
            joins the convolution's history; read their outputs from :meth:`conv` *before* the step

        Returns
        -------
        dict
            By layer, the outputs of all tokens of the window, accepted or not.
        """
        found = self._find(seq)
        if set(inputs) != set(self.layers):
            raise InputError(f"inputs: got layers {sorted(inputs)}; allowed {sorted(self.layers)}")
        window = len(next(iter(inputs[self.layers[0]].values())))
        taken = window if accepted is None else accepted
        if not 0 <= taken <= window:
            raise InputError(f"accepted: got {accepted}; allowed 0..{window}")
        outputs: dict[int, Tensor] = {}
        for layer in self.layers:
            trace: list[Tensor] = []
            outputs[layer], _ = recurrence(
                self.spec,
                found.states[layer][-1],
                inputs[layer],
                self._weights[layer],
                self.dtype,
                trace=trace,
            )
            found.states[layer] += trace[:taken]
            if conv is not None:
                found.rows[layer] = torch.cat([found.rows[layer], conv[layer][:taken]])
        return outputs

    def conv(self, seq: Hashable, layer: int, rows: Tensor) -> Tensor:
        """Return the convolution of a window's rows [window, channels]; changes nothing."""
        weights = self._weights[layer]
        weight = weights["conv_weight"]
        assert weight is not None
        return causal_conv(
            rows,
            weight,
            weights.get("conv_bias"),
            self.spec.conv_activation,
            self._find(seq).rows[layer],
            self.dtype,
        )

    def tokens(self, seq: Hashable) -> int:
        """Return the token count, seeded tokens included."""
        found = self._find(seq)
        return found.base + found.committed

    def committed(self, seq: Hashable) -> int:
        """Return how many tokens were committed since the last alloc or seed."""
        return self._find(seq).committed

    def state(self, seq: Hashable, layer: int) -> Tensor:
        """Return the state after all committed tokens, [heads, dim, state]."""
        return self._find(seq).states[layer][-1]

    def materialize(self, seq: Hashable) -> Tensor:
        """Return the states of all layers, [layers, heads, dim, state], as the pool's does."""
        return torch.stack([self.state(seq, layer) for layer in self.layers])

    def conv_window(self, seq: Hashable, layer: int) -> Tensor:
        """Return the last ``width - 1`` pre-convolution rows, oldest first, zeros before them."""
        rows, taps = self._find(seq).rows[layer], max(self.spec.conv_width - 1, 0)
        padded = torch.cat([rows.new_zeros(taps, rows.shape[1]), rows])
        return padded[len(padded) - taps :]

    def _find(self, seq: Hashable) -> _Sequence:
        if seq not in self._sequences:
            raise StaleHandleError(f"seq: got {seq!r}; allowed live handles {self.live()}")
        return self._sequences[seq]
