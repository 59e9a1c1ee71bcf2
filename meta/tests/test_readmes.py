"""The examples of the READMEs run, as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kestrel_quant

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "meta" / "ENGINES.md"
READMES = [ROOT / "README.md", ROOT / "meta" / "README.md", ENGINES, *sorted(ROOT.glob("packages/*/README.md"))]
GENERATED = re.compile(r"<!-- (results|ops).*?<!-- end of \1.*?-->", re.S)


def examples(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)


EXAMPLES = [
    pytest.param(code, id=f"{path.parent.name}-{path.stem}-{number}")
    for path in READMES
    for number, code in enumerate(examples(path))
    if "@kernel_op" not in code  # how an op is written, not how one is called
    and "from vllm import" not in code  # test_integrations_vllm.py runs it
]


@pytest.mark.parametrize("path", [*READMES, ROOT / "packages" / "README.md"], ids=lambda path: path.parent.name)
def test_a_page_has_at_most_150_lines_beside_what_tools_write(path):
    assert len(GENERATED.sub("", path.read_text(encoding="utf-8")).splitlines()) <= 150


RESULTS = [*ROOT.glob("packages/*/results/*.json"), *ROOT.glob("meta/results/**/*.json")]
# The others are reports of the benchmarks (h200.json) and of models, from which tools make tables and plots.
RECORDS = [path for path in sorted(RESULTS) if "_" in path.stem and not path.with_suffix(".svg").exists()]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.relative_to(ROOT).parts[-3]}-{path.stem}")
def test_a_record_of_an_experiment_is_cited_in_its_package(path):
    package = next(parent.parent for parent in path.parents if parent.name == "results")
    assert any(path.name in page.read_text(encoding="utf-8") for page in package.glob("*.md"))


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


def test_the_recipe_for_a_conversation_reads_every_token_once():
    [code] = [code for code in examples(ENGINES) if "quantize(model)" in code]
    found = run(code)
    assert found["tokens"].shape == (1, 12 + 3 * 15)
    assert found["cache"].lengths.tolist() == [12 + 3 * 15 - 6]  # all but the last answer's last token and a question


def test_the_recipe_for_transformers_generates_and_restores():
    [code] = [code for code in examples(ENGINES) if "restore" in code]
    found = run(code)
    assert found["tokens"].shape == (2, 32)
    assert found["more"].shape[0] == 2
    assert found["cache"].lengths.tolist() == [found["more"].shape[1] - 1] * 2
    assert not any("forward" in module.__dict__ for module in found["model"].modules())


def test_the_recipe_for_an_op_works_word_for_word(tmp_path):
    """On a copy of kestrel_quant without a binary, so that the op runs its reference."""
    reference, op, test = examples(ROOT / "packages" / "README.md")
    package = tmp_path / "kestrel_quant"
    shutil.copytree(Path(kestrel_quant.__file__).parent, package, ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    for name, code in (("reference.py", reference), ("__init__.py", "from .scale_rows import scale_rows\n")):
        with (package / name).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{code}")
    (package / "scale_rows.py").write_text(op, encoding="utf-8")
    (tmp_path / "test_scale_rows.py").write_text(test, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules"]
    done = subprocess.run(
        [*command, "test_scale_rows.py", "kestrel_quant/scale_rows.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
