"""A whole layer of routed experts."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from kestrel_runtime import Binary, allocator, check, empty, kernel_op

from . import reference_experts, variants
from ._checks import check_out, check_overlaps

_kernels = Binary("kestrel_moe")
ACTIVATIONS = ("gelu_residual", "silu_and_mul", "gelu_and_mul")


def _check_fused_experts(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "gelu_residual",
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    op = "fused_experts"
    check.tensor(op, "hidden", hidden, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    tokens, width = hidden.shape
    if width == 0:
        check.fail(op, "hidden", "shape [T, Hd] with Hd at least 1", f"shape {tuple(hidden.shape)}")
    check.tensor(op, "w1", w1, dtype=(*check.FLOATS, torch.float8_e4m3fn), ndim=3, last_contiguous=True)
    check.shape(op, "w1", w1, (None, None, width))
    experts, inner = w1.shape[0], w1.shape[1] // 2
    if experts == 0 or inner == 0 or w1.shape[1] % 2:
        check.fail(op, "w1", "shape [E, 2I, Hd] with E and I at least 1", f"shape {tuple(w1.shape)}")
    quantised = w1.dtype == torch.float8_e4m3fn
    if not quantised:
        check.same(op, "dtype", hidden=hidden, w1=w1)
    check.tensor(op, "w2", w2, ndim=3, last_contiguous=True)
    check.same(op, "dtype", w1=w1, w2=w2)
    check.shape(op, "w2", w2, (experts, width, inner))
    check.tensor(op, "topk_weights", topk_weights, dtype=torch.float32, ndim=2, last_contiguous=True)
    choices = topk_weights.shape[1]
    check.shape(op, "topk_weights", topk_weights, (tokens, choices))
    check.tensor(op, "topk_ids", topk_ids, dtype=(torch.int32, torch.int64), ndim=2, last_contiguous=True)
    check.shape(op, "topk_ids", topk_ids, (tokens, choices))
    check.choice(op, "activation", activation, ACTIVATIONS)
    check_weight_scale(op, "w1_scale", w1_scale, w1, quantised)
    check_weight_scale(op, "w2_scale", w2_scale, w2, quantised)
    if expert_map is not None:
        check.tensor(op, "expert_map", expert_map, dtype=torch.int32, ndim=1, last_contiguous=True)
    check.same(
        op,
        "device",
        hidden=hidden,
        w1=w1,
        w2=w2,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        expert_map=expert_map,
    )
    check_out(op, out, (tokens, width), hidden)


def check_weight_scale(
    op: str, name: str, scale: torch.Tensor | None, weight: torch.Tensor, quantised: bool = True
) -> None:
    """[E], [E, N] or [E, ceil(N/128), ceil(K/128)] float32 for FP8 weights [E, N, K]; None for others."""
    if scale is None:
        if quantised:
            check.fail(op, name, "float32 scales with FP8 weights", None)
        return
    if not quantised:
        check.fail(
            op,
            name,
            "None unless the weights are float8_e4m3fn",
            f"scales with {str(weight.dtype).removeprefix('torch.')} weights",
        )
    check.tensor(op, name, scale, dtype=torch.float32, ndim=(1, 2, 3))
    experts, rows, columns = weight.shape
    tiles = (experts, (rows + 127) // 128, (columns + 127) // 128)
    check.shape(op, name, scale, tiles if scale.ndim == 3 else (experts, rows)[: scale.ndim])


def _shape_fused_experts(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "gelu_residual",
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The shape of the result. The reference loops over blocks, which cannot be traced with a symbolic T."""
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)


def _fits_grouped_mm(w1: torch.Tensor, w2: torch.Tensor) -> bool:
    return all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in (w1, w2))


def _through_grouped_mm(
    out: torch.Tensor,
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Sort tokens by expert, then PyTorch's grouped GEMM, the activation, grouped GEMM, and the weighted sum."""
    pairs, experts = topk_ids.numel(), w1.shape[0]
    new = allocator(hidden)
    sizes = (pairs, pairs, pairs, pairs, 1, experts)
    order, expert_of_row, tokens, positions, length, ends = (new((size,), (1,), torch.int32) for size in sizes)
    _kernels.moe_align_block_size(topk_ids, experts, 1, order, expert_of_row, length, None)
    _kernels.group_rows(topk_ids, order, expert_of_row, tokens, positions, ends)
    up = F.grouped_mm(hidden.index_select(0, tokens), w1.mT, offs=ends)
    inner = empty(hidden, hidden.dtype, pairs, w2.shape[2])
    shift = 1.0 if activation == "gelu_residual" else 0.0
    _kernels.gated(inner, up, activation == "silu_and_mul", "none", shift)
    y = F.grouped_mm(inner, w2.mT, offs=ends)
    _kernels.experts_gather_sum(out, y, positions, topk_weights, hidden, w1, w2, topk_ids)
    return out


@functools.lru_cache(4096)
def _scratch_bytes(*sizes: int) -> int:
    return int(_kernels.fused_experts_scratch(*sizes))


@kernel_op(
    reference=reference_experts.fused_experts,
    check=_check_fused_experts,
    shape=_shape_fused_experts,
    kernel="cuda",
    out_may_be=(),
)
def fused_experts(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "gelu_residual",
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Route each token through K experts and add up their weighted results.

    ``result[t] = sum over j of topk_weights[t, j] * act(hidden[t] @ w1[e].T) @ w2[e].T`` with ``e = topk_ids[t, j]``.

    hidden: [T, Hd] bf16, fp16 or float32. w1: [E, 2I, Hd], the activated half first. w2: [E, Hd, I]. Both in hidden's
    dtype, or both float8_e4m3fn with scales. *Constant*: w1, w2 and their scales.
    topk_weights: float32 [T, K]. topk_ids: int32 or int64 [T, K]; an id < 0 or past the last expert is skipped.
    activation: "gelu_residual", "silu_and_mul" or "gelu_and_mul", of the two halves of the up projection.
    w1_scale, w2_scale: float32, one per expert [E], per output [E, 2I] and [E, Hd], or per 128 x 128 tile
        [E, ceil(N/128), ceil(K/128)], told apart by shape; weight = code * scale. The activations are then quantised to
        FP8 with one dynamic scale per row, or with tiles one per row and 128 columns (fp8_quant). The hidden layer is
        quantised from float32, with a scale per row and 128 columns.
    expert_map: int32 [experts of all devices], the index in w1 of each expert, or -1 if another device holds it. Ids
        are then indices into the map, and choices mapped to -1 are skipped.
    Accumulated in float32; the hidden layer is rounded once (to hidden's dtype, or FP8), the result once, after the sum
    over j in ascending order. A token whose choices are all skipped gives zeros.

    Returns [T, Hd] in hidden's dtype, in ``out`` if it is given; ``out`` may not overlap the inputs. Reads nothing on
    the host. The kernels take bf16 and fp16 with Hd and I that are multiples of 16 and rows aligned to 16 bytes. They
    sum in order of k, so a row is the same bit for bit for every T of one range: on other GPUs there is one. On an H100
    or H200, with P = T*K / E, or T*K / len(expert_map) with a map:

    1. T <= 16 and P <= 2; if I > 2048, P <= 1 and T*K <= 32 (Hd up to 8192, beyond 8 tokens 4096; K <= 8, E <= 1024).
       FP8 layers with T*K > 64: T <= 8; with Hd > 4096: T*K <= 32.
    2. Few pairs: up to T*K = 32 or P = 9.75. FP8 layers of 3*E*Hd*I <= 2^30 weights: up to T*K = 32, or 64 with P <= 2;
       larger ones: below P = 0.25, and up to T*K = 32 with P > 22.
    3. Many pairs, all others. bf16 results of each expert are rounded before the sum over j.
    4. Each T for itself: bf16 without ``expert_map``, P > 2048, Hd * I / (Hd + I) >= 2048, E < 1024 and contiguous
       weights, through torch.nn.functional.grouped_mm. The products of the up projection and the results of each
       expert are rounded to bf16.

    For layers tuned on this GPU by `kestrel-kernels tune moe`, without a map, the tuned file gives the ranges. By
    reference on a CPU, a row is the same bit for bit up to T = 16, and beyond it within each of these ranges of T*K/E:
    below 1, from a power of two up to the next, from 64 on.

    Raises ValueError or TypeError for a wrong dtype, rank, shape or device, an unknown ``activation``, FP8 weights
    without scales or scales without FP8 weights.
    Semantics: vLLM's fused_experts; the activation is Moondream 3's.

    >>> hidden = torch.tensor([[1.0]])
    >>> w1 = torch.tensor([[[2.0], [3.0]], [[9.0], [9.0]]])  # E = 2, I = 1: h = 2x, g = 3x
    >>> w2 = torch.tensor([[[10.0]], [[0.0]]])  # so the result is 0.5 * 10 * silu(2) * 3
    >>> ids, weights = torch.tensor([[0, -1]], dtype=torch.int32), torch.tensor([[0.5, 0.5]])
    >>> round(fused_experts(hidden, w1, w2, weights, ids, activation="silu_and_mul").item(), 4)
    26.4239
    """
    mapped = None if expert_map is None else expert_map.shape[0]
    choice = (hidden.get_device(), hidden.shape[0], topk_ids.shape[1], w2.shape, w2.dtype, mapped)
    variant = variants.for_call(*choice, grouped_mm=True)
    if variant.path == variants.GROUPED_MM and not _fits_grouped_mm(w1, w2):
        variant = variants.for_call(*choice, grouped_mm=False)
    return by_variant(variant, hidden, w1, w2, topk_weights, topk_ids, activation, w1_scale, w2_scale, expert_map, out)


def by_variant(
    variant: variants.Variant,
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "gelu_residual",
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run :func:`fused_experts`, with its arguments, by a variant that is valid for them."""
    tokens, width = hidden.shape
    experts, pairs, fp8 = w1.shape[0], topk_ids.numel(), w1_scale is not None
    if topk_ids.dtype == torch.int64:
        topk_ids = topk_ids.clamp(-1, 2**31 - 1).to(torch.int32)
    new = allocator(hidden)
    if out is None:
        out = new((tokens, width), (width, 1), hidden.dtype)

    def launch(tile: int, cluster: int, *aligned: torch.Tensor | None) -> torch.Tensor:
        blocks, permutes = 0 if aligned[1] is None else aligned[1].shape[0], aligned[3] is not None
        fused = variant.path == variants.FUSED
        sizes = (tokens, pairs, w1.shape[1] // 2, width, fp8, tile if blocks or fused else 0, blocks, permutes)
        scratch = new((_scratch_bytes(*sizes, hidden.get_device()),), (1,), torch.uint8)
        layer = (out, scratch, hidden, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, expert_map)
        _kernels.fused_experts(*layer, *aligned, tile, cluster, activation)
        return out

    if variant.path in (variants.FUSED, variants.IN_KERNEL):
        return launch(variant.tile, 2 if variant.path == variants.FUSED else 1, None, None, None, None)
    mapped = experts if expert_map is None else expert_map.shape[0]
    if variant.path == variants.GROUPED_MM or mapped == 0:  # without the entry point, which checks other calls
        _check_fused_experts(hidden, w1, w2, topk_weights, topk_ids, activation, w1_scale, w2_scale, expert_map, out)
        if mapped == 0 or pairs == 0:
            return out.zero_()
        check_overlaps("fused_experts", out, hidden=hidden, w1=w1, w2=w2, topk_weights=topk_weights, topk_ids=topk_ids)
        return _through_grouped_mm(out, hidden, w1, w2, topk_weights, topk_ids, activation)
    tile = variant.tile
    blocks = reference_experts.most_blocks(pairs, mapped, tile)
    sizes = (blocks * tile, blocks, 3 + blocks)  # the last: the number, and counters
    aligned = [new((size,), (1,), torch.int32) for size in sizes]
    positions = new((pairs,), (1,), torch.int32) if fp8 and tile == variants.FP8_WGMMA_TILE else None
    return launch(tile, 2 if variant.path == variants.CLUSTERED else 1, *aligned, positions)
