"""Quantisation of activations and weights: FP8, INT8, INT4. See README.md for the map."""

from .fp8_quant import fp8_dequant, fp8_quant

__version__ = "0.1.0"

__all__ = ["fp8_dequant", "fp8_quant"]
