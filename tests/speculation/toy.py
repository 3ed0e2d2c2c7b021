"""A language model of one kind of recurrent layer and a few tokens, and its own float64 decoding.

A token is a row of random tables; two layers see it in turn, the second with what the first said.
"""

from __future__ import annotations

import functools

import torch

from replayinfer import Draft, ReplayDecodeWrapper, ReplayTarget, StatePool
from replayinfer.testing import causal_conv, conv_inputs, layer_inputs, layer_weights, recurrence

from ..pools.kit import poison_pool

VOCABULARY = 11
LAYERS = (0, 3)


class Toy:
    """`forward` over a plan, and `next_logits` of a whole text by the oracle."""

    def __init__(self, spec, rng, **options):
        options = {"capacity": 9, "max_window": 5, "page_rows": 4} | options
        sequences = options.pop("max_sequences", 4)
        self.spec = spec
        self.pool = StatePool(
            spec, LAYERS, sequences, checkpoint_pages=2 * sequences,
            input_pages=6 * sequences, **options,
        )  # fmt: skip
        poison_pool(self.pool)
        self.weights = {layer: layer_weights(spec, rng) for layer in LAYERS}
        for layer, weights in self.weights.items():
            self.pool.bind(layer, **weights)
        draw = (spec, VOCABULARY, 1, torch.float32, rng)
        self.tables = {
            layer: {name: x[0] for name, x in layer_inputs(*draw).items()} for layer in LAYERS
        }
        self.rows = {layer: conv_inputs(*draw)[0] for layer in LAYERS}
        size = spec.heads * spec.dim + spec.conv_channels
        self.head = torch.randn(size, VOCABULARY, generator=rng, dtype=torch.float64)
        self.mix = torch.randn(VOCABULARY, generator=rng, dtype=torch.float64)
        self.wrapper = ReplayDecodeWrapper(self.pool, backend="torch")
        self.target = ReplayTarget(self.wrapper, self.forward)

    def forward(self, plan, tokens):
        """Logits of every node, ``[bucket, window, vocabulary]``."""
        said, total = None, 0
        for layer in LAYERS:
            inputs, rows = self._inputs(layer, tokens, said)
            conv = self.wrapper.conv(layer, rows)
            y = self.wrapper.run(layer, **inputs)
            said = self._say(conv, y)
            total = total + said
        return total

    @functools.cached_property
    def _known(self):
        return {}

    def next_logits(self, text):
        """After the whole text, by the float64 recurrence from the zero state."""
        key = tuple(text)
        if key not in self._known:
            tokens, said, total = torch.tensor([key]), None, 0
            for layer in LAYERS:
                inputs, rows = self._inputs(layer, tokens, said)
                weights = self.weights[layer]
                conv = causal_conv(
                    rows, weights["conv_weight"], weights["conv_bias"], self.spec.conv_activation
                )
                state = torch.zeros(1, *self.spec.state_shape)
                y, _ = recurrence(self.spec, state, inputs, weights)
                said = self._say(conv, y)
                total = total + said
            self._known[key] = total[0, -1]
        return self._known[key]

    def decode(self, text, count):
        """Greedy continuation by the oracle."""
        text, start = list(text), len(text)
        while len(text) < start + count:
            text.append(int(self.next_logits(text).argmax()))
        return text[start:]

    def assert_greedy(self, prompt, text):
        """Each token after the prompt is the oracle's best after those before it.

        Float32 may turn two whose logits, of a size of 5, are closer than 100 of its roundings.
        """
        assert text[: len(prompt)] == prompt
        for place in range(len(prompt), len(text)):
            logits = self.next_logits(text[:place])
            assert logits.max() - logits[text[place]] < 1e-4, place

    def _inputs(self, layer, tokens, said):
        rows = self.rows[layer][tokens]
        if said is not None:  # what the layer below made of the text so far
            rows = rows * torch.tanh(said @ self.mix)[..., None].to(rows.dtype)
        return {name: table[tokens] for name, table in self.tables[layer].items()}, rows

    def _say(self, conv, y):
        return torch.cat([y.double().flatten(2), conv.double()], -1) @ self.head


class Guesser:
    """Drafts that are right for a random while; as chains, or with the right one on a branch."""

    def __init__(self, toy, rng, *, trees=False, right=0.7):
        self.toy, self.rng, self.trees, self.right = toy, rng, trees, right
        self.asked = 0

    def __call__(self, contexts):
        self.asked += 1
        return {sequence: self._draft(text) for sequence, text in contexts.items()}

    def _draft(self, text):
        count = self._below(self.toy.pool.max_window)
        if not self.trees:
            tokens = self.toy.decode(text, count)
            return Draft(tuple(self._spoil(t) for t in tokens))
        tokens, parents, line = [], [], [(-1, list(text))]
        for _ in range(count):
            parent, before = line[self._below(len(line))]
            token = self._spoil(self.toy.decode(before, 1)[0])
            line.append((len(tokens), [*before, token]))
            tokens.append(token)
            parents.append(parent)
        return Draft(tuple(tokens), tuple(parents))

    def _spoil(self, token):
        if torch.rand((), generator=self.rng) < self.right:
            return token
        return (token + 1 + self._below(VOCABULARY - 1)) % VOCABULARY

    def _below(self, limit):
        return int(torch.randint(0, limit, (), generator=self.rng))
