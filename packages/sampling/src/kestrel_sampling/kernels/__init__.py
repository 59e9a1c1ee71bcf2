"""CuTe DSL kernels. Only variants.py imports without the DSL; the others are compiled when the wheel is built."""
