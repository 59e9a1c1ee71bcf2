"""The content of `kestrel-kernels info` as plain data, which tests and tools read too."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import platform
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from kestrel_runtime import KernelOp

FAMILIES = ("norm", "rope", "quant", "kvcache", "moe", "attention", "sampling")
OTHERS = ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl-libs-cu13", "triton")


class GPU(TypedDict):
    name: str
    capability: str
    architecture: str | None


class BinaryInfo(TypedDict):
    family: str
    built: bool
    """False when the family runs from its sources, without a build."""
    archs: list[str]
    """Empty in a wheel without kernels (KESTREL_ARCHS=none)."""
    functions: list[str]
    size: int


class OpInfo(TypedDict):
    op: str
    """A public function: kestrel_norm.rms_norm."""
    kernel: str | None
    """"cuda", "cute", or None while the op has only its reference, or needs no kernel."""
    without: list[str]
    """The registered ops behind this function that have no kernel yet, where others have one."""
    archs: list[str]
    runs: str
    """How CUDA tensors are served on this machine: "kernel" or "reference"; "plain" where no kernel is needed."""
    why: str


class Info(TypedDict):
    versions: dict[str, str]
    driver: str | None
    gpus: list[GPU]
    binaries: list[BinaryInfo]
    ops: list[OpInfo]


def collect() -> Info:
    """Collect everything without loading a binary."""
    gpus = _gpus()
    binaries = [_binary(f"kestrel_{name}") for name in FAMILIES]
    return Info(versions=_versions(), driver=_driver(), gpus=gpus, binaries=binaries, ops=_ops(gpus, binaries))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for module in ("kestrel_kernels", "kestrel_runtime", *(f"kestrel_{name}" for name in FAMILIES)):
        found[module.replace("_", "-")] = str(importlib.import_module(module).__version__)
    for distribution in OTHERS:
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str | None:
    """The version of the NVIDIA driver, from its kernel module or nvidia-smi."""
    path = Path("/proc/driver/nvidia/version")
    if path.is_file():
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text(encoding="utf-8"))
        if found:
            return found[1]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.split("\n")[0].strip() or None


def _gpus() -> list[GPU]:
    import torch

    from kestrel_runtime import arch_of

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        found.append(GPU(name=name, capability=f"{capability[0]}.{capability[1]}", architecture=arch_of(capability)))
    return found


def _binary(family: str) -> BinaryInfo:
    from kestrel_runtime import Binary

    binary = Binary(family)
    manifest, library = binary.manifest, binary.library
    return BinaryInfo(
        family=family,
        built=manifest is not None,
        archs=list(manifest.archs) if manifest else [],
        functions=list(manifest.functions) if manifest else [],
        size=library.stat().st_size if library else 0,
    )


def public_functions(family: str) -> list[str]:
    """The functions in a family's `__all__`."""
    module = importlib.import_module(family)
    return [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]


def _ops(gpus: list[GPU], binaries: list[BinaryInfo]) -> list[OpInfo]:
    """One entry for each public function, in the order of the families."""
    from kestrel_runtime import ops

    found = []
    for binary in binaries:
        family = binary["family"]
        names = public_functions(family)
        behind = _ops_behind(names, ops(family))
        found += [_op(f"{family}.{name}", behind[name], binary, gpus) for name in names]
    return found


def _ops_behind(names: list[str], registered: list[KernelOp]) -> dict[str, list[KernelOp]]:
    """The registered ops of each public function: the op of the same name, and ops named after it with a suffix.

    f_append belongs to f unless f_append is public too.
    """
    behind: dict[str, list[KernelOp]] = {name: [] for name in names}
    for op in registered:
        owners = [name for name in names if op.name == name or op.name.startswith(f"{name}_")]
        if owners:
            behind[max(owners, key=len)].append(op)
    return behind


def _op(name: str, behind: list[KernelOp], binary: BinaryInfo, gpus: list[GPU]) -> OpInfo:
    """The entry of a function. Of several ops behind it, the first whose kernel cannot run here decides."""
    if not behind:
        return OpInfo(op=name, kernel=None, without=[], archs=[], runs="plain", why="needs none")
    architecture = gpus[0]["architecture"] if gpus else None
    with_kernel = [op for op in behind if op.kernel]
    verdicts = [(_why_not(op.kernel, binary, gpus, architecture), op.kernel) for op in with_kernel or behind]
    why, kernel = next((verdict for verdict in verdicts if verdict[0]), verdicts[0])
    return OpInfo(
        op=name,
        kernel=kernel,
        without=[op.name for op in behind if not op.kernel] if with_kernel else [],
        archs=binary["archs"] if kernel else [],
        runs="reference" if why else "kernel",
        why=why,
    )


def _why_not(kernel: str | None, binary: BinaryInfo, gpus: list[GPU], architecture: str | None) -> str:
    """Why CUDA tensors would get the reference; empty when a kernel runs."""
    if kernel is None:
        return "no kernel yet"
    if not binary["built"]:
        return "the family runs from its sources, without a binary"
    if not binary["archs"]:
        return "built without kernels"
    if not gpus:
        return "no GPU"
    if architecture is None or architecture not in binary["archs"]:
        return f"no machine code for a GPU of capability {gpus[0]['capability']}"
    if kernel == "cute":
        from kestrel_runtime.cute import LIBRARY, runtime_library_path

        if runtime_library_path() is None:
            return f"NVIDIA's {LIBRARY} is not installed"
    return ""


def lines(info: Info) -> list[str]:
    """The printed lines."""
    text = ["versions"]
    text += [f"  {name:30} {version}" for name, version in info["versions"].items()]
    text += ["", "GPU"]
    text += [f"  {'driver':30} {info['driver'] or 'none'}"]
    for gpu in info["gpus"]:
        architecture = f"sm_{gpu['architecture']}" if gpu["architecture"] else "no kernels for this GPU"
        text += [f"  {gpu['name']:30} capability {gpu['capability']}, {architecture}"]
    if not info["gpus"]:
        text += ["  none: every op runs by its PyTorch reference"]
    text += ["", "binaries"]
    for binary in info["binaries"]:
        if binary["archs"]:
            holds = f"{' '.join('sm_' + arch for arch in binary['archs'])} ({binary['size'] / 1024:.0f} KiB)"
        else:
            built = binary["built"]
            holds = "built without kernels (KESTREL_ARCHS=none)" if built else "not built: runs from its sources"
        text += [f"  {binary['family']:30} {holds}"]
    text += ["", "ops"]
    width = max((len(op["op"]) for op in info["ops"]), default=0)
    for op in info["ops"]:
        kinds = {"kernel": f"{op['kernel']} kernel", "reference": f"reference ({op['why']})", "plain": op["why"]}
        partly = f" (no kernel yet: {', '.join(op['without'])})" if op["without"] else ""
        text += [f"  {op['op']:{width}} {kinds[op['runs']]}{partly}"]
    return text
