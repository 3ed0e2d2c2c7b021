"""Layer specifications: one small immutable dataclass per family."""

from .base import InputField, LayerSpec, RowField, WeightField
from .gdn import GDNSpec
from .mamba2 import Mamba2Spec

__all__ = ["GDNSpec", "InputField", "LayerSpec", "Mamba2Spec", "RowField", "WeightField"]
