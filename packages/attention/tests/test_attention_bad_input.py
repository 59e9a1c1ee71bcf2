"""What the attention ops must refuse, how the message names it, and that nothing is written before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kestrel_attention
from kestrel_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from kestrel_runtime.testing import (
    ODD_VALUES,
    BadInput,
    assert_refused,
    assert_registered,
    assert_rejects,
    assert_same_bits,
    assert_works_or_is_named,
    cases_of,
    derived_bad_inputs,
    odd_calls,
    refusal_params,
    twins,
)

Table = Callable[..., list[BadInput]]


def int32(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def overlapping(x: torch.Tensor) -> torch.Tensor:
    """A tensor of x's shape whose rows overlap in all elements but one."""
    strides = [1] * x.ndim
    return torch.zeros(sum(x.shape), dtype=x.dtype).as_strided(x.shape, strides)


def shifted(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and out in one buffer, out a row further on."""
    row = q.shape[-1]
    buffer = torch.zeros(q.numel() + row, dtype=q.dtype)
    return buffer[: q.numel()].view(q.shape), buffer[row:].view(q.shape)


def score_cases(bad: Callable[..., BadInput], batch: int, q: torch.Tensor) -> list[BadInput]:
    """What shapes the scores, and out, are checked alike everywhere."""
    same_q, further_out = shifted(q)
    return [
        bad("a scale as text", "softmax_scale", "1", TypeError, "str"),
        bad("a scale that is no number", "softmax_scale", float("nan"), fragment="nan"),
        bad("an infinite scale", "softmax_scale", float("-inf"), fragment="finite number"),
        bad("a scale past float32", "softmax_scale", 1e39, fragment="finite number"),
        bad("a scale past 2^126", "softmax_scale", -(2.0**126) * 1.01, fragment="<= 8.5070592e+37"),
        bad("causal as text", "causal", "no", TypeError, "True or False"),
        bad("causal as a number", "causal", 1, TypeError, "int"),
        bad("no causal", "causal", None, TypeError, "NoneType"),
        bad("return_lse as text", "return_lse", "x", TypeError, "str"),
        bad("a window as one number", "window_size", 3, TypeError, "pair"),
        bad("a window of three", "window_size", (1, 2, 3), TypeError, "(1, 2, 3)"),
        bad("a window below -1", "window_size", (-2, 0), fragment="-2"),
        bad("a right end below -1", "window_size", (0, -3), fragment="-3"),
        bad("a window of floats", "window_size", (1.5, 0), TypeError, "float"),
        bad("a negative cap", "softcap", -1.0, fragment="-1.0"),
        bad("an infinite cap", "softcap", float("inf"), fragment="finite number"),
        bad("no cap", "softcap", None, TypeError, "NoneType"),
        bad("a prefix as text", "prefix_len", "1", TypeError, "str"),
        bad("a negative prefix", "prefix_len", -1, fragment=">= 0"),
        bad("int64 prefixes", "prefix_len", int32(batch).long(), TypeError, "int64"),
        bad("too many prefixes", "prefix_len", int32(batch + 1), fragment=f"({batch + 1},)"),
        bad("every other prefix", "prefix_len", int32(2 * batch)[::2], fragment="stride 2"),
        bad("prefixes elsewhere", "prefix_len", int32(batch, device="meta"), fragment="meta"),
        bad("sinks as a number", "sinks", 1.0, TypeError, "float"),
        bad("integer sinks", "sinks", int32(q.shape[-2]), TypeError, "int32"),
        bad("too many sinks", "sinks", torch.zeros(q.shape[-2] + 1), fragment=f"({q.shape[-2] + 1},)"),
        bad("sinks of rank 2", "sinks", torch.zeros(1, q.shape[-2]), fragment="2-D"),
        bad("every other sink", "sinks", torch.zeros(2 * q.shape[-2])[::2], fragment="stride 2"),
        bad("sinks elsewhere", "sinks", torch.zeros(q.shape[-2], device="meta"), fragment="meta"),
        bad("out as a number", "out", 1, TypeError, "int"),
        bad("out of another rank", "out", torch.zeros(2), fragment="1-D"),
        bad("out of another shape", "out", torch.zeros_like(q)[1:], fragment=f"({len(q) - 1}, "),
        bad("out of another dtype", "out", torch.zeros_like(q).half(), TypeError, "float16"),
        bad("a strided out", "out", torch.cat((q, q), dim=-1)[..., ::2], fragment="stride 2"),
        bad("out elsewhere", "out", q.to("meta"), fragment="meta"),
        bad("an expanded out", "out", torch.zeros_like(q)[..., :1, :].expand_as(q), fragment="share memory"),
        bad("rows of out that overlap", "out", overlapping(q), fragment="share memory"),
        bad("out that overlaps q", "out", further_out, fragment="memory", q=same_q),
        bad("out that requires grad", "out", torch.zeros_like(q).requires_grad_(), fragment="requires_grad"),
        bad("a scale beyond float64", "softmax_scale", 10**400, fragment="finite"),
        bad("a cap beyond 64 bits", "softcap", 2**70, fragment=""),
        bad("a window beyond 64 bits", "window_size", (2**63, 0), fragment="64 bits"),
        bad("a right end beyond 64 bits", "window_size", (0, 2**70), fragment="64 bits"),
        bad("a prefix beyond 64 bits", "prefix_len", 2**63, fragment="64 bits"),
    ]


def decode_cases(batch: int, queries: int, kv_heads: int, size: int, page: int) -> list[BadInput]:
    heads = 2 * kv_heads
    q = torch.zeros(batch, queries, heads, size)
    new = torch.zeros(batch, queries, kv_heads, size)
    cache = torch.zeros(5 + batch, page, kv_heads, size)
    codes = cache.to(torch.uint8)
    caches = {"k_cache": cache, "v_cache": cache.clone()}
    good = {"q": q, **caches, "cache_seqlens": int32(batch), "block_table": int32(batch, 2)}
    fp8 = {"k_cache": codes, "v_cache": codes.clone()}
    slots = cache.shape[:3]
    int8 = {
        "k_cache": cache.char(),
        "v_cache": cache.char(),
        "k_scale": torch.ones(slots),
        "v_scale": torch.ones(slots),
    }
    bad = cases_of(good)
    strided = torch.zeros(batch, queries, heads, 2 * size)[..., ::2]
    return [
        bad("no q", "q", None, TypeError, "a tensor"),
        bad("float64 q", "q", q.double(), TypeError, "float64"),
        bad("integer q", "q", q.int(), TypeError, "int32"),
        bad("FP8 q", "q", q.to(torch.float8_e4m3fn), TypeError, "float8_e4m3fn"),
        bad("q of rank 3", "q", q[0], fragment="3-D"),
        bad("a strided q", "q", strided, fragment="stride 2"),
        bad("q of no size", "q", q[..., :0], fragment=">= 1", k_cache=cache[..., :0], v_cache=cache[..., :0]),
        bad("heads that do not group", "q", q[:, :, 1:], fragment=f"{kv_heads} KV heads"),
        bad("no KV heads", "q", q, fragment="0 KV heads", k_cache=cache[:, :, :0], v_cache=cache[:, :, :0]),
        bad("a cache of another dtype", "k_cache", cache.bfloat16(), TypeError, "bfloat16"),
        bad("two cache dtypes", "v_cache", codes, TypeError, "uint8"),
        bad("a cache of rank 3", "k_cache", cache[0], fragment="3-D"),
        bad("a cache of other sizes", "k_cache", torch.zeros(5, page, kv_heads, size + 1), fragment=f"{size + 1}"),
        bad("pages of no slots", "k_cache", cache[:, :0], fragment="page size", v_cache=cache[:, :0]),
        bad("appending to no slots", "k_cache", cache[:, :0], fragment="page size", v_cache=cache[:, :0], k=new, v=new),
        bad(
            "appending to one page for all",
            "k_cache",
            cache[:1].expand_as(cache),
            fragment="share memory",
            k=new,
            v=new,
        ),
        bad("caches of two shapes", "v_cache", cache[1:], fragment=f"({4 + batch}, "),
        bad("a strided cache", "v_cache", torch.zeros(*cache.shape[:3], 2 * size)[..., ::2], fragment="stride 2"),
        bad("a cache elsewhere", "v_cache", cache.to("meta"), fragment="meta"),
        bad("no cache", "k_cache", None, TypeError, "a tensor"),
        bad("no table for pages", "k_cache", cache, fragment=f"{batch} blocks", block_table=None),
        bad("an int64 table", "block_table", int32(batch, 2).long(), TypeError, "int64"),
        bad("a table of rank 1", "block_table", int32(batch), fragment="1-D"),
        bad("a table of another batch", "block_table", int32(batch + 1, 2), fragment=f"{batch + 1}"),
        bad("every other column of a table", "block_table", int32(batch, 4)[:, ::2], fragment="stride 2"),
        bad("a table elsewhere", "block_table", int32(batch, 2, device="meta"), fragment="meta"),
        bad("no lengths", "cache_seqlens", None, TypeError, "a tensor"),
        bad("int64 lengths", "cache_seqlens", int32(batch).long(), TypeError, "int64"),
        bad("a length as a number", "cache_seqlens", 3, TypeError, "int"),
        bad("lengths of another batch", "cache_seqlens", int32(batch + 1), fragment=f"({batch + 1},)"),
        bad("every other length", "cache_seqlens", int32(2 * batch)[::2], fragment="stride 2"),
        bad("one length for all", "cache_seqlens", int32(1).expand(batch), fragment="stride 0"),
        bad("lengths elsewhere", "cache_seqlens", int32(batch, device="meta"), fragment="meta"),
        bad("a scale without codes", "k_scale", torch.ones(1), fragment="None"),
        bad("a scale as a number", "v_scale", 1.0, TypeError, "float", **fp8),
        bad("a bf16 scale", "k_scale", torch.ones(1).bfloat16(), TypeError, "bfloat16", **fp8),
        bad("too many scales", "k_scale", torch.ones(kv_heads + 2), fragment=f"({kv_heads + 2},)", **fp8),
        bad("one scale for all heads", "k_scale", torch.ones(1).expand(kv_heads), fragment="stride 0", **fp8),
        bad("scales of no head", "v_scale", torch.ones(0), fragment="(0,)", **fp8),
        bad("every other INT8 scale", "k_scale", torch.ones(*slots, 2)[..., 0], fragment="stride 2", **int8),
        bad("INT8 scales of other blocks", "v_scale", torch.ones(4, *slots[1:]), fragment="(4, ", **int8),
        bad("no INT8 scale", "v_scale", None, TypeError, "a tensor", **int8),
        bad("a scale elsewhere", "v_scale", torch.ones(1, device="meta"), fragment="meta", **fp8),
        bad("k alone", "v", None, TypeError, "together", k=new),
        bad("v alone", "k", None, TypeError, "together", v=new),
        bad("k of another dtype", "k", new.half(), TypeError, "float16", v=new),
        bad("v of another shape", "v", new[:, :, :0], fragment=f"({batch}, {queries}, 0, {size})", k=new),
        bad("k of rank 3", "k", new[0], fragment="3-D", v=new),
        bad("v elsewhere", "v", new.to("meta"), fragment="meta", k=new),
        bad("a strided k", "k", torch.zeros(*new.shape[:3], 2 * size)[..., ::2], fragment="stride 2", v=new),
        bad("appending to K and V in one cache", "", cache, key="v_cache", k=new, v=new),
        bad("appending to rows that overlap", "k_cache", overlapping(cache), fragment="share memory", k=new, v=new),
        bad("negative splits", "num_splits", -2, fragment=">= -1"),
        bad("splits beyond 64 bits", "num_splits", 2**63, fragment="64 bits"),
        bad("splits as a float", "num_splits", 1.0, TypeError, "float"),
        *([] if size % 2 else int4_cases(bad, batch, kv_heads, size)),
        *score_cases(bad, batch, q),
    ]


def int4_cases(bad: Callable[..., BadInput], batch: int, kv_heads: int, size: int) -> list[BadInput]:
    channels, tokens = torch.zeros(4, kv_heads, size).half(), torch.zeros(4, 64, kv_heads).half()
    codes, tail = torch.zeros(4, 64, kv_heads, size // 2, dtype=torch.uint8), torch.zeros(3, 64, kv_heads, size)
    given = {"k_cache": codes, "v_cache": codes.clone(), "k_scale": channels, "k_zero": channels, "v_scale": tokens}
    given |= {"v_zero": tokens, "k_tail": tail, "seq_ids": int32(batch)}
    wide = torch.zeros(3, 64, kv_heads, 2 * size)

    def case(what: str, name: str, value: object, error: Any = ValueError, fragment: str = "") -> BadInput:
        return bad(what, name, value, error, fragment, **{key: x for key, x in given.items() if key != name})

    return [
        case("every other INT4 scale", "k_scale", torch.cat([channels, channels], 2)[..., ::2], fragment="stride 2"),
        case("every other INT4 zero", "v_zero", torch.zeros(4, 64, 2 * kv_heads).half()[..., ::2], fragment="stride 2")
        if kv_heads > 1
        else case("an INT4 zero of rank 2", "v_zero", tokens[0], fragment="2-D"),
        case("float32 zeros", "k_zero", channels.float(), TypeError, "float32"),
        case("zeros of other blocks", "v_zero", tokens[1:], fragment="(3, "),
        case("a strided tail", "k_tail", wide[..., ::2], fragment="stride 2"),
        case("a tail of shorter pages", "k_tail", tail[:, :32], fragment="(3, 32, "),
        case("a bf16 tail", "k_tail", tail.bfloat16(), TypeError, "bfloat16"),
        case("int64 seq_ids", "seq_ids", int32(batch).long(), TypeError, "int64"),
        case("too many seq_ids", "seq_ids", int32(batch + 1), fragment=f"({batch + 1},)"),
        case("no zeros", "k_zero", None, TypeError, "a tensor"),
    ]


def dense_cases(batch: int, queries: int, kv_heads: int, size: int, keys: int) -> list[BadInput]:
    q, k = torch.zeros(batch, queries, 2 * kv_heads, size), torch.zeros(batch, keys, kv_heads, size)
    codes = k.to(torch.float8_e4m3fn)
    bad = cases_of({"q": q, "k": k, "v": k})
    fp8 = {"k": codes, "v": codes}
    return [
        bad("no q", "q", None, TypeError, "a tensor"),
        bad("no k", "k", None, TypeError, "a tensor"),
        bad("float64 q", "q", q.double(), TypeError, "float64"),
        bad("q of rank 3", "q", q[0], fragment="3-D"),
        bad("k of another dtype", "k", k.half(), TypeError, "float16"),
        bad("v of another dtype than k", "v", codes, TypeError, "float8_e4m3fn"),
        bad("k of another FP8 than q", "k", codes, TypeError, "e4m3fn", v=codes, q=q.to(torch.float8_e5m2)),
        bad("v of another shape", "v", torch.zeros(batch, keys + 1, kv_heads, size), fragment=f"{keys + 1}"),
        bad("k of another size", "k", torch.zeros(batch, keys, kv_heads, size + 1), fragment=f"{size + 1}"),
        bad(
            "k of another batch",
            "k",
            torch.zeros(batch + 1, keys, kv_heads, size),
            v=k.new_zeros(batch + 1, *k.shape[1:]),
        ),
        bad("a strided v", "v", torch.zeros(*k.shape[:3], 2 * size)[..., ::2], fragment="stride 2"),
        bad("a strided k", "k", torch.zeros(*k.shape[:3], 2 * size)[..., ::2], fragment="stride 2"),
        bad("a scale of q for other heads", "q_scale", torch.ones(2 * kv_heads + 1), q=q.to(codes.dtype), **fp8),
        *[bad("a scale for each KV head", "q_scale", torch.ones(kv_heads), q=q.to(codes.dtype), **fp8)]
        * (kv_heads > 1),
        bad("heads that do not group", "q", q[:, :, 1:], fragment=f"{kv_heads} KV heads"),
        bad("no KV heads", "q", q, fragment="0 KV heads", k=k[:, :, :0], v=k[:, :, :0]),
        bad("k elsewhere", "k", k.to("meta"), fragment="meta"),
        bad("a scale for floats", "q_scale", torch.ones(1), fragment="None"),
        bad("q_scale for an FP8 k", "q_scale", torch.ones(1), fragment="None", **fp8),
        bad("too many scales", "v_scale", torch.ones(kv_heads + 2), fragment=f"({kv_heads + 2},)", **fp8),
        bad("a scale of rank 2", "k_scale", torch.ones(1, 1), fragment="2-D", **fp8),
        *score_cases(bad, batch, q),
    ]


def packed_cases(batch: int, queries: int, kv_heads: int, size: int, page: int) -> list[BadInput]:
    q, k = torch.zeros(queries, 2 * kv_heads, size), torch.zeros(queries + 3, kv_heads, size)
    cache, starts = torch.zeros(9, page, kv_heads, size), int32(batch + 1)
    good = {
        "q": q,
        "k": k,
        "v": k,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": queries,
        "max_seqlen_k": queries + 3,
    }
    paged = {"k": cache, "v": cache, "block_table": int32(batch, 2), "seqused_k": int32(batch), "cu_seqlens_k": None}
    bad = cases_of(good)
    return [
        bad("no q", "q", None, TypeError, "a tensor"),
        bad("integer q", "q", q.int(), TypeError, "int32"),
        bad("q of rank 4", "q", q[None], fragment="4-D"),
        bad("k of rank 4 without a table", "k", cache, fragment="4-D"),
        bad("k of rank 3 with a table", "k", k, fragment="3-D", **paged),
        bad("pages of no slots", "k", cache[:, :0], fragment="page size", **(paged | {"v": cache[:, :0]})),
        bad("v of another shape", "v", k[1:], fragment=f"({queries + 2}, "),
        bad("v of another dtype", "v", k.half(), TypeError, "float16"),
        bad("v elsewhere", "v", k.to("meta"), fragment="meta"),
        bad(
            "bytes (e4m3) with e5m2 queries",
            "k",
            cache.to(torch.uint8),
            TypeError,
            "e4m3fn",
            **(paged | {"v": cache.to(torch.uint8), "q": q.to(torch.float8_e5m2)}),
        ),
        bad("no starts", "cu_seqlens_q", None, TypeError, "a tensor"),
        bad("empty starts", "cu_seqlens_q", int32(0), fragment="at least 1"),
        bad("int64 starts", "cu_seqlens_q", starts.long(), TypeError, "int64"),
        bad("starts elsewhere", "cu_seqlens_q", int32(batch + 1, device="meta"), fragment="meta"),
        bad("no starts of keys", "cu_seqlens_k", None, TypeError, "a tensor"),
        bad("starts of another batch", "cu_seqlens_k", int32(batch), fragment=f"({batch},)"),
        bad("starts of keys in rank 2", "cu_seqlens_k", int32(1, batch), fragment="2-D"),
        bad(
            "no lengths for pages", "seqused_k", None, TypeError, "cu_seqlens_k is None", **{**paged, "seqused_k": None}
        ),
        bad("lengths of another batch", "seqused_k", int32(batch + 1), fragment=f"({batch + 1},)"),
        bad("int64 lengths", "seqused_k", int32(batch).long(), TypeError, "int64"),
        bad("a table of another batch", "block_table", int32(batch + 1, 2), fragment=f"{batch + 1}", k=cache, v=cache),
        bad("a table of floats", "block_table", torch.zeros(batch, 2), TypeError, "float32", k=cache, v=cache),
        bad("a negative bound", "max_seqlen_q", -1, fragment=">= 0"),
        bad("a bound as a float", "max_seqlen_k", 4.0, TypeError, "float"),
        bad("a bound as a tensor", "max_seqlen_q", torch.tensor(3), TypeError, "Tensor"),
        bad("a bound beyond 64 bits", "max_seqlen_q", 2**63, fragment="64 bits"),
        bad("a bound of keys beyond 64 bits", "max_seqlen_k", 2**70, fragment="64 bits"),
        bad("a scale for floats", "k_scale", torch.ones(1), fragment="None"),
        *score_cases(bad, batch, q),
    ]


def tau_cases(tokens: int, heads: int, kv_heads: int, size: int, rows: int) -> list[BadInput]:
    width = (heads + 2 * kv_heads) * size
    qkv, tok, table = (
        torch.zeros(tokens, width),
        torch.zeros(tokens, heads + kv_heads),
        torch.zeros(rows, heads + kv_heads),
    )
    good = {
        "qkv": qkv,
        "tok_qv_linear": tok,
        "tau_pos_table": table,
        "positions": int32(tokens),
        "num_heads": heads,
        "head_size": size,
    }
    bad = cases_of(good)
    return [
        bad("no qkv", "qkv", None, TypeError, "a tensor"),
        bad("float64 qkv", "qkv", qkv.double(), TypeError, "float64"),
        bad("qkv of rank 3", "qkv", qkv[None], fragment="3-D"),
        bad("a strided qkv", "qkv", torch.zeros(tokens, 2 * width)[:, ::2], fragment="stride 2"),
        bad("one row for all", "qkv", torch.zeros(1, width).expand(tokens, -1), fragment="share memory"),
        bad("a broken last head", "qkv", torch.zeros(tokens, width + 1), fragment=f"{width + 1}"),
        bad("one head too many", "qkv", torch.zeros(tokens, width + size), fragment=f"{width + size}"),
        bad("no KV heads", "qkv", torch.zeros(tokens, heads * size), fragment="Hk >= 1"),
        bad("no heads", "num_heads", 0, fragment=">= 1"),
        bad("heads as a float", "num_heads", 2.0, TypeError, "float"),
        bad("no size", "head_size", 0, fragment=">= 1"),
        bad("heads beyond 64 bits", "num_heads", 2**63, fragment="64 bits"),
        bad("a size beyond 64 bits", "head_size", 2**70, fragment="64 bits"),
        bad("rows that overlap", "qkv", overlapping(qkv), fragment="share memory"),
        bad("tok of another dtype", "tok_qv_linear", tok.half(), TypeError, "float16"),
        bad("tok of another width", "tok_qv_linear", torch.zeros(tokens, heads), fragment=f"({tokens}, {heads})"),
        bad("tok of other tokens", "tok_qv_linear", tok[1:], fragment=f"({tokens - 1}, "),
        bad("strided tok", "tok_qv_linear", torch.zeros(tokens, 2 * (heads + kv_heads))[:, ::2], fragment="stride 2"),
        bad("no tok", "tok_qv_linear", None, TypeError, "a tensor"),
        bad("a bf16 table for float32", "tau_pos_table", table.bfloat16(), TypeError, "bfloat16"),
        bad("a table too wide", "tau_pos_table", torch.zeros(rows, heads + kv_heads + 1), fragment=f"{rows}, "),
        bad("a table too narrow", "tau_pos_table", torch.zeros(rows, heads - 1), fragment=f"({rows}, {heads - 1})"),
        bad(
            "a shared table for more KV heads",
            "tau_pos_table",
            torch.zeros(rows, heads),
            fragment=f"({rows}, {heads})",
            qkv=torch.zeros(tokens, (3 * heads + 2) * size),
            tok_qv_linear=torch.zeros(tokens, 2 * heads + 1),
        ),
        bad("a strided table", "tau_pos_table", torch.zeros(rows, 2 * (heads + kv_heads))[:, ::2], fragment="stride 2"),
        bad("a table of rank 1", "tau_pos_table", torch.zeros(heads + kv_heads), fragment="1-D"),
        bad("a table elsewhere", "tau_pos_table", table.to("meta"), fragment="meta"),
        bad("positions of floats", "positions", torch.zeros(tokens), TypeError, "float32"),
        bad("positions of another length", "positions", int32(tokens + 1), fragment=f"({tokens + 1},)"),
        bad("every other position", "positions", int32(2 * tokens)[::2], fragment="stride 2"),
        bad("positions elsewhere", "positions", int32(tokens, device="meta"), fragment="meta"),
    ]


def merge_cases(tokens: int, heads: int, _: int, size: int, __: int) -> list[BadInput]:
    out, lse = torch.zeros(tokens, heads, size), torch.zeros(heads, tokens)
    bad = cases_of({"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse})
    return [
        bad("no output", "out_a", None, TypeError, "a tensor"),
        bad("float64", "out_a", out.double(), TypeError, "float64"),
        bad("two dtypes", "out_b", out.half(), TypeError, "float16"),
        bad("rank 2", "out_a", out[0], fragment="2-D"),
        bad("two shapes", "out_b", out[1:], fragment=f"({tokens - 1}, "),
        bad("strided", "out_b", torch.zeros(tokens, heads, 2 * size)[..., ::2], fragment="stride 2"),
        bad("the first strided", "out_a", torch.zeros(tokens, heads, 2 * size)[..., ::2], fragment="stride 2"),
        bad("a bf16 lse", "lse_a", lse.bfloat16(), TypeError, "bfloat16"),
        bad("lse of rank 1", "lse_b", lse[0], fragment="1-D"),
        bad("lse of other tokens", "lse_b", torch.zeros(heads, tokens + 1), fragment=f"({heads}, {tokens + 1})"),
        bad("no lse", "lse_a", None, TypeError, "a tensor"),
        bad("lse elsewhere", "lse_b", lse.to("meta"), fragment="meta"),
        bad("the first lse elsewhere", "lse_a", lse.to("meta"), fragment="meta"),
        bad("lse of other heads", "lse_b", torch.zeros(heads + 1, tokens), fragment=f"({heads + 1}, {tokens})"),
    ]


TABLES: dict[str, Table] = {
    "flash_attn_with_kvcache": decode_cases,
    "flash_attn_func": dense_cases,
    "flash_attn_varlen_func": packed_cases,
    "tau_tail": tau_cases,
    "merge_attention_states": merge_cases,
}
SHAPE = (3, 2, 2, 64, 8)
CASES = {getattr(kestrel_attention, op): table(*SHAPE) for op, table in TABLES.items()}
ALL = [(function, index) for function, cases in CASES.items() for index in range(len(cases))]


@pytest.mark.parametrize(("function", "case", "path"), refusal_params(CASES))
def test_bad_input_is_refused_and_named_and_nothing_is_written(function, case, path):
    assert_refused(function, case, path)


@settings(max_examples=100, deadline=None)
@given(
    which=st.sampled_from(ALL),
    shape=st.tuples(
        st.integers(2, 6), st.integers(2, 5), st.integers(2, 4), st.integers(2, 70), st.sampled_from([1, 8, 16, 64])
    ),
)
def test_bad_input_is_refused_whatever_the_shape(which, shape):
    function, index = which
    calls = TABLES[function.__name__](*shape)
    assume(index < len(calls))  # an odd size has no rows of INT4
    assert_rejects(function, calls[index])


# -- what follows from one good call ----------------------------------------------------------------------------------


def kv_call(kind: str) -> dict[str, Any]:
    """A good call that appends, over a cache of floats, INT8 or INT4."""
    q, new = torch.zeros(2, 1, 4, 64), torch.zeros(2, 1, 2, 64)
    given = {"q": q, "k": new, "v": new.clone(), "cache_seqlens": int32(2), "block_table": int32(2, 2)}
    if kind == "int8":
        given |= {name: torch.zeros(5, 8, 2, 64, dtype=torch.int8) for name in ("k_cache", "v_cache")}
        given |= {name: torch.ones(5, 8, 2) for name in ("k_scale", "v_scale")}
    elif kind == "int4":
        given |= {name: torch.zeros(5, 64, 2, 32, dtype=torch.uint8) for name in ("k_cache", "v_cache")}
        given |= {name: torch.ones(5, 2, 64).half() for name in ("k_scale", "k_zero")}
        given |= {name: torch.ones(5, 64, 2).half() for name in ("v_scale", "v_zero")}
        given |= {"k_tail": torch.zeros(3, 64, 2, 64), "seq_ids": torch.arange(2, dtype=torch.int32)}
    else:
        given |= {name: torch.zeros(5, 8, 2, 64) for name in ("k_cache", "v_cache")}
    return given


def good_calls() -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    x, starts = torch.zeros(2, 3, 2, 64), torch.tensor([0, 3], dtype=torch.int32)
    packed = {"q": x[0], "k": x[1], "v": x[1].clone(), "cu_seqlens_q": starts, "cu_seqlens_k": starts.clone()}
    outs, lses = torch.zeros(2, 3, 2, 64), torch.zeros(2, 2, 3)
    return [
        (flash_attn_func, {"q": x, "k": x.clone(), "v": x.clone(), "prefix_len": int32(2)}),
        (flash_attn_varlen_func, packed | {"max_seqlen_q": 3, "max_seqlen_k": 3}),
        *((flash_attn_with_kvcache, kv_call(kind)) for kind in ("float", "int8", "int4")),
        (
            kestrel_attention.tau_tail,
            {"qkv": torch.zeros(3, 48), "tok_qv_linear": torch.zeros(3, 4), "tau_pos_table": torch.zeros(5, 4)}
            | {"positions": int32(3), "num_heads": 2, "head_size": 8},
        ),
        (
            kestrel_attention.merge_attention_states,
            {"out_a": outs[0], "lse_a": lses[0], "out_b": outs[1], "lse_b": lses[1]},
        ),
    ]


DERIVED = [(f, case) for f, kwargs in good_calls() for case in derived_bad_inputs(f, (), kwargs)]


@pytest.mark.parametrize(
    ("function", "case"), DERIVED, ids=[f"{f.__name__}-{i}-{case.name}" for i, (f, case) in enumerate(DERIVED)]
)
def test_bad_input_that_follows_from_a_good_call_is_refused(function, case):
    assert_refused(function, case)


@pytest.mark.parametrize(("function", "kwargs"), good_calls(), ids=lambda x: getattr(x, "__name__", ""))
def test_odd_values_work_or_are_named(function, kwargs):
    @settings(max_examples=25, deadline=None)
    @given(call=odd_calls((), kwargs, (*ODD_VALUES, 10**400, -(2**63), 2**63)))
    def every(call):
        assert_works_or_is_named(function, *call)

    every()


def test_the_family_is_registered_and_documented():
    assert_registered(kestrel_attention)


# -- nothing is written before a refusal ------------------------------------------------------------------------------

REFUSED = {
    "a scale": {"softmax_scale": 2.0**127},
    "out requires grad": {"out": torch.zeros(2, 1, 4, 64).requires_grad_()},
    "out of another shape": {"out": torch.zeros(2, 1, 4, 32)},
    "splits": {"num_splits": -2},
    "return_lse": {"return_lse": 1},
    "a window": {"window_size": (0,)},
    "a prefix": {"prefix_len": "all"},
}


@pytest.mark.parametrize("kind", ["float", "int8", "int4"])
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_refused_append_writes_nothing(kind, change):
    call = kv_call(kind)
    call = {name: torch.randint_like(x, 0, 3) if x.dtype != torch.int32 else x for name, x in call.items()}
    before = twins(call.values())
    with pytest.raises((ValueError, TypeError), match=f"flash_attn_with_kvcache.*'{next(iter(change))}'"):
        flash_attn_with_kvcache(**call, **change)
    assert_same_bits(list(call.values()), before)
    with torch.no_grad():
        assert flash_attn_with_kvcache(**call, out=REFUSED["out requires grad"]["out"]).shape == (2, 1, 4, 64)


@pytest.mark.parametrize("kind", ["float", "int8", "int4"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_messages_name_the_public_function(kind, name):
    call = kv_call(kind)
    call[name] = call[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^flash_attn_with_kvcache: argument '{name}'.*requires_grad"):
        flash_attn_with_kvcache(**call)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("bound", [10**9, 2**62])
def test_bounds_beyond_what_the_tensors_hold_cost_nothing(paged, bound):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 7, 2, 8)
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    given = {"cu_seqlens_k": starts, "causal": True}
    if paged:
        k, v = torch.randn(2, 6, 4, 2, 8)
        given = {"cu_seqlens_k": None, "seqused_k": torch.tensor([5, 4], dtype=torch.int32), "causal": True}
        given["block_table"] = torch.arange(6, dtype=torch.int32).view(2, 3)
    want = flash_attn_varlen_func(q, k, v, starts, max_seqlen_q=7, max_seqlen_k=12, **given)
    got = flash_attn_varlen_func(q, k, v, starts, max_seqlen_q=bound, max_seqlen_k=bound, **given)
    assert torch.equal(got, want)


def test_tensors_that_require_grad_are_refused():
    q = torch.zeros(1, 1, 1, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"flash_attn_func.*'q'.*requires_grad"):
        flash_attn_func(q, q, q)
    with torch.no_grad():
        assert flash_attn_func(q, q, q).shape == q.shape


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_tensors_without_an_address_are_named_beside_out(name):
    call = {each: torch.zeros(1, 2, 1, 8) for each in ("q", "k", "v", "out")}
    with pytest.raises(ValueError, match=f"flash_attn_func: argument '{name}': expected a strided tensor"):
        flash_attn_func(**{**call, name: call[name].to_sparse()})

    def attention(x):
        return flash_attn_func(**{**call, name: x})

    with pytest.raises(ValueError, match=f"flash_attn_func: argument '{name}': .*autograd"):
        torch.func.grad(lambda x: attention(x).sum())(call[name])


OUT_OVERLAPS = {
    "flash_attn_func": {"prefix_len": ((2,), torch.int32), "sinks": ((4,), torch.float32)},
    "flash_attn_varlen_func": {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ((3,), torch.int32)),
        **dict.fromkeys(("seqused_k", "prefix_len"), ((2,), torch.int32)),
        "sinks": ((4,), torch.float32),
    },
    "flash_attn_with_kvcache": {
        **dict.fromkeys(("cache_seqlens", "prefix_len"), ((2,), torch.int32)),
        "block_table": ((2, 2), torch.int32),
        "sinks": ((4,), torch.float32),
    },
}


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, names in OUT_OVERLAPS.items() for name in names], ids=lambda x: x
)
def test_out_overlaps_no_argument_but_q(op, name):
    function = getattr(kestrel_attention, op)
    call = {each: torch.zeros(shape, dtype=dtype) for each, (shape, dtype) in OUT_OVERLAPS[op].items()}
    lead = (6,) if op == "flash_attn_varlen_func" else (2, 3)
    q, out = torch.zeros(2, *lead, 4, 8)
    if op == "flash_attn_with_kvcache":
        call |= {"k_cache": torch.zeros(4, 2, 2, 8), "v_cache": torch.zeros(4, 2, 2, 8)}
    else:
        call |= {"k": torch.zeros(*lead, 2, 8), "v": torch.zeros(*lead, 2, 8)}
    if op == "flash_attn_varlen_func":
        call |= {"max_seqlen_q": 3, "max_seqlen_k": 3}
    function(q=q, **call, out=out)
    shape, dtype = OUT_OVERLAPS[op][name]
    call[name] = out.view(-1).view(dtype)[5 : 5 + math.prod(shape)].view(shape)
    with pytest.raises(ValueError, match=f"{op}: argument 'out': .* shares no memory with '{name}', got tensors"):
        function(q=q, **call, out=out)
