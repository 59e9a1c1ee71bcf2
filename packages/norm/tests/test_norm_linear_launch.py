"""rms_norm_linear: one launch, or the kernel of rms_norm and the vendor's product."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import kestrel_norm

module = importlib.import_module("kestrel_norm.rms_norm_linear")
Tensor = torch.Tensor


class Kernels:
    """In place of the binary: entry points that note their arguments, and compute by reference."""

    def __init__(self, covers: bool) -> None:
        self.covers, self.calls = covers, []

    def rms_norm_linear(self, out: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> bool:
        self.calls.append(("rms_norm_linear", (norm_weight, weight, eps)))
        if self.covers:
            out.copy_(kestrel_norm.rms_norm_linear(x, norm_weight, weight, eps))
        return self.covers

    def product_of_norm(self, out: Tensor, normed: Tensor, weight: Tensor) -> bool:
        return False

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float, weight_bias: float) -> None:
        self.calls.append(("rms_norm", (weight, eps, weight_bias)))
        assert out.is_contiguous()
        out.copy_(kestrel_norm.rms_norm(x, weight, eps, weight_bias=weight_bias))


def launch(covers: bool, monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> tuple[Tensor, Kernels]:
    made = Kernels(covers)
    monkeypatch.setattr(module, "_kernels", made)
    return module.rms_norm_linear.kernel_op.launch(*args, **kwargs), made


def exact_operands(*leading: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of +2 and -2, whose norm is +1 and -1, and small whole numbers: no product is rounded."""
    x = torch.randint(0, 2, (*leading, 64)) * 4.0 - 2
    return x, torch.randint(-3, 4, (64,)).float(), torch.randint(-3, 4, (24, 64)).float()


@pytest.mark.parametrize("covers", [True, False], ids=["kernel", "vendor"])
@pytest.mark.parametrize("leading", [(6,), (0,), (2, 3), (2, 1, 3)], ids=str)
def test_a_call_without_a_kernel_is_the_norm_and_the_vendor_s_product(
    monkeypatch: pytest.MonkeyPatch, leading: tuple[int, ...], covers: bool
) -> None:
    x, norm_weight, weight = exact_operands(*leading)
    got, made = launch(covers, monkeypatch, x, norm_weight, weight, 0.0)
    assert torch.equal(got, x / 2 * norm_weight @ weight.T)
    assert got.is_contiguous()
    assert made.calls[0] == ("rms_norm_linear", (norm_weight, weight, 0.0))
    assert made.calls[1:] == ([] if covers else [("rms_norm", (norm_weight, 0.0, 0.0))])


@pytest.mark.parametrize("covers", [True, False], ids=["kernel", "vendor"])
def test_eps_reaches_both_kernels(monkeypatch: pytest.MonkeyPatch, covers: bool) -> None:
    _, made = launch(covers, monkeypatch, *exact_operands(3), 0.25)
    assert [given[-1 if name == "rms_norm_linear" else 1] for name, given in made.calls] == [0.25] * (2 - covers)


@pytest.mark.parametrize("covers", [True, False], ids=["kernel", "vendor"])
def test_views_of_x_and_out_are_read_and_written_where_they_are(monkeypatch: pytest.MonkeyPatch, covers: bool) -> None:
    x, norm_weight, weight = exact_operands(3, 2)
    wide = torch.full((2, 3, 30), float("nan"))
    out = wide.transpose(0, 1)[..., 5:29]
    got, _ = launch(
        covers, monkeypatch, x.transpose(0, 1).contiguous().transpose(0, 1), norm_weight, weight, 0.0, out=out
    )
    assert got is out
    assert torch.equal(out, x / 2 * norm_weight @ weight.T)
    assert bool(wide[..., :5].isnan().all() and wide[..., 29:].isnan().all())
