"""`import_alone.py kestrel_norm`: the installed package imports, and its binary loads, on a machine without a GPU."""

from __future__ import annotations

import importlib
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
    print(f"{name} {module.__version__} imports alone, {len(functions)} entry points")


if __name__ == "__main__":
    main(sys.argv[1])
