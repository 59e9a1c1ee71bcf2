"""Compiles variants into object files, in a process of its own (the DSL is not thread-safe).

Reads jobs as JSON from standard input, writes ``<name>_sm<arch>.o`` files and prints one JSON line per job.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

# Host code must run on any x86-64 or aarch64 machine and be the same wherever it is built. By default the DSL uses all
# instructions of the CPU that builds.
HOST_CPU = {
    "x86_64": ("x86-64", ("+cx8", "+fxsr", "+mmx", "+sse", "+sse2", "+x87")),
    "aarch64": ("generic", ("+fp-armv8", "+neon")),
}
VECTOR_LOAD = re.compile(r"ld\.global(?:\.[\w:]+)*\.(?:v4\.[bufs]32|v2\.[bufs]64)")
_TOOLS = Path(__file__).resolve().parents[1]
# Where kestrel_runtime.cute_dsl lies: inside an sdist, and in the checkout.
TOOLKIT_FOLDERS = (_TOOLS / "kestrel_runtime", _TOOLS.parent / "packages" / "runtime" / "src" / "kestrel_runtime")


def load_variants(source: Path, package: str) -> dict[str, Any]:
    """The family's variants by name. Neither the family nor kestrel_runtime is imported: no build has torch."""
    _stub(package, source / package)
    _stub("kestrel_runtime", next(folder for folder in TOOLKIT_FOLDERS if (folder / "cute_dsl").is_dir()))
    module = importlib.import_module(f"{package}.kernels.variants")
    return {variant.name: variant for variant in module.VARIANTS}


def _stub(package: str, folder: Path) -> None:
    """Put an empty package in place, whose subpackages are found in ``folder``."""
    module = types.ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module


def compile_one(variant: Any, arch: str, objects: Path, keep: Path | None) -> dict[str, Any]:
    import cutlass.cute as cute

    from cute_build import cubin

    function = f"{variant.name}_sm{arch}"
    kernel, arguments = variant.kernel(arch)
    with tempfile.TemporaryDirectory() as dump:
        options = f"--enable-tvm-ffi --gpu-arch sm_{arch} --keep-ptx --keep-cubin --dump-dir={dump}"
        compiled = cute.compile(kernel, *arguments, options=options)
        (ptx_file,) = Path(dump).glob("*.ptx")
        (cubin_file,) = Path(dump).glob("*.cubin")
        usage = cubin.usage(cubin_file.read_bytes())
        vector_loads = len(VECTOR_LOAD.findall(ptx_file.read_text()))
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ptx_file, keep / f"{function}.ptx")
            shutil.copyfile(cubin_file, keep / f"{function}.cubin")
    if usage.frame_bytes:
        raise SystemExit(f"{function}: {usage.frame_bytes} bytes of local memory per thread (spilled registers)")
    if variant.vector_loads and not vector_loads:
        raise SystemExit(f"{function}: claims 16-byte loads, and its PTX has none")
    pin_host_cpu(compiled.ir_module)
    compiled.export_to_c(str(objects / f"{function}.o"), function_name=function, export_only_tvm_ffi_symbols=True)
    return {"function": function, "registers": usage.registers, "vector_loads": vector_loads}


def pin_host_cpu(module: Any) -> None:
    """Have the host functions of a compiled module use the baseline instructions of this kind of processor."""
    from cutlass._mlir import ir

    machine = os.uname().machine
    cpu, features = HOST_CPU[machine]
    with module.context:
        target_cpu = ir.StringAttr.get(cpu)
        listed = ", ".join(f'"{feature}"' for feature in features)
        target_features = ir.Attribute.parse(f"#llvm.target_features<[{listed}]>")
        for op in module.body.operations:
            if op.operation.name == "llvm.func":
                op.operation.attributes["target_cpu"] = target_cpu
                op.operation.attributes["target_features"] = target_features


def main() -> None:
    work = json.load(sys.stdin)
    variants = load_variants(Path(work["source"]), work["package"])
    keep = Path(work["keep"]) if work["keep"] else None
    for name, arch in work["jobs"]:
        report = compile_one(variants[name], arch, Path(work["objects"]), keep)
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
