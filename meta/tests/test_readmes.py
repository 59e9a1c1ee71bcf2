"""The examples of the READMEs run, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "meta" / "ENGINES.md"
READMES = [ROOT / "README.md", ROOT / "meta" / "README.md", ENGINES, *sorted(ROOT.glob("packages/*/README.md"))]
GENERATED = re.compile(r"<!-- (results|ops|model).*?<!-- end of \1.*?-->", re.S)


def examples(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)


EXAMPLES = [
    pytest.param(code, id=f"{path.parent.name}-{path.stem}-{number}")
    for path in READMES
    for number, code in enumerate(examples(path))
    if "@kernel_op" not in code  # how an op is written, not how one is called
]


@pytest.mark.parametrize("path", [*READMES, ROOT / "packages" / "README.md"], ids=lambda path: path.parent.name)
def test_a_page_has_at_most_150_lines_beside_what_tools_write(path):
    assert len(GENERATED.sub("", path.read_text(encoding="utf-8")).splitlines()) <= 150


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    try:
        exec(compile(code, "README.md", "exec"), names)
    finally:
        torch.set_default_device(None)
    return names


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs(code):
    run(code)


def test_the_recipe_for_transformers_generates_and_restores():
    [code] = [code for code in examples(ENGINES) if "LlamaForCausalLM" in code]
    found = run(code)
    assert found["tokens"].shape == (2, 32)
    assert found["more"].shape[0] == 2
    assert found["cache"].lengths.tolist() == [found["more"].shape[1] - 1] * 2
    assert not any("forward" in module.__dict__ for module in found["model"].modules())


def test_ops_under_an_engines_names_do_what_it_calls_them_for():
    [code] = [code for code in examples(ENGINES) if "use_in" in code]
    engine = SimpleNamespace()
    run(code)["use_in"](engine)
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    normed = torch.nn.functional.rms_norm(x + residual, (64,), weight, 1e-6)

    out = torch.empty_like(x)
    engine.rms_norm(out, x + residual, weight, 1e-6)
    torch.testing.assert_close(out, normed)

    codes, scale = engine.rms_norm_dynamic_per_token_quant(
        x, weight, 1e-6, torch.float8_e4m3fn, residual=residual.clone()
    )
    torch.testing.assert_close(codes.float() * scale, normed, rtol=0.07, atol=0.02)

    new, kept = x.clone(), residual.clone()
    engine.fused_add_rms_norm(new, kept, weight, 1e-6)
    torch.testing.assert_close((new, kept), (normed, x + residual))

    output = torch.empty(5, 64, dtype=torch.float8_e4m3fn)
    for how, scales in (
        ({}, 1),
        ({"use_per_token_if_dynamic": True}, 5),
        ({"scale": torch.full((1,), 0.02)}, 1),
        ({"scale": torch.full((1,), 0.02), "output": output, "group_shape": (-1, -1)}, 1),
        ({"scale": torch.full((5,), 0.02), "group_shape": (1, -1)}, 5),
    ):
        codes, scale = engine.scaled_fp8_quant(x, **how)
        torch.testing.assert_close(codes.float() * scale, x, rtol=0.07, atol=0.02, msg=str(how))
        assert scale.numel() == scales, how
        assert "output" not in how or codes.data_ptr() == output.data_ptr()

    query, table = torch.randn(5, 2 * 8), torch.cat([torch.zeros(9, 4), torch.ones(9, 4)], dim=1)  # a quarter turn
    turned = query.clone().view(5, 2, 2, 4)
    engine.rotary_embedding(torch.arange(5), turned.view(5, 16), None, 8, table, True)
    torch.testing.assert_close(
        turned, torch.stack([-query.view(5, 2, 2, 4)[:, :, 1], query.view(5, 2, 2, 4)[:, :, 0]], 2)
    )

    caches, one = torch.zeros(2, 4, 2, 1, 64), torch.ones(1)  # 4 pages of 2 slots
    engine.reshape_and_cache_flash(
        x[:, None], residual[:, None], *caches, torch.tensor([7, 0, -1, 3, 4]), "auto", one, one
    )
    torch.testing.assert_close(caches[1].view(8, 64)[[7, 0, 3, 4]], residual[[0, 1, 3, 4]])
    assert caches[0].view(8, 64)[[1, 2, 5, 6]].eq(0).all()

    engine.moe_sum(x.view(5, 4, 16), summed := torch.empty(5, 16))
    torch.testing.assert_close(summed, x.view(5, 4, 16).sum(1))

    ids = torch.tensor([[0, 2], [2, 1]], dtype=torch.int32)
    pairs, experts, length = (torch.empty(n, dtype=torch.int32) for n in (4 * 5, 5, 1))
    engine.moe_align_block_size(ids, 3, 4, pairs, experts, length)
    assert (length.tolist(), experts[:3].tolist(), pairs[:12].tolist()) == (
        [12],
        [0, 1, 2],
        [0, 4, 4, 4, 3, 4, 4, 4, 1, 2, 4, 4],
    )
