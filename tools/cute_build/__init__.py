"""Builds the CuTe DSL kernels of a family ahead of time, without a GPU.

A family lists its kernels as VARIANTS in ``<package>/kernels/variants.py``; kestrel_runtime.cute_dsl.variants has the
contract. driver.py distributes the variants among processes, links their objects into one library and writes its
manifest. worker.py compiles, cubin.py reads registers and stack frames from the machine code, and hook.py is the
hatchling build hook. ``python tools/cute_build packages/sampling out`` builds without an install and can keep the PTX.
"""
