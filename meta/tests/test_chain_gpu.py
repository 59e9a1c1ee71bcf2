"""Ops of several families one after the other in a CUDA graph, where launches overlap.

A kernel starts while the one before it still runs (programmatic dependent launch) and waits before it reads what that
one writes. Here the kernel before is one of ours wherever possible, because it lets the next one start early; PyTorch's
do not. An op that runs by reference fails its test: a reference would hide what the test is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import kestrel_kvcache
import kestrel_moe
import kestrel_norm
import kestrel_quant
import kestrel_rope
import kestrel_sampling
from kestrel_runtime import trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::kestrel_runtime.KestrelFallbackWarning"),
]

HEADS, SIZE, POSITIONS, REPETITIONS = 8, 64, 512, 1000
WIDTH = HEADS * SIZE
BF16 = torch.bfloat16


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


def runs_as_kernel(call: Callable[[], object]) -> bool:
    with trace() as served:
        call()
    return not any(count["reference"] for count in served.values())


def need_kernels(**calls: Callable[[], object]) -> None:
    missing = [name for name, call in calls.items() if not runs_as_kernel(call)]
    assert not missing, f"{', '.join(missing)}: by reference here"


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@dataclass
class Step:
    """The buffers of one decoder step: norm of x into query, key and value; rotation; write into the cache."""

    rows: int
    x: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    slots: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x = torch.empty(self.rows, 3 * WIDTH, dtype=BF16, device="cuda")
        self.positions = torch.zeros(self.rows, dtype=torch.int64, device="cuda")
        self.slots = torch.zeros(self.rows, dtype=torch.int64, device="cuda")
        self.qkv = torch.empty_like(self.x)
        self.query, self.key, self.value = self.qkv.split(WIDTH, dim=-1)
        self.weight = randn(3 * WIDTH)
        self.table = kestrel_rope.build_cos_sin_cache(SIZE, POSITIONS).cuda()
        self.key_cache = torch.zeros(self.rows, 1, HEADS, SIZE, dtype=BF16, device="cuda")
        self.value_cache = torch.zeros_like(self.key_cache)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Fresh contents for x, positions and slots."""
        positions = torch.randint(POSITIONS, (self.rows,), device="cuda")
        return randn(self.rows, 3 * WIDTH), positions, torch.randperm(self.rows, device="cuda")

    def take(self, inputs: tuple[torch.Tensor, ...]) -> None:
        for target, source in zip((self.x, self.positions, self.slots), inputs, strict=True):
            target.copy_(source)

    def norm(self) -> None:
        kestrel_norm.rms_norm(self.x, self.weight, out=self.qkv)

    def rotate(self) -> None:
        kestrel_rope.rotary_embedding(self.positions, self.query, self.key, SIZE, self.table)

    def store(self) -> None:
        key, value = (part.unflatten(-1, (HEADS, SIZE)) for part in (self.key, self.value))
        kestrel_kvcache.reshape_and_cache(key, value, self.key_cache, self.value_cache, self.slots)

    def results(self) -> torch.Tensor:
        caches = [cache.flatten(1) for cache in (self.key_cache, self.value_cache)]
        return torch.cat([self.qkv, *caches], dim=-1)


@pytest.mark.parametrize("rows", [1, 16, 740])
def test_an_overlapping_chain_gives_the_bits_of_the_serialised_one(rows):
    torch.manual_seed(rows)
    step = Step(rows)
    contents = [step.inputs() for _ in range(8)]
    step.take(contents[0])
    chain = (step.norm, step.rotate, step.store)
    need_kernels(rms_norm=step.norm, rotary_embedding=step.rotate, reshape_and_cache=step.store)

    serialised = []
    for inputs in contents:
        step.take(inputs)
        for part in chain:
            part()
            torch.cuda.synchronize()
        serialised.append(step.results())

    repetitions = REPETITIONS if rows < 100 else 64
    found = torch.empty(repetitions, *serialised[0].shape, dtype=BF16, device="cuda")

    def work() -> None:
        for repetition in range(repetitions):
            step.take(contents[repetition % 8])
            for part in chain:
                part()
            found[repetition] = step.results()

    captured(work).replay()
    for repetition in range(repetitions):
        assert torch.equal(found[repetition], serialised[repetition % 8]), f"repetition {repetition}"


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bits with a kernel that lets the next one start early, where there is one: a cache write of raw values."""
    bits, values = target.view(BF16), source.view(BF16)
    rows = (bits.numel() // 2, 1, 2) if bits.numel() % 2 == 0 else (bits.numel(), 1, 1)
    slots = torch.arange(rows[0], device="cuda")
    cache = bits.view(rows[0], 1, *rows[1:])
    kestrel_kvcache.reshape_and_cache(values.view(rows), values.view(rows), cache, torch.empty_like(cache), slots)


@dataclass
class Case:
    """One op and its arguments; `read` are its inputs that are no constants, `written` what it writes in place."""

    call: Callable[..., object]
    arguments: dict[str, torch.Tensor]
    read: dict[str, Callable[[], torch.Tensor]]
    """Other contents for each."""
    written: tuple[str, ...] = ()


def norm_case() -> Case:
    def call(x):
        return kestrel_norm.rms_norm(x, weight)

    weight = randn(WIDTH)
    return Case(call, {"x": randn(8, WIDTH)}, {"x": lambda: randn(8, WIDTH)})


def layer_norm_case() -> Case:
    def call(x):
        return kestrel_norm.layer_norm(x, weight, weight)

    weight = randn(WIDTH)
    return Case(call, {"x": randn(8, WIDTH)}, {"x": lambda: randn(8, WIDTH)})


def fused_add_case() -> Case:
    def call(x, residual):
        kestrel_norm.fused_add_rms_norm(x, residual, weight)

    weight = randn(WIDTH)
    fresh = {"x": lambda: randn(8, WIDTH), "residual": lambda: randn(8, WIDTH)}
    return Case(call, {name: make() for name, make in fresh.items()}, fresh, written=("x", "residual"))


def rotary_case() -> Case:
    def call(positions, query, key):
        kestrel_rope.rotary_embedding(positions, query, key, SIZE, table)

    table = kestrel_rope.build_cos_sin_cache(SIZE, POSITIONS).cuda()
    fresh = {
        "positions": lambda: torch.randint(POSITIONS, (8,), device="cuda"),
        "query": lambda: randn(8, WIDTH),
        "key": lambda: randn(8, WIDTH),
    }
    return Case(call, {name: make() for name, make in fresh.items()}, fresh, written=("query", "key"))


def cache_case(kv_cache_dtype: str = "auto") -> Case:
    def call(key, value, slot_mapping, k_scale, v_scale, key_cache, value_cache):
        kestrel_kvcache.reshape_and_cache(
            key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
        )

    def scale() -> torch.Tensor:
        return torch.rand(HEADS, device="cuda") + 0.5

    fresh: dict[str, Callable[[], torch.Tensor]] = {
        "key": lambda: randn(8, HEADS, SIZE),
        "value": lambda: randn(8, HEADS, SIZE),
        "slot_mapping": lambda: torch.randperm(8, device="cuda"),
    }
    if kv_cache_dtype != "auto":
        fresh |= {"k_scale": scale, "v_scale": scale}
    arguments = {"k_scale": scale(), "v_scale": scale(), **{name: make() for name, make in fresh.items()}}
    kind = BF16 if kv_cache_dtype == "auto" else torch.float8_e4m3fn
    for name in ("key_cache", "value_cache"):
        arguments[name] = torch.zeros(8, 1, HEADS, SIZE, device="cuda").to(kind)
    return Case(call, arguments, fresh, written=("key_cache", "value_cache"))


def fp8_cache_case() -> Case:
    return cache_case("fp8")


def quant_case() -> Case:
    return Case(kestrel_quant.fp8_quant, {"x": randn(8, WIDTH)}, {"x": lambda: randn(8, WIDTH)})


def gated_case() -> Case:
    return Case(kestrel_moe.silu_and_mul, {"x": randn(8, WIDTH)}, {"x": lambda: randn(8, WIDTH)})


def sum_case() -> Case:
    return Case(kestrel_moe.moe_sum, {"x": randn(8, 4, WIDTH)}, {"x": lambda: randn(8, 4, WIDTH)})


def router_case() -> Case:
    def call(logits):
        return kestrel_moe.topk_softmax(logits, 8)

    return Case(call, {"logits": randn(16, 64)}, {"logits": lambda: randn(16, 64)})


def topk_case() -> Case:
    def call(scores):
        return kestrel_sampling.topk_fwd(scores, 8)

    return Case(call, {"scores": randn(16, 64)}, {"scores": lambda: randn(16, 64)})


CASES = {
    "rms_norm": (norm_case, ["x"]),
    "layer_norm": (layer_norm_case, ["x"]),
    "fused_add_rms_norm": (fused_add_case, ["x", "residual"]),
    "rotary_embedding": (rotary_case, ["positions", "query", "key"]),
    "reshape_and_cache": (cache_case, ["key", "value", "slot_mapping"]),
    "reshape_and_cache_fp8": (fp8_cache_case, ["key", "value", "slot_mapping", "k_scale", "v_scale"]),
    "fp8_quant": (quant_case, ["x"]),
    "silu_and_mul": (gated_case, ["x"]),
    "moe_sum": (sum_case, ["x"]),
    "topk_softmax": (router_case, ["logits"]),
    "topk_fwd": (topk_case, ["scores"]),
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, (_, names) in CASES.items() for name in names])
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(op, name):
    torch.manual_seed(0)
    make, names = CASES[op]
    case = make()
    assert list(case.read) == names
    need_kernels(**{op: lambda: case.call(**case.arguments)})
    early = runs_as_kernel(lambda: write(case.arguments[name], case.arguments[name].clone()))
    contents = [case.read[name]() for _ in range(2)]
    before = {each: case.arguments[each].clone() for each in case.written}

    def once(content: torch.Tensor) -> list[torch.Tensor]:
        for each, saved in before.items():
            if each != name:
                case.arguments[each].copy_(saved)
        if early:
            write(case.arguments[name], content)
        else:
            case.arguments[name].copy_(content)
        result = case.call(**case.arguments)
        returned = [] if result is None else list(result) if isinstance(result, tuple) else [result]
        return [part.view(torch.uint8).flatten() for part in (*returned, *(case.arguments[each] for each in before))]

    expected = []
    for content in contents:
        expected.append([part.clone() for part in once(content)])
        torch.cuda.synchronize()
    assert any(not torch.equal(one, other) for one, other in zip(*expected, strict=True)), "the input does not matter"

    found = [torch.empty(REPETITIONS, part.numel(), dtype=torch.uint8, device="cuda") for part in expected[0]]

    def work() -> None:
        for repetition in range(REPETITIONS):
            for rows, part in zip(found, once(contents[repetition % 2]), strict=True):
                rows[repetition] = part

    captured(work).replay()
    for number, rows in enumerate(found):
        for parity in (0, 1):
            wrong = (rows[parity::2] != expected[parity][number]).any(dim=1)
            assert not wrong.any(), f"{int(wrong.sum())} of {REPETITIONS // 2} repetitions read the input too early"
