"""Launching the decode kernels: from tensors to a problem (plan.py), and from its plan to launches and scratch memory.

A call is planned once for each form of its arguments. A later call finds its plan by one look-up and launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kestrel_runtime import Binary, UnsupportedError, allocator, allocator_on
from kestrel_runtime.check import span

from .arguments import Cached
from .kernels.dtypes import DTYPES
from .kernels.parameters import AppendInt4Tensors, AppendTensors, CombineTensors, DecodeTensors
from .kernels.variants import WIDE_ARCHS
from .launching import (
    UNALIGNED,
    Bound,
    LaunchError,
    launch_in_order,
    loaded_as_vectors,
    refuse_uncovered_strides,
    unread,
    unused,
)
from .plan import DecodePlan, DecodeProblem, plan_decode, serves_both_dtypes, variants_of
from .plans import Plans

_binary = Binary("kestrel_attention")
_NAMES = dict(zip((torch.bfloat16, torch.float16), DTYPES, strict=True))
_CODES = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
_SCRATCH_TYPES = torch.float32, torch.float32, torch.int32  # of partial_out, partial_lse and num_splits
_SCRATCH = "partial_out", "partial_lse", "num_splits"
_OWN = {"out": 0, "lse": 1, "attended": 0, "partial_out": 2, "partial_lse": 3, "num_splits": 4}
_FIRST = 5  # of the addresses of tensors, behind those of _OWN
_CONSTANT = -1  # no address: the same in every call
_data_ptr = torch.Tensor.data_ptr
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)  # a torch without CUDA lacks it

launches: Plans[Any] = Plans()


def problem_of(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: Cached, *, appends: bool = False
) -> DecodeProblem:
    """The problem of checked arguments; raises UnsupportedError for tensors that no kernel covers."""
    if q.dtype not in _NAMES:
        raise UnsupportedError("kernels cover bf16 and fp16 queries")
    (k_scale, v_scale), integers = given.codes.split(k_cache)
    cache = "int4" if len(integers) > 2 else _CODES.get(k_cache.dtype, "same")
    if cache == "same" and k_cache.dtype != q.dtype:
        raise UnsupportedError("kernels cover caches of the queries' dtype and of codes")
    batch, queries, heads, head_dim = q.shape
    problem = DecodeProblem(
        batch=batch,
        queries=queries,
        heads=heads,
        kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        page_size=k_cache.shape[1],
        pages=None if given.block_table is None else given.block_table.shape[1],
        dtype=_NAMES[q.dtype],
        cache=cache,
        num_splits=given.num_splits,
        k_scale_heads=0 if k_scale is None else 1 + (k_scale.shape[0] > 1),
        v_scale_heads=0 if v_scale is None else 1 + (v_scale.shape[0] > 1),
        has_sinks=given.sinks is not None,
        appends=appends,
        **given.scores.of_problem(),
    )
    variants_of(problem)
    refuse_uncovered_strides(cache, (k_cache, v_cache), integers)
    return problem


def make_launch(key: Any, problem: DecodeProblem, q: torch.Tensor, new: Sequence[torch.Tensor] = ()) -> DecodeLaunch:
    """The launch of a problem, kept under ``key``. q, new: give device and strides."""
    device = q.device
    plan = plan_decode(replace(problem, has_wide_kernels=_has_wide_kernels(device)))
    attend = _binary.kernel(plan.variant, device) if q.numel() else None
    append = _binary.kernel(plan.append, device) if plan.append is not None and new[0].numel() else None
    combine = _binary.kernel(plan.combine, device) if plan.combine is not None and q.numel() else None
    copied = [any(stride % 8 for stride in x.stride()[:-1]) for x in (q, *(new or (q, q)))]
    return launches.keep(key, DecodeLaunch(plan, problem, device, append, attend, combine, copied))


def _has_wide_kernels(device: torch.device) -> bool:
    try:
        return _binary.arch(device).removeprefix("sm") in WIDE_ARCHS
    except UnsupportedError:  # without a binary for the GPU, kernels may still be compiled on first use
        return False


class Operands(NamedTuple):
    """The tensors of a call's kernels, or whatever stands for each of them."""

    q: Any
    k_cache: Any
    v_cache: Any
    cache_seqlens: Any
    block_table: Any
    k_scale: Any
    v_scale: Any
    prefix_lens: Any
    sinks: Any
    k: Any
    v: Any
    integers: tuple[Any, ...]  # as Codes.split has them
    out: Any
    lse: Any
    attended: Any = None  # out as the decode kernel takes it
    partial_out: Any = None
    partial_lse: Any = None
    num_splits: Any = None


_GIVEN = Operands._fields.index("integers")  # the tensors of a call come first


class DecodeLaunch:
    """The launch (see launching.Launch) of all calls of one plan.

    copied: whether q, k and v have strides of no multiple of 16 bytes, so that the kernels take copies.
    """

    def __init__(
        self,
        plan: DecodePlan,
        problem: DecodeProblem,
        device: torch.device,
        append: Callable[..., None] | None,
        attend: Callable[..., None] | None,
        combine: Callable[..., None] | None,
        copied: Sequence[bool],
    ) -> None:
        batch, queries, heads, head_dim = problem.batch, problem.queries, problem.heads, problem.head_dim
        self.plan, self.device, self.copied = plan, device, copied
        self.append, self.attend, self.combine = append, attend, combine
        self.dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
        self.out_form = (batch, queries, heads, head_dim), (queries * heads * head_dim, heads * head_dim, head_dim, 1)
        self.lse_form = (batch, heads, queries), (heads * queries, queries, 1)
        self.scratch_sizes = plan.partial_rows * head_dim, plan.partial_rows, plan.row_blocks
        element_bytes = 2 if problem.cache == "same" else 1
        self.cache_bytes = (
            2 * batch * problem.capacity * problem.kv_heads * head_dim * element_bytes
        )  # where it is full
        self.unread_lse = unread(self.lse_form[0], device)
        # Stand in for tensors that the call does not have. tvm-ffi's tensors cost a call less than torch's.
        self.no_float = unused(torch.float32, device)
        self.no_int, self.no_table = unused(torch.int32, device), unused(torch.int32, device, 2)
        both_dtypes = serves_both_dtypes(plan.variant)
        self.scalars_after = (int(problem.dtype == "bf16"),) if both_dtypes else ()
        self.as_bf16 = both_dtypes and problem.dtype == "fp16"  # kernels for both dtypes see 16-bit elements as bf16
        self.may_be_bytes = problem.cache == "e4m3"

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor | None,
        *,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        prefix_lens: torch.Tensor | None,
        new: Sequence[torch.Tensor] = (),
        integers: Sequence[torch.Tensor] = (),
        out: torch.Tensor | None = None,
        want_lse: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        destination = None
        if out is not None and (out.data_ptr() & 15 or not out.is_contiguous()):
            destination, out = out, None
        empty = allocator(q)
        if out is None:
            out = empty(*self.out_form, self.dtype)
        lse = empty(*self.lse_form, torch.float32) if want_lse else None
        if self.attend is not None or self.append is not None:
            if any(x.data_ptr() & 15 for x in (k_cache, v_cache, *loaded_as_vectors(integers))):
                raise UnsupportedError(UNALIGNED)
            if self.append is not None and k_cache.data_ptr() == v_cache.data_ptr():
                raise ValueError("K and V are appended to the same memory")
            q, k, v = [
                x.clone(memory_format=torch.contiguous_format) if x is not None and (odd or x.data_ptr() & 15) else x
                for x, odd in zip((q, *(new or (None, None))), self.copied, strict=True)
            ]
            paging, scales = (cache_seqlens, block_table), (k_scale, v_scale)
            further = prefix_lens, None if sinks is None else sinks.float()
            given = Operands(q, k_cache, v_cache, *paging, *scales, *further, k, v, tuple(integers), out, lse)
            # All memory is allocated before the first kernel runs: a call that fails has written nothing.
            launch_in_order(self._kernels(self._operands(given, empty)))
        return (out if destination is None else destination.copy_(out)), lse

    def _operands(self, given: Operands, empty: Callable[..., torch.Tensor]) -> Operands:
        """Aligned operands as the kernels take them: views as other types, scratch memory, stand-ins."""
        x = given
        if self.may_be_bytes and x.k_cache.dtype is torch.uint8:
            x = x._replace(k_cache=x.k_cache.view(torch.float8_e4m3fn), v_cache=x.v_cache.view(torch.float8_e4m3fn))
        if self.as_bf16:
            q, k, v, attended = [y if y is None else y.view(torch.bfloat16) for y in (x.q, x.k, x.v, x.out)]
            x = x._replace(q=q, k=k, v=v, attended=attended)
            if len(x.integers) > 2:
                x = x._replace(integers=(*x.integers[:4], x.integers[4].view(torch.bfloat16), x.integers[5]))
        scratch = [self.no_float, self.no_float, self.no_int]
        if self.combine is not None:
            scratch = [empty((n,), (1,), dtype) for n, dtype in zip(self.scratch_sizes, _SCRATCH_TYPES, strict=True)]
        return x._replace(
            block_table=self.no_table if x.block_table is None else x.block_table,
            k_scale=self.no_float if x.k_scale is None else x.k_scale,
            v_scale=self.no_float if x.v_scale is None else x.v_scale,
            prefix_lens=self.no_int if x.prefix_lens is None else x.prefix_lens,
            sinks=self.no_float if x.sinks is None else x.sinks,
            lse=self.unread_lse if x.lse is None else x.lse,
            attended=x.out if x.attended is None else x.attended,
            partial_out=scratch[0],
            partial_lse=scratch[1],
            num_splits=scratch[2],
        )

    def _kernels(self, x: Operands) -> list[Bound]:
        """The kernels of a call in order, with their arguments."""
        plan, kernels = self.plan, []
        if self.append is not None:
            scales = x.integers or (x.k_scale, x.v_scale)
            fields = AppendInt4Tensors if len(scales) > 2 else AppendTensors
            tensors = fields(x.k, x.v, x.k_cache, x.v_cache, x.cache_seqlens, x.block_table, *scales)
            kernels.append((self.append, (*tensors, *plan.append_scalars)))
        if self.attend is not None:
            tensors = DecodeTensors(
                mQ=x.q,
                mK=x.k_cache,
                mV=x.v_cache,
                mLengths=x.cache_seqlens,
                mTable=x.block_table,
                mKScale=x.k_scale,
                mVScale=x.v_scale,
                mPrefix=x.prefix_lens,
                mSinks=x.sinks,
                mOut=x.attended,
                mLse=x.lse,
                mPartialOut=x.partial_out,
                mPartialLse=x.partial_lse,
                mNumSplits=x.num_splits,
            )
            kernels.append((self.attend, (*tensors, *plan.scalars, *x.integers, *self.scalars_after)))
        if self.combine is not None:
            tensors = CombineTensors(x.out, x.lse, x.partial_out, x.partial_lse, x.num_splits, x.sinks)
            kernels.append((self.combine, (*tensors, *plan.combine_scalars)))
        return kernels

    def bind(self, tensors: Sequence[torch.Tensor], given: Operands) -> HotLaunch | None:
        """The launch of further calls with tensors of the same forms; None where calls take copies.

        tensors: those of a call. given: the same ones by name, None where it has none.
        """
        takes_copies = any(self.copied) or (given.out is not None and not given.out.is_contiguous())
        takes_copies = takes_copies or (given.sinks is not None and given.sinks.dtype != torch.float32)
        if self.attend is None or takes_copies or (bind_launches := _bind_launches()) is None:
            return None
        empty = allocator(given.q)
        out = empty(*self.out_form, self.dtype) if given.out is None else given.out
        operands = self._operands(given._replace(out=out, lse=empty(*self.lse_form, torch.float32)), empty)

        def place(x: torch.Tensor | None) -> int:
            """The index of the address of a tensor among those that a call gives."""
            return _CONSTANT if x is None else next(i for i, y in enumerate(tensors) if y is x) + _FIRST

        own = _OWN if self.combine is not None else _OWN | dict.fromkeys(_SCRATCH, _CONSTANT)
        places = Operands(*map(place, given[:_GIVEN]), tuple(map(place, given.integers)), **own)
        vectors = (out, *given[:3], given.k, given.v, *loaded_as_vectors(given.integers))
        alignments = [16 if any(x is y for y in vectors) else 1 for x in tensors]
        description: list[Any] = [
            *map(int, given.q.__dlpack_device__()),
            place(given.out),
            *((places.k_cache, places.v_cache) if self.append is not None else (_CONSTANT, _CONSTANT)),
            _FIRST + len(tensors),
            *(16, *[1] * (_FIRST - 1), *alignments),
            *([0] * _FIRST),
            *map(span, tensors),
        ]
        for (kernel, arguments), (_, where) in zip(self._kernels(operands), self._kernels(places), strict=True):
            description += [kernel, len(arguments)]
            for x, index in zip(arguments, where, strict=True):
                description += [_CONSTANT if isinstance(x, (int, float)) else index, x]
        launch = bind_launches(*description)
        return self._hot_launch(launch)

    def _hot_launch(self, launch: Callable[..., bool | None]) -> HotLaunch:
        """launch: (only as a graph, stream, addresses) -> whether the kernels were launched, see bind_launches.

        None: they will not be launched as a graph in later calls either.
        """
        out_form, lse_form, dtype = self.out_form, self.lse_form, self.dtype
        allocator, device = allocator_on(self.device), self.device.index or 0
        unread_lse = torch.from_dlpack(self.unread_lse).data_ptr()
        partials, rows, row_blocks = self.scratch_sizes if self.combine is not None else (0, 0, 0)
        lse_offset, splits_offset, scratch_bytes = (
            4 * partials,
            4 * (partials + rows),
            4 * (partials + rows + row_blocks),
        )
        several = self.append is not None or self.combine is not None
        small = self.cache_bytes < GRAPH_BYTES and scratch_bytes <= WORKSPACE_BYTES
        as_graph = several and small and self.device.type == "cuda"

        def hot_launch(
            tensors: Sequence[torch.Tensor], out: torch.Tensor | None, want_lse: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
            nonlocal as_graph
            empty, stream = allocator(), _current_stream(device)
            result = empty(*out_form, dtype) if out is None else out
            lse, lse_address = None, unread_lse
            if want_lse:
                lse = empty(*lse_form, torch.float32)
                lse_address = lse.data_ptr()
            first, addresses = result.data_ptr(), [*map(_data_ptr, tensors)]
            if as_graph and (scratch := _workspaces.get((device, stream)) or _make_workspace(device, stream)):
                partial_lse, splits = scratch + lse_offset, scratch + splits_offset
                launched = launch(True, stream, first, lse_address, scratch, partial_lse, splits, *addresses)
                if launched:
                    return result, lse
                as_graph = launched is not None
            scratch = 0
            if scratch_bytes:  # one tensor for all, as an allocation takes about as long as a launch
                memory = empty((scratch_bytes,), (1,), torch.uint8)
                scratch = memory.data_ptr()
            partial_lse, splits = scratch + lse_offset, scratch + splits_offset
            try:
                launched = launch(False, stream, first, lse_address, scratch, partial_lse, splits, *addresses)
            except Exception as error:
                raise LaunchError(str(error)) from error
            return (result, lse) if launched else None

        return hot_launch


# Scratch memory of graphs. Those of one stream run one after the other, and share it. It is kept: a handle does not
# tell whether its stream still exists.
WORKSPACE_BYTES = 2**22
MAX_WORKSPACES = 8  # of the process; calls on further streams launch kernels one by one
_workspaces: dict[tuple[int, int], int] = {}  # addresses by device and stream; 0 where memory was short
_workspace_memory: list[torch.Tensor] = []
# With more bytes of cache, the GPU takes longer than the host. A graph does not overlap with the launch before it.
GRAPH_BYTES = 2**25


def _make_workspace(device: int, stream: int) -> int:
    """That of the current stream, or 0; none while a CUDA graph is captured, whose memory is not to be kept."""
    if len(_workspaces) >= MAX_WORKSPACES or (device, stream) in _workspaces:
        return 0
    if torch.cuda.current_device() != device or torch.cuda.is_current_stream_capturing():
        return 0
    try:
        memory = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    except torch.OutOfMemoryError:
        _workspaces[device, stream] = 0
        return 0
    _workspace_memory.append(memory)
    _workspaces[device, stream] = memory.data_ptr()
    return memory.data_ptr()


HotLaunch = Callable[
    [Sequence[torch.Tensor], "torch.Tensor | None", bool], "tuple[torch.Tensor, torch.Tensor | None] | None"
]
"""(tensors, out, want_lse) -> (out, lse); None, and nothing is launched, where a call needs its checks or copies."""


def _bind_launches() -> Callable[..., Any] | None:
    """bind_launches of csrc/bind_launches.cpp; None where kernels were compiled on first use, without a binary."""
    try:
        return _binary.function("bind_launches")
    except UnsupportedError:
        return None
