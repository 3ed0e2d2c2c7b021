"""Backends by name. `auto` takes the first that supports the pool and says which in `.name`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import InputError, UnsupportedError
from ..pools import StatePool
from .base import Backend, PrefillBackend

__all__ = ["available", "register", "select", "select_prefill"]


def _torch() -> Backend:
    from .torch import TorchBackend

    return TorchBackend()


def _triton() -> Backend:
    from .triton import TritonBackend

    return TritonBackend()


# In the order `auto` tries them; factories, so that nothing is imported before it is used.
_FACTORIES: dict[str, Callable[[], Backend]] = {"triton": _triton, "torch": _torch}
_MADE: dict[str, Backend] = {}


def available() -> list[str]:
    """Names that `select` takes, in the order ``auto`` tries them."""
    return list(_FACTORIES)


def register(name: str, factory: Callable[[], Backend], *, first: bool = False) -> None:
    """Add a backend under a new name; `first` lets ``auto`` prefer it.

    Raises
    ------
    InputError
        The name is taken.
    """
    if name in _FACTORIES or name == "auto":
        raise InputError(f"name: got {name!r}; allowed a name not in use; choose another")
    if first:
        rest = dict(_FACTORIES)
        _FACTORIES.clear()
        _FACTORIES[name] = factory
        _FACTORIES.update(rest)
    else:
        _FACTORIES[name] = factory


def select(name: str | Backend, pool: StatePool) -> Backend:
    """The backend of that name, or for ``"auto"`` the first that supports `pool`.

    Raises
    ------
    UnsupportedError
        An unknown name, or a backend that does not support the pool, with its reason.
    """
    candidates: Iterable[Backend]
    if not isinstance(name, str):
        candidates = [name]
    elif name == "auto":
        # Each is made only if those before it refuse.
        candidates = map(_make, [n for n in _FACTORIES if n != "triton" or _prefer_triton(pool)])
    elif name in _FACTORIES:
        candidates = [_make(name)]
    else:
        raise UnsupportedError(
            f"backend: got {name!r}; allowed auto, {', '.join(_FACTORIES)}; pick one"
        )
    reasons = []
    for backend in candidates:
        reason = backend.supports(pool)
        if reason is None:
            return backend
        reasons.append(f"{backend.name} ({reason})")
    raise UnsupportedError(
        f"backend: got {name!r}; allowed one that supports this pool; refused: {'; '.join(reasons)}"
    )


def _fla(pool: StatePool) -> PrefillBackend:
    from .fla import FlaPrefill

    return FlaPrefill(select("auto", pool), _make("torch"))


def _mamba_ssm(pool: StatePool) -> PrefillBackend:
    from .mamba_ssm import MambaSsmPrefill

    return MambaSsmPrefill(select("auto", pool), _make("torch"))


def _reference(pool: StatePool) -> PrefillBackend:
    from .torch import TorchBackend

    return TorchBackend()


# In the order `auto` tries them.
_PREFILL: dict[str, Callable[[StatePool], PrefillBackend]] = {
    "fla": _fla,
    "mamba_ssm": _mamba_ssm,
    "torch": _reference,
}


def select_prefill(name: str | PrefillBackend, pool: StatePool) -> PrefillBackend:
    """The backend of that name, or for ``"auto"`` the first that can prefill `pool`.

    ``"torch"`` is the reference, and what ``"auto"`` takes on a CPU or in float32.

    Raises
    ------
    UnsupportedError
        An unknown name, or a backend that does not support the pool, with its reason.
    """
    if not isinstance(name, str):
        candidates: Iterable[PrefillBackend] = [name]
    elif name == "auto":
        candidates = (make(pool) for make in _PREFILL.values())
    elif name in _PREFILL:
        candidates = [_PREFILL[name](pool)]
    else:
        raise UnsupportedError(
            f"backend: got {name!r}; allowed auto, {', '.join(_PREFILL)} for a prefill; pick one, "
            "or pass an object"
        )
    reasons = []
    for backend in candidates:
        reason = backend.supports(pool)
        if reason is None:
            return backend
        reasons.append(f"{backend.name} ({reason})")
    raise UnsupportedError(
        f"backend: got {name if isinstance(name, str) else name.name!r}; allowed one that can "
        f"prefill this pool; refused: {'; '.join(reasons)}"
    )


def _prefer_triton(pool: StatePool) -> bool:
    """Whether ``auto`` may take it: on a CPU it is an interpreter, for checking kernels."""
    return pool.device.type != "cpu"


def _make(name: str) -> Backend:
    if name not in _MADE:
        _MADE[name] = _FACTORIES[name]()
    return _MADE[name]
