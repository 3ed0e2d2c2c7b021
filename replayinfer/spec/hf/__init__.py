"""Hugging Face configs: which layers are recurrent, which attend, and with what shapes.

`read_config` takes a config and gives `ModelLayers`; transformers itself is not needed.
"""

from .attention import AttentionSpec, LatentAttentionSpec
from .layers import ModelLayers
from .read import MODEL_TYPES, read_config

__all__ = ["MODEL_TYPES", "AttentionSpec", "LatentAttentionSpec", "ModelLayers", "read_config"]
