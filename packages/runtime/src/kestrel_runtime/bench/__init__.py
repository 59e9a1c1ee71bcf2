"""The timer of this library: what an op costs on the GPU present, beside other implementations of it.

A family describes each op to time in one file, ``benchmarks/<op>.py`` (:mod:`.definition` says what it holds). An op is
timed as an engine runs it, inside a CUDA graph (:mod:`.timer`); a row of the report says what one call moved, how near
that is to the limit of the machine (:mod:`.limits`), and what the host paid. ``python -m kestrel_runtime.bench`` and
``kestrel-kernels bench`` are the two ways in; importing this touches no GPU.
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
