"""The parts that every kestrel kernel family shares. README.md lists the modules."""

from . import check
from .allocation import allocator, allocator_on, contiguous_strides, empty, empty_strided, leading, unread
from .binary import Binary, Manifest, arch_of
from .errors import KestrelFallbackWarning, UnsupportedError
from .op import kernel_op, launches_directly, refuse_capture
from .registry import KernelOp, ops, trace
from .state import backend, current_backend

__version__ = "0.1.0"

__all__ = [
    "Binary",
    "KernelOp",
    "KestrelFallbackWarning",
    "Manifest",
    "UnsupportedError",
    "allocator",
    "allocator_on",
    "arch_of",
    "backend",
    "check",
    "contiguous_strides",
    "current_backend",
    "empty",
    "empty_strided",
    "kernel_op",
    "launches_directly",
    "leading",
    "ops",
    "refuse_capture",
    "trace",
    "unread",
]
