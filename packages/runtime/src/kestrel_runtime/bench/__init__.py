"""The timer of this library: the time of an op on the GPU present, beside other implementations of it.

A family describes each op to time in one file, ``benchmarks/<op>.py`` (:mod:`.definition` documents the format). An op
is timed as an engine runs it, inside a CUDA graph (:mod:`.timer`). A row of the report holds the bytes of one call, the
fraction of the machine's limit (:mod:`.limits`) and the host time. ``python -m kestrel_runtime.bench`` and
``kestrel-kernels bench`` are the same command line (:mod:`.command`). Importing this touches no GPU.
"""

from .definition import Benchmark, compiled, discover, load, peer
from .limits import Limit, limit_of, limit_us
from .report import Report, Row, slower
from .rows import measure
from .timer import Figures, host_us, summarise, time_candidates

__all__ = [
    "Benchmark",
    "Figures",
    "Limit",
    "Report",
    "Row",
    "compiled",
    "discover",
    "host_us",
    "limit_of",
    "limit_us",
    "load",
    "measure",
    "peer",
    "slower",
    "summarise",
    "time_candidates",
]
