"""Allocation of results."""

from __future__ import annotations

import pytest
import torch

from kestrel_runtime import allocation, allocator, allocator_on, empty, empty_strided, leading, unread

SIZES = [(), (0,), (7,), (3, 5), (0, 5), (3, 0), (2, 3, 4), (2, 0, 4), (0, 3, 4), (1, 2, 3, 4), (2, 3, 1, 0)]
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64]


def assert_equals_torch_empty(like: torch.Tensor) -> None:
    for sizes in SIZES:
        for dtype in DTYPES:
            made, want = empty(like, dtype, *sizes), torch.empty(sizes, dtype=dtype, device=like.device)
            assert (made.shape, made.stride(), made.dtype, made.device) == (
                want.shape,
                want.stride(),
                want.dtype,
                want.device,
            )
            assert made.untyped_storage().nbytes() == want.untyped_storage().nbytes()
            assert not made.requires_grad


def test_results_of_a_cpu_tensor_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call to CUDA, which fails on a machine without a driver."""
    monkeypatch.setattr(allocation, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.delattr(allocation, "_current_device", raising=False)
    assert_equals_torch_empty(torch.ones(2))


@pytest.fixture
def fast_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast allocation of the GPU, replaced by its counterpart for the CPU."""
    monkeypatch.setattr(allocation, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(allocation, "_on_the_current_gpu", lambda tensor: True)


def test_allocation_without_the_dispatcher_gives_the_tensors_of_torch(fast_on_the_cpu: None) -> None:
    assert_equals_torch_empty(torch.ones(2))


@pytest.mark.parametrize("fast", [True, False])
def test_strided_results_have_the_given_strides(fast: bool, request: pytest.FixtureRequest) -> None:
    if fast:
        request.getfixturevalue("fast_on_the_cpu")
    one, sizes, strides = torch.ones(2), (2, 3, 4), (4, 8, 1)
    for made in (
        empty_strided(one, torch.bfloat16, sizes, strides),
        allocator(one)(sizes, strides, torch.bfloat16),
        allocator_on(one.device)()(sizes, strides, torch.bfloat16),
    ):
        assert (made.shape, made.stride(), made.dtype, made.device.type) == (sizes, strides, torch.bfloat16, "cpu")


def test_the_allocator_of_a_gpu_follows_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_empty_strided", lambda *form: "on the current GPU")
    monkeypatch.setattr(allocation, "_empty_strided_on", lambda device, *form: f"on {device}")
    current = 1
    monkeypatch.setattr(allocation, "_current_device", lambda: current, raising=False)
    allocate = allocator_on(torch.device("cuda", 1))
    assert allocate()((2,), (1,), torch.int32) == "on the current GPU"
    current = 0
    assert allocate()((2,), (1,), torch.int32) == "on cuda:1"


def test_memory_that_nothing_reads_is_shared() -> None:
    first, second = (unread((3, 5), torch.float32, torch.device("cpu")) for _ in range(2))
    as_torch = torch.from_dlpack(first)
    assert (as_torch.shape, as_torch.dtype) == ((3, 5), torch.float32)
    assert as_torch.data_ptr() == torch.from_dlpack(second).data_ptr()


@pytest.mark.parametrize("fast", [True, False])
def test_the_leading_elements_are_a_view(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(allocation, "_reinterpret", None)
    assert allocation._reinterpret is not None or not fast
    base = torch.arange(10, dtype=torch.int32)[2:]
    part = leading(base, 3)
    assert part.tolist() == [2, 3, 4]
    part.fill_(7)
    assert base.tolist() == [7, 7, 7, 5, 6, 7, 8, 9]
    assert leading(base, 0).shape == (0,)


@pytest.mark.parametrize("sizes", [(-1,), (3, -1), (3, 2.0), (3, "2")], ids=str)
def test_impossible_sizes_are_refused(sizes: tuple[object, ...], fast_on_the_cpu: None) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        empty(torch.ones(2), torch.float32, *sizes)  # type: ignore[arg-type]


def test_a_torch_without_the_fast_allocation_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_empty_strided", None)
    assert_equals_torch_empty(torch.ones(2))


@pytest.mark.gpu
def test_on_a_gpu_memory_comes_from_the_caching_allocator() -> None:
    x = torch.ones(2, device="cuda")
    assert allocation._empty_strided is not None, "this torch has no fast way"
    assert_equals_torch_empty(x)

    def requested() -> int:  # what callers asked for: a block may be larger than that
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    before = requested()
    made = empty(x, torch.float32, 1 << 20)
    assert requested() - before == 4 << 20
    made.record_stream(torch.cuda.Stream())
    del made
    torch.cuda.synchronize()
    empty(x, torch.float32, 1)  # the allocator frees blocks that other streams are done with
    assert requested() == before


@pytest.mark.gpu
def test_in_a_graph_memory_comes_from_its_pool() -> None:
    x, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = empty(x, torch.float32, 1 << 20)
        made.copy_(x[0].expand(1 << 20))
    segments = {s["address"]: s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == graph.pool()}
    assert any(at <= made.data_ptr() < at + s["total_size"] for at, s in segments.items())
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((made == 5).all())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_results_are_on_the_gpu_of_the_tensor_even_if_another_is_current() -> None:
    assert_equals_torch_empty(torch.ones(2, device="cuda:1"))
