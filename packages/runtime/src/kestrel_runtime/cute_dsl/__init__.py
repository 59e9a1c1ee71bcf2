"""Device toolkit of the CuTe DSL kernels: what attention, sampling and moe share.

    variants    the contract of a family's ``kernels/variants.py``; imports without the DSL
    parameters  scalar arguments of a kernel, listed once; imports without the DSL
    arguments   the fake tensors and the stream that a kernel is compiled with
    portable    functions that the host and kernels share; imports without the DSL
    numeric     numeric types: by name, in PTX, elements per 16 bytes
    ptx         single PTX instructions on 32-bit registers
    hopper      sm_90a: warpgroup matrix products (wgmma), mbarriers, TMA
    pdl         programmatic dependent launch: wait and trigger

Importing this package imports nothing else. A build of a family puts an empty ``kestrel_runtime`` package around it
(tools/cute_build/worker.py), so no module here may import torch or the rest of ``kestrel_runtime``.
"""
