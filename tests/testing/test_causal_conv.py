"""The convolution oracle against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from replayinfer.testing import causal_conv, relative_error


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_torch_conv1d(width, activation, with_bias, rng):
    x = torch.randn(2, 11, 5, generator=rng)
    weight = torch.randn(5, width, generator=rng)
    bias = torch.randn(5, generator=rng) if with_bias else None
    got = causal_conv(x, weight, bias, activation)
    want = F.conv1d(
        F.pad(x.double().mT, (width - 1, 0)),
        weight.double()[:, None],
        None if bias is None else bias.double(),
        groups=5,
    ).mT
    want = F.silu(want) if activation else want
    assert relative_error(got, want) < 1e-14


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_history_continues_a_run(cut, rng):
    x, weight = torch.randn(11, 5, generator=rng), torch.randn(5, 4, generator=rng)
    whole = causal_conv(x, weight)
    # Short histories are zero-filled on the left, of long ones the last rows count.
    assert torch.equal(causal_conv(x[cut:], weight, history=x[:cut]), whole[cut:])


def test_computing_type_and_unknown_activation(rng):
    x, weight = torch.randn(3, 5, generator=rng), torch.randn(5, 4, generator=rng)
    assert causal_conv(x, weight, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match="activation: got 'gelu'"):
        causal_conv(x, weight, activation="gelu")
