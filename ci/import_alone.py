"""`import_alone.py kestrel_norm ...`: installed packages import and load their binaries, without a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import torch

from kestrel_runtime import Binary


def main(name: str) -> None:
    module = importlib.import_module(name)
    assert not torch.cuda.is_initialized(), "the import touched the GPU"
    assert str(module.__file__).startswith(sys.prefix), f"imported from {module.__file__}"
    binary = Binary(name)
    functions = binary.manifest.functions if binary.manifest else ()
    for function in functions:
        binary.function(function)
    tvm_ffi = importlib.metadata.version("apache-tvm-ffi")
    print(f"{name} {module.__version__} imports, {len(functions)} entry points, with apache-tvm-ffi {tvm_ffi}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
