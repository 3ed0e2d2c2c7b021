"""Layer specifications: one small immutable dataclass per family."""

from .base import InputField, LayerSpec, RowField, WeightField
from .delta import DeltaSpec
from .gdn import GDNSpec
from .kda import KDASpec
from .mamba2 import Mamba2Spec

__all__ = [
    "DeltaSpec",
    "GDNSpec",
    "InputField",
    "KDASpec",
    "LayerSpec",
    "Mamba2Spec",
    "RowField",
    "WeightField",
]
