"""On a GPU the rotation is that of a CPU, in a captured graph too."""

from __future__ import annotations

import pytest
import torch

from kestrel_rope import build_cos_sin_cache, multimodal_rotary_embedding, rotary_embedding
from kestrel_runtime.testing import graph_replay, ulp_distance

pytestmark = pytest.mark.gpu

TABLE = build_cos_sin_cache(64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def inputs(tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(-1, 130, (3, tokens), generator=generator)  # some outside the table
    return [positions, *torch.randn(2, tokens, 4 * 64, generator=generator).to(dtype)]


def plain(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    rotary_embedding(positions[0], query, key, 64, TABLE.to(query.device))


def multimodal(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    multimodal_rotary_embedding(positions, query, key, 64, TABLE.to(query.device), [12, 10, 10], interleaved=True)


def assert_rotated(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Within one unit in the last place, or where x*c - y*s cancels within float32's rounding of the terms."""
    for a, b in zip(got, want, strict=True):
        near = (a.cpu().float() - b.float()).abs() <= 2e-6
        assert bool((near | (ulp_distance(a.cpu(), b) <= 1)).all())


@pytest.mark.parametrize("op", [plain, multimodal])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 16, 740])
def test_rows_turn_as_on_a_cpu(op, dtype, tokens):
    on_cpu = inputs(tokens, dtype)
    on_gpu = [x.cuda() for x in on_cpu]
    op(*on_cpu)
    op(*on_gpu)
    assert_rotated(on_gpu[1:], on_cpu[1:])


@pytest.mark.parametrize("op", [plain, multimodal])
def test_a_replayed_graph_sees_new_rows_and_positions(op):
    table = TABLE.cuda()

    def launch(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        if op is plain:
            rotary_embedding(positions[0], query, key, 64, table)
        else:
            multimodal_rotary_embedding(positions, query, key, 64, table, [12, 10, 10], interleaved=True)

    args, fresh = ([x.cuda() for x in inputs(16, torch.bfloat16, seed)] for seed in (1, 2))
    graph_replay(launch, args, fresh)
    want = [x.cpu() for x in fresh]
    op(*want)
    assert_rotated(args[1:], want[1:])


def test_a_row_stride_past_two_to_the_31():
    far = torch.zeros(2**31 + 64, dtype=torch.bfloat16, device="cuda").as_strided((2, 64), (2**31, 1))
    positions, query, _ = inputs(2, torch.bfloat16)
    positions[:] = torch.tensor([3, 5])
    near = query[:, :64].cuda()
    far.copy_(near)
    for x in (far, near):
        rotary_embedding(positions[0].cuda(), x, None, 64, TABLE.cuda())
    assert torch.equal(far, near)
    assert not torch.equal(far, query[:, :64].cuda())
