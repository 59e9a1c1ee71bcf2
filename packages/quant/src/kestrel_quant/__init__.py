"""Quantisation of activations and weights: FP8, INT8, INT4. See README.md for the map."""

from .fp8_quant import fp8_dequant, fp8_quant
from .int4_quant import int4_dequant, int4_quant
from .int8_quant import int8_dequant, int8_quant
from .w4_checkpoints import w4_from_awq, w4_from_compressed_tensors, w4_from_gptq
from .w4a16 import W4Weight, pack_w4, w4a16_linear
from .w4a16_token import w4a16_token, w4a16_token_covers

__version__ = "0.1.0"

__all__ = [
    "W4Weight",
    "fp8_dequant",
    "fp8_quant",
    "int4_dequant",
    "int4_quant",
    "int8_dequant",
    "int8_quant",
    "pack_w4",
    "w4_from_awq",
    "w4_from_compressed_tensors",
    "w4_from_gptq",
    "w4a16_linear",
    "w4a16_token",
    "w4a16_token_covers",
]
