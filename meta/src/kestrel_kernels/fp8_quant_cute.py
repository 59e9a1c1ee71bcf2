"""Import path of kestrel-kernels 0.2 for `kestrel_quant.fp8_quant`."""

from kestrel_quant import fp8_quant

__all__ = ["fp8_quant"]
