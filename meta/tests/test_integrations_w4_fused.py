"""Several 4-bit layers of one input as one: its results, and the memory that the layers share with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kestrel_kernels.integrations.transformers.w4 import Fused, W4Linear
from kestrel_quant import pack_w4

COLUMNS, GROUP = 32, 16


def layer(rows, seed, *, symmetric=True, bias=False, permutation=None, group=GROUP):
    g = torch.Generator().manual_seed(seed)
    made = W4Linear(COLUMNS, rows, nn.Parameter(torch.randn(rows, generator=g), requires_grad=False) if bias else None)
    made.packed = pack_w4(torch.randn(rows, COLUMNS, generator=g) + 0.5, group, symmetric=symmetric)
    made.permutation = permutation
    return made


def owner_of(*layers):
    owner = nn.Module()
    for number, each in enumerate(layers):
        owner.add_module(f"l{number}", each)
    return owner, [f"l{number}" for number in range(len(layers))]


def backwards():
    return torch.arange(COLUMNS).flip(0)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (layer(16, 0), layer(32, 1), layer(16, 2)),
        lambda: (layer(16, 0), layer(32, 1, symmetric=False)),
        lambda: (layer(16, 0, symmetric=False), layer(32, 1)),
        lambda: (layer(16, 0, bias=True), layer(32, 1, bias=True)),
        lambda: (layer(16, 0, permutation=backwards()), layer(16, 1, permutation=backwards())),
    ],
    ids=["three", "zero points in the second", "zero points in the first", "biases", "an order of columns"],
)
def test_a_fused_layer_gives_what_its_parts_give(layers):
    owner, names = owner_of(*layers())
    parts = [getattr(owner, name) for name in names]
    assert Fused.refusal(parts) is None
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(3))
    expected = torch.cat([part(x) for part in parts], 1)
    fused = Fused(owner, names)
    assert fused.holds()
    magnitude = x.abs().sum(1, keepdim=True) * torch.cat([part.packed.dequantize().abs().amax(1) for part in parts])
    assert bool(((fused(x) - expected).abs() <= 2 * COLUMNS * 2.0**-24 * (magnitude + 4)).all())
    assert torch.equal(torch.cat([part(x) for part in parts], 1), expected)


def test_layers_are_rows_of_the_fused_memory_until_they_are_split():
    owner, names = owner_of(layer(16, 0), layer(32, 1))
    fused = Fused(owner, names)
    memory = fused.weight.codes
    starts = [getattr(owner, name).codes.data_ptr() - memory.data_ptr() for name in names]
    assert starts == [0, 16 * COLUMNS // 2 * (64 // COLUMNS)]  # a block has 64 columns
    fused.split()
    assert all(getattr(owner, name).codes.untyped_storage().data_ptr() != memory.data_ptr() for name in names)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (lambda: (layer(16, 0), layer(16, 1, group=8)), "group sizes"),
        (lambda: (layer(16, 0), layer(24, 1)), "multiple of 16"),
        (lambda: (layer(16, 0), layer(16, 1, permutation=backwards())), "several orders"),
        (lambda: (layer(16, 0, permutation=torch.arange(COLUMNS)), layer(16, 1, permutation=backwards())), "orders"),
        (lambda: (layer(16, 0), layer(16, 1, bias=True)), "only some have a bias"),
        (lambda: (layer(16, 0), nn.Linear(COLUMNS, 16)), "not plain W4Linear"),
    ],
    ids=["groups", "rows", "one order", "two orders", "bias", "linear"],
)
def test_what_cannot_be_fused_is_named(layers, reason):
    assert reason in Fused.refusal(layers())
