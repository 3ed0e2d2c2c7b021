"""The functions that a modeling module looks up, each with a way around it for replayed states.

A mixer of the peer calls module-level functions with the state of its cache. `install` wraps those
names in one modeling module: a call that carries a `StateHandle` goes to replay, any other call
goes to the function that was there, so that models with other caches in the same process see no
change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from replayinfer import UnsupportedError

from .driver import StateDriver
from .families import Family

__all__ = ["ROUTES", "Route", "StateHandle", "WindowHandle", "install", "uninstall"]

_ORIGINAL = "__replayinfer_original__"


class StateHandle:
    """What a cache layer hands out in place of a state tensor: who keeps it, and its layer."""

    __slots__ = ("driver", "layer")

    def __init__(self, driver: StateDriver, layer: int) -> None:
        self.driver = driver
        self.layer = layer

    def __repr__(self) -> str:
        return f"StateHandle(layer={self.layer})"

    def to(self, *args: Any, **kwargs: Any) -> StateHandle:
        """Itself: a mixer may cast the state that it was given before it hands it back."""
        return self

    # A seam was missed if a handle is used as a tensor: torch asks for this one ...
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        raise _missed_seam(getattr(func, "__name__", str(func)))

    # ... and Python for this one.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _missed_seam(name)


class WindowHandle(StateHandle):
    """In place of a window's pre-convolution rows: what the layer's convolution made of them.

    Attributes
    ----------
    convolved : Tensor, [batch, channels, tokens]
    """

    __slots__ = ("convolved",)

    def __init__(self, driver: StateDriver, layer: int, convolved: torch.Tensor) -> None:
        super().__init__(driver, layer)
        self.convolved = convolved


def _missed_seam(where: str) -> UnsupportedError:
    return UnsupportedError(
        f"state: got a replayed state in {where}; allowed only in the functions that install() "
        "wraps; make a new cache, and leave hub kernels and compilation of the mixer off"
    )


@dataclass(frozen=True)
class Route:
    """One function of the peer and its stand-in.

    Attributes
    ----------
    state : str
        The parameter that carries the state.
    parameters : tuple of str
        Leading parameters that the stand-in takes by the same names; checked at `install`.
    stand_in : callable
        Called as ``stand_in(original, *args, **kwargs)`` with the arguments of the call.
    """

    state: str
    parameters: tuple[str, ...]
    stand_in: Callable[..., Any]


def _conv_step(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    conv_state: StateHandle,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    rows = hidden_states.transpose(1, 2)  # [batch, tokens, channels]
    return conv_state.driver.conv(conv_state.layer, rows).transpose(1, 2)


def _conv_window(
    original: Callable[..., Any], hidden_states: WindowHandle, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return hidden_states.convolved


def _mamba2_step(
    original: Callable[..., Any],
    state: StateHandle,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *args: Any,
    z: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    # A, D and dt_bias were bound with the layer; dt comes expanded over the head's channels.
    inputs = {"x": hidden_states, "dt": dt[..., 0], "B": B, "C": C}
    if z is not None:
        inputs["z"] = z
    y = state.driver.run(state.layer, **{name: x.unsqueeze(1) for name, x in inputs.items()})
    return y.squeeze(1)


def _mamba2_chunk(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *args: Any,
    initial_states: StateHandle,
    **kwargs: Any,
) -> Any:
    driver, layer = initial_states.driver, initial_states.layer
    if driver.in_window:
        inputs = {"x": hidden_states, "dt": dt, "B": B, "C": C}
        if kwargs.get("z") is not None:
            inputs["z"] = kwargs["z"]
        return driver.run(layer, **inputs), initial_states
    return original(
        hidden_states, dt, A, B, C, *args, initial_states=driver.full_state(layer), **kwargs
    )


def _delta_step(
    original: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: StateHandle,
    **kwargs: Any,
) -> tuple[torch.Tensor, StateHandle]:
    # Some versions of the peer repeat key heads up to the value heads; one of each group is enough.
    ratio = query.shape[2] // initial_state.driver.spec.key_heads
    y = initial_state.driver.run(
        initial_state.layer,
        q=query[:, :, ::ratio],
        k=key[:, :, ::ratio],
        v=value,
        g=g,
        b=beta,
    )
    return y, initial_state


def _delta_chunk(
    original: Callable[..., Any], *args: Any, initial_state: StateHandle, **kwargs: Any
) -> Any:
    driver, layer = initial_state.driver, initial_state.layer
    if driver.in_window:
        return _delta_step(original, *args, initial_state=initial_state, **kwargs)
    return original(*args, initial_state=driver.full_state(layer), **kwargs)


ROUTES: dict[str, Route] = {
    "conv_step": Route("conv_state", ("hidden_states", "conv_state"), _conv_step),
    "conv_window": Route("hidden_states", ("hidden_states",), _conv_window),
    "mamba2_step": Route("state", ("state", "hidden_states", "dt", "A", "B", "C"), _mamba2_step),
    "mamba2_chunk": Route("initial_states", ("hidden_states", "dt", "A", "B", "C"), _mamba2_chunk),
    "delta_step": Route("initial_state", ("query", "key", "value"), _delta_step),
    "delta_chunk": Route("initial_state", ("query", "key", "value"), _delta_chunk),
}
"""By the names that `families` uses."""


def install(family: Family, module: ModuleType) -> None:
    """Wrap the functions of `family` in its modeling module; a second call does nothing.

    Raises
    ------
    UnsupportedError
        The module lacks a function, or one of them takes other arguments than expected (another
        version of the peer); nothing is wrapped then.
    """
    wrapped: dict[str, Callable[..., Any]] = {}
    for name, route_name in family.kind.routes.items():
        original = getattr(module, name, None)
        if original is None:
            raise UnsupportedError(
                f"{module.__name__}: got no function {name}; allowed a version of transformers "
                "whose mixers call it; install a version that the extra allows"
            )
        if not hasattr(original, _ORIGINAL):
            wrapped[name] = _dispatcher(original, ROUTES[route_name])
    for name, dispatcher in wrapped.items():
        setattr(module, name, dispatcher)


def uninstall(family: Family, module: ModuleType) -> None:
    """Put back what `install` wrapped; caches made before it stop working with a clear error."""
    for name in family.kind.routes:
        original = getattr(getattr(module, name, None), _ORIGINAL, None)
        if original is not None:
            setattr(module, name, original)


def _dispatcher(original: Callable[..., Any], route: Route) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)
    if route.state not in names or tuple(names[: len(route.parameters)]) != route.parameters:
        raise UnsupportedError(
            f"{original.__name__}: got parameters {', '.join(names)}; allowed "
            f"{', '.join(route.parameters)} first and {route.state} among them; install a version "
            "of transformers that the extra allows"
        )
    state, position, stand_in = route.state, names.index(route.state), route.stand_in

    @functools.wraps(original)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        carried = args[position] if len(args) > position else kwargs.get(state)
        if isinstance(carried, StateHandle):
            return stand_in(original, *args, **kwargs)
        return original(*args, **kwargs)

    setattr(dispatcher, _ORIGINAL, original)
    return dispatcher
