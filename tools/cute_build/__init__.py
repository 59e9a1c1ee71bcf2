"""Builds the CuTe DSL kernels of a family ahead of time, without a GPU: shared by every family that has some.

A family names its kernels in ``<package>/kernels/variants.py``, which must import without the DSL:

    VARIANTS   a tuple of frozen dataclasses, each with
        name             the entry point without its architecture, for example "topk_bf16_n64"
        vector_loads     True when the kernel claims 16-byte loads; the build checks the PTX
        kernel(arch)     (kernel object, arguments for cute.compile); imports the DSL itself

driver.py shares the variants out among processes, links their objects into one library and writes its manifest;
worker.py compiles; cubin.py reads registers and stack frames out of the machine code; hook.py is the hatchling build
hook around it. ``python tools/cute_build packages/sampling out`` does the same by hand and can keep the PTX.
"""
