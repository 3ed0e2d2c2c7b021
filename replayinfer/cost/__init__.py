"""What a step costs: its bytes, its time on a GPU, and the buffer length that makes it least."""

from .advise import Advice, advise, best_length
from .bytes import SteadyState, accepted_mean, best_capacity, fold_bytes, readout_bytes, step_bytes
from .devices import DEVICES, Device, get_device
from .model import KERNELS, STANDARD, KernelConstants, StepCost, latency_us
from .weights import DecodeWeights, decode_weights, raw_config

__all__ = [
    "DEVICES",
    "KERNELS",
    "STANDARD",
    "Advice",
    "DecodeWeights",
    "Device",
    "KernelConstants",
    "SteadyState",
    "StepCost",
    "accepted_mean",
    "advise",
    "best_capacity",
    "best_length",
    "decode_weights",
    "fold_bytes",
    "get_device",
    "latency_us",
    "raw_config",
    "readout_bytes",
    "step_bytes",
]
