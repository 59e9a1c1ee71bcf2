"""The kernels in graphs, on streams, after other launches and under torch.compile: the same bits as alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from gpu_buffers import random

from kestrel_kvcache import (
    gather_cache,
    int4_cache_write,
    int8_cache_write,
    reshape_and_cache,
    rotary_and_cache,
)
from kestrel_runtime import backend
from kestrel_runtime.testing import assert_waits_for_the_launch_before, graph_replay

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]


def copies(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in given.items()}


# -- graphs and streams -----------------------------------------------------------------------------------------------

READ = {
    reshape_and_cache: ("key", "value", "slot_mapping", "k_scale", "v_scale"),
    rotary_and_cache: ("positions", "query", "key", "value", "slot_mapping", "k_scale", "v_scale"),
    int8_cache_write: ("key", "value", "slot_mapping"),
    int4_cache_write: ("key", "value", "slot_mapping", "seq_ids", "k_tail"),
    gather_cache: ("key_cache", "value_cache", "block_table", "k_scale", "v_zero", "k_tail", "seq_ids"),
}


def arguments(op: Callable[..., Any], seed: int) -> dict[str, torch.Tensor]:
    """Tensors of a call for 8 tokens; the slots are the same for every seed, in another order."""
    key, value = (random(8, 4, 64, seed=seed + i) for i in range(2))
    slots = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).cuda()
    given = {"key": key, "value": value, "slot_mapping": slots}
    codes = torch.zeros(2, 1, 16, 4, 64, dtype=torch.uint8, device="cuda")
    given |= {"key_cache": codes[0], "value_cache": codes[1]}
    if op is int8_cache_write:
        scales = torch.zeros(2, 1, 16, 4, device="cuda")
        return (
            given
            | {"key_cache": codes[0].view(torch.int8), "value_cache": codes[1].view(torch.int8)}
            | dict(zip(("k_scale", "v_scale"), scales, strict=True))
        )
    if op in (reshape_and_cache, rotary_and_cache):
        given |= {name: torch.rand(4, device="cuda") + seed for name in ("k_scale", "v_scale")}
        if op is rotary_and_cache:
            query, angles = random(8, 8, 64, seed=seed + 2), torch.rand(16, 16, device="cuda")
            given |= {"positions": slots.flip(0).clone(), "query": query, "cos_sin_cache": angles}
        return given
    codes = torch.randint(0, 256, (2, 2, 64, 4, 32), dtype=torch.uint8, device="cuda")
    cache = {"key_cache": codes[0], "value_cache": codes[1], "k_tail": random(2, 64, 4, 64, seed=seed)}
    cache |= {name: random(2, 4, 64, dtype=torch.float16, seed=seed) for name in ("k_scale", "k_zero")}
    cache |= {name: random(2, 64, 4, dtype=torch.float16, seed=seed) for name in ("v_scale", "v_zero")}
    if op is int4_cache_write:  # rows 60 to 63 of page 0 finish it; two more tokens begin page 1
        slots = torch.tensor([60, 61, 62, 63, 64, 65], device="cuda").roll(seed % 2)
        return (
            {"key": key, "value": value} | cache | {"slot_mapping": slots, "seq_ids": torch.full_like(slots, seed % 2)}
        )
    table = torch.tensor([seed % 2, 1 - seed % 2], dtype=torch.int32, device="cuda")
    return cache | {"block_table": table, "seq_ids": table[:1].clone()}


def settings(op: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of such a call that are no tensors."""
    if op is gather_cache:
        return {"length": 100}
    if op in (reshape_and_cache, rotary_and_cache):
        return {"kv_cache_dtype": "fp8"} | ({"head_size": 64} if op is rotary_and_cache else {})
    return {}


def by_position(op: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """The op as a function of its tensors alone, in this order."""
    names = tuple(names)
    return lambda *tensors: op(**dict(zip(names, tensors, strict=True)), **settings(op))


def outputs(op: Callable[..., Any], given: dict[str, torch.Tensor], result: Any) -> list[torch.Tensor]:
    return list(result) if op is gather_cache else [given[name] for name in op.kernel_op.mutates]  # type: ignore[attr-defined]


def write_call(name: str, tokens: int, seed: int) -> tuple[Any, ...]:
    """Tensors of a call: key, value, caches, slots, scales."""
    rows = [random(tokens, 4, 64, seed=seed + i) for i in range(2)]
    cache = torch.zeros(2, 64, 16, 4, 64, dtype=torch.bfloat16 if name == "auto" else torch.uint8, device="cuda")
    slots = torch.randperm(1024, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")[:tokens]
    slots[1::5] = -1
    scales = torch.tensor([0.5 + seed], device="cuda"), torch.tensor([0.25 + seed], device="cuda")
    return (*rows, *cache, slots, *scales)


def write(name: str) -> Callable[..., None]:
    return lambda key, value, k, v, slots, ks, vs: reshape_and_cache(key, value, k, v, slots, name, ks, vs)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("op", READ)
def test_a_graph_replays_with_new_contents_and_runs_repeat(op: Callable[..., Any]) -> None:
    old, new = arguments(op, 1), arguments(op, 2)
    eager, again = copies(new), copies(new)
    want, repeated = (outputs(op, x, by_position(op, x)(*x.values())) for x in (eager, again))
    result = graph_replay(by_position(op, old), list(old.values()), list(new.values()))
    for a, b, c in zip(outputs(op, old, result), want, repeated, strict=True):
        assert same_bits(a, b)
        assert same_bits(b, c)


@pytest.mark.parametrize("op", [rotary_and_cache, int8_cache_write])
def test_every_row_alone_is_the_same(op: Callable[..., Any]) -> None:
    together = arguments(op, 1)
    alone = copies(together)
    by_position(op, together)(*together.values())
    of_tokens = ("positions", "query", "key", "value", "slot_mapping")
    for t in range(8):
        one = {name: x[t : t + 1] if name in of_tokens else x for name, x in alone.items()}
        by_position(op, one)(*one.values())
    for name in op.kernel_op.mutates:  # type: ignore[attr-defined]
        assert same_bits(alone[name], together[name])


def test_runs_on_the_current_stream() -> None:
    args = write_call("fp8", 740, 1)
    want = [x.clone() for x in args]
    write("fp8")(*want)
    key, stream = torch.zeros_like(args[0]), torch.cuda.Stream()
    scratch = torch.zeros(1 << 28, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        scratch.add_(1)  # long enough that a launch on another stream would come first
        key.copy_(args[0])
        write("fp8")(key, *args[1:])
    stream.synchronize()
    assert torch.equal(args[2], want[2])


# -- inputs written by the launch just before -------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in READ.items() for name in names])
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(op: Callable[..., Any], name: str) -> None:
    """reshape_and_cache, which triggers the next kernel early, writes the input as the last of 513 rows."""
    given, other = arguments(op, 2), arguments(op, 3)
    contents = given[name].clone(), other[name]
    results = {x: given[x] for x in op.kernel_op.mutates}  # type: ignore[attr-defined]
    begin = copies(results)
    words = contents[0].numel() * contents[0].element_size() // 4
    in_place = given[name].view(-1).view(torch.float32).view(1, 1, 1, words)
    beside, slots = torch.empty_like(in_place), torch.full((513,), -1, device="cuda")
    slots[512] = 0
    sources = torch.zeros(2, 513, 1, words, device="cuda")
    for source, x in zip(sources, contents, strict=True):
        source[512] = x.reshape(-1).view(torch.float32)

    def chain(i: int, between: Callable[[], None]) -> list[torch.Tensor]:
        for x, was in begin.items():  # what the op reads and writes; the input is written after that
            given[x].copy_(was)
        reshape_and_cache(sources[i], sources[i], in_place, beside, slots)
        between()
        return list(op(**given, **settings(op)) or results.values())

    assert_waits_for_the_launch_before(chain)


# -- compilation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", READ)
def test_every_op_compiles_without_a_graph_break(op: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    ours = arguments(op, 1)
    want = copies(ours)
    call = by_position(op, ours)
    with backend("auto"):
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(*ours.values())
    for a, b in zip(outputs(op, ours, got), outputs(op, want, call(*want.values())), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("name", ["auto", "fp8"])
@pytest.mark.parametrize("backend_name", ["inductor", "aot_eager"])
@pytest.mark.parametrize("one_buffer", [True, False])
def test_compiled_without_a_graph_break(name: str, backend_name: str, one_buffer: bool) -> None:
    torch._dynamo.reset()
    key, value, k, v, slots, *scales = write_call(name, 16, 1)
    args = (
        (key, value, slots, *scales, torch.stack((k, v))) if one_buffer else (key, value, slots, *scales, k, v.clone())
    )

    def call(key, value, slots, k_scale, v_scale, *cache):
        k, v = cache[0].unbind() if one_buffer else cache
        reshape_and_cache(key, value, k, v, slots, name, k_scale, v_scale)

    want = [x.clone() for x in args]
    call(*want)
    with backend("auto"):
        torch.compile(call, fullgraph=True, backend=backend_name)(*args)
    for a, b in zip(args, want, strict=True):
        assert torch.equal(a, b)
