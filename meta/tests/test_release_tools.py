"""tools/wheel_checks and tools/version.py find the faults that they look for."""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="needs the repository")


def toml(path: Path) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    import tomllib

    return tomllib.loads(path.read_text())


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine_code(monkeypatch):
    monkeypatch.setitem(sys.modules, "machine_code", None)
    return load(TOOLS / "wheel_checks" / "machine_code.py", "machine_code")


@pytest.fixture
def wheels(machine_code, monkeypatch):
    """The checks of wheels; binaries need what is allowed (pyelftools is not here) and hold what a test says."""
    monkeypatch.setitem(sys.modules, "library", SimpleNamespace(problems=lambda path, functions: []))
    monkeypatch.setitem(sys.modules, "wheel_checks_main", None)
    module = load(TOOLS / "wheel_checks" / "__main__.py", "wheel_checks_main")
    module.held = [
        machine_code.Kernel("".join(filter(str.isdigit, arch)), "rms_norm_kernel", 40, 0, 0, 2)
        for arch in module.ALL_ARCHS
    ]
    monkeypatch.setattr(machine_code, "kernels", lambda binary, cuobjdump: module.held)
    monkeypatch.setattr(module, "HERE", Path("/nowhere"))
    monkeypatch.setattr(module, "wide_load_problems", lambda package, kernels: [])
    return module


# -- machine code -----------------------------------------------------------------------------------------------------

USAGE = """
Fatbin elf code:
arch = sm_80
 Function first:
  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:400
 Function second:
  REG:255 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:400
arch = sm_90a
 Function first:
  REG:40 STACK:0 SHARED:0 LOCAL:0
"""
SASS = """
\tcode for sm_80
\t\tFunction : first
        /*0010*/  LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/  LDG.E.64 R4, [R2.64] ;
        /*0030*/  LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
\t\tFunction : second
        /*0010*/  LDG.E R4, [R2.64] ;
        /*0020*/  STG.E.128 [R2.64], R4 ;
\tcode for sm_90a
\t\tFunction : first
        /*0010*/  UTMALDG.2D [UR8], [UR4] ;
        /*0020*/  UBLKCP [UR4], [UR6], UR8 ;
"""


def cuobjdump(folder: Path, usage: str = USAGE, sass: str = SASS, status: int = 0) -> Path:
    (folder / "usage").write_text(usage)
    (folder / "sass").write_text(sass)
    tool = folder / "cuobjdump"
    tool.write_text(f'#!/bin/sh\ncat "{folder}/${{1#--dump-}}" 2>/dev/null || cat "{folder}/usage"\nexit {status}\n')
    tool.chmod(0o755)
    return tool


def host_library(fatbin: bytes, after: bytes = b"") -> bytes:
    """A 64-bit ELF file with a section .nv_fatbin, and what lies behind it."""
    names = b"\0.nv_fatbin\0"
    content = fatbin + after + names
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<QQ", header, 32, 0, 64 + len(content))
    struct.pack_into("<HHHHH", header, 54, 56, 0, 64, 2, 0)
    sections = [(0, 64 + len(fatbin) + len(after), len(names)), (1, 64, len(fatbin))]
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 1, 0) for name, at, size in sections)
    return bytes(header) + content + table


def test_registers_local_memory_and_wide_loads_of_each_kernel_are_read(machine_code, tmp_path):
    library = tmp_path / "x.so"
    library.write_bytes(host_library(b"cubins"))
    assert machine_code.kernels(library, cuobjdump(tmp_path)) == [
        machine_code.Kernel("80", "first", 32, 0, 0, 2),
        machine_code.Kernel("80", "second", 255, 16, 8, 0),
        machine_code.Kernel("90", "first", 40, 0, 0, 2),
    ]


def test_a_file_that_cuobjdump_cannot_read_is_no_file_without_kernels(machine_code, tmp_path):
    library = tmp_path / "x.so"
    library.write_bytes(host_library(b"cubins"))
    with pytest.raises(SystemExit, match="cuobjdump --dump-sass x.so failed"):
        machine_code.kernels(library, cuobjdump(tmp_path, status=1))


def elf(machine: int, content: bytes) -> bytes:
    """A 64-bit ELF file whose section table ends it, after the content."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<QQ", header, 32, 0, 64 + len(content))
    struct.pack_into("<HHHH", header, 54, 56, 0, 64, 1)
    return bytes(header) + content + bytes(64)


def test_cubins_in_a_data_section_are_found_whole(machine_code):
    first, second = elf(190, b"first"), elf(190, b"a second one")
    data = elf(62, b"the library") + first + b"between" + elf(62, b"not CUDA") + second + b"after"
    assert list(machine_code.embedded_cubins(data)) == [first, second]


def test_cubins_of_the_section_that_cuobjdump_reads_are_not_found_a_second_time(machine_code):
    of_nvcc, of_cute = elf(190, b"by nvcc"), elf(190, b"by CuTe's compiler")
    library = host_library(b"header" + of_nvcc, after=of_cute)
    section = machine_code.section_range(library, b".nv_fatbin")
    assert library[section.start : section.stop] == b"header" + of_nvcc
    assert list(machine_code.embedded_cubins(library, outside=section)) == [of_cute]
    assert not machine_code.section_range(library, b".text")


def cubin(arch: int, **kernels: int) -> bytes:
    """A plain cubin whose kernels have so many instructions each."""
    header, content = bytearray(64), bytearray()
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", header, 18, 190)
    struct.pack_into("<I", header, 48, 0x6000004 | arch << 8)
    names, sections = bytearray(b"\0"), []
    for name, instructions in kernels.items():
        sections.append((len(names), 64 + len(content), 16 * instructions))
        names += f".text.{name}".encode() + b"\0"
        content += bytes(16 * instructions)
    sections.append((0, 64 + len(content), len(names)))
    content += names
    struct.pack_into("<QQ", header, 32, 0, 64 + len(content))
    struct.pack_into("<HHHHH", header, 54, 56, 0, 64, len(sections), len(sections) - 1)
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 1, 0) for name, at, size in sections)
    return bytes(header) + bytes(content) + table


def test_kernels_in_plain_cubins_of_an_architecture_are_disassembled_together(machine_code, tmp_path):
    """nvdisasm gives offsets into the code of all of them; two cubins may have a kernel of one name."""
    usage = "".join(f" Function {name}:\n  REG:40 STACK:0 SHARED:0 LOCAL:0\n" for name in ("a", "b"))
    tool = cuobjdump(tmp_path, usage)
    log, disassembler = tmp_path / "log", tmp_path / "nvdisasm"
    loads = "".join(f"        /*{16 * i:04x}*/    LDG.E.128 R4, [R2.64] ;\n" for i in (0, 4, 5, 6, 7))
    (tmp_path / "loads").write_text(loads + "        /*0010*/    LDG.E R4, [R2.64] ;\n")
    disassembler.write_text(f'#!/bin/sh\necho "$2" $(wc -c < "$5") >> "{log}"\ncat "{tmp_path}/loads"\n')
    disassembler.chmod(0o755)
    library = tmp_path / "x.so"
    between = b"data"
    library.write_bytes(elf(62, b"") + between.join([cubin(90, a=2, b=3), cubin(90, a=3, b=2), cubin(86, a=9, b=1)]))
    found = [(each.arch, each.name, each.wide_loads) for each in machine_code.kernels(library, tool)]
    assert found == [("90", "a", 1), ("90", "b", 1), ("90", "a", 3), ("90", "b", 0), ("86", "a", 5), ("86", "b", 0)]
    assert sorted(log.read_text().split("\n")) == ["", "SM86 160", "SM90 160"]


# -- which CuTe kernels are compiled -----------------------------------------------------------------------------------


def test_a_build_compiles_no_kernel_for_sm_86_or_sm_89_that_is_that_of_sm_80(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    driver = importlib.import_module("cute_build.driver")
    variants = {"any": object(), "fp8": SimpleNamespace(converts_fp8=True), "one": SimpleNamespace(archs=("90a",))}
    monkeypatch.setattr(driver.worker, "load_variants", lambda source, package: variants)
    monkeypatch.delenv("KESTREL_VARIANTS", raising=False)
    family = driver.Family(Path("src"), "kestrel_x")
    built = [("any", "80"), ("any", "90a"), ("fp8", "80"), ("fp8", "89"), ("fp8", "90a"), ("one", "90a")]
    assert driver._jobs(family, ("80", "86", "89", "90a")) == built
    assert driver._jobs(family, ("86",)) == [("any", "86"), ("fp8", "86")]
    monkeypatch.setenv("KESTREL_VARIANTS", "^f")
    assert driver._jobs(family, ("86", "90a")) == [("fp8", "86"), ("fp8", "90a")]


# -- what the rebuild of one family shows for the others ---------------------------------------------------------------


def test_families_of_cuda_kernels_declare_the_same_build():
    """CI rebuilds one of them byte for byte, from its sdist and in isolation."""
    declared = {}
    for path in sorted((TOOLS.parent / "packages").glob("*/pyproject.toml")):
        project = toml(path)
        scikit = project.get("tool", {}).get("scikit-build")
        if scikit:
            backend, tag = project["build-system"]["requires"], scikit["wheel"]["py-api"]
            requires = [each for each in scikit["build"]["requires"] if "cutlass" not in each]
            shared = {to for to in scikit["sdist"]["force-include"].values() if "cute" not in to}
            declared[path.parent.name] = (backend, tag, requires, shared)
    assert len(declared) == 6
    for name, build in declared.items():
        assert build == declared["rope"], name


def test_of_each_rebuilt_family_a_source_is_compiled():
    matrix = json.loads((TOOLS.parent / "ci" / "matrix.json").read_text())
    lists = [TOOLS.parent / matrix["packages"][name] / "CMakeLists.txt" for name in matrix["rebuilt"]]
    for path in filter(Path.is_file, lists):
        sources = re.findall(r"csrc/\w+\.cu\b", path.read_text())
        assert any(re.search(matrix["rebuilt_sources"], source) for source in sources), path


# -- wheels -----------------------------------------------------------------------------------------------------------


def wheel(folder: Path, tag: str = "py3-none-any", archs: list[str] | None = None, **files: str | None) -> Path:
    members = {"kestrel_norm/py.typed": "", "kestrel_norm-0.1.0.dist-info/licenses/LICENSE": "x"}
    if archs is not None:
        manifest = {"archs": archs, "functions": []}
        members |= {"kestrel_norm/_lib/manifest.json": json.dumps(manifest), "kestrel_norm/_lib/kestrel_norm.so": "x"}
    path = folder / f"kestrel_norm-0.1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (members | files).items():
            if content is not None:
                archive.writestr(name, content)
    return path


def problems(wheels: ModuleType, path: Path, *build_paths: str) -> list[str]:
    return wheels.check(path, build_paths, Path("cuobjdump"))[0]


@pytest.fixture
def binary_tag(wheels):
    return f"py3-none-{wheels.PLATFORM}"


def test_a_good_wheel_passes(wheels, binary_tag, tmp_path):
    assert problems(wheels, wheel(tmp_path), "/build") == []
    assert problems(wheels, wheel(tmp_path, binary_tag, wheels.ALL_ARCHS), "/build") == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"kestrel_rope/x.py": ""}, "installs kestrel_rope/x.py outside its package"),
        ({"kestrel_norm/py.typed": None}, "has no py.typed"),
        ({"kestrel_norm-0.1.0.dist-info/licenses/LICENSE": None}, "has no LICENSE"),
        ({"kestrel_norm/x.py": "# of /build/here"}, "kestrel_norm/x.py contains the path /build"),
    ],
)
def test_a_bad_file_is_named(wheels, tmp_path, files, problem):
    assert problems(wheels, wheel(tmp_path, **files), "/elsewhere", "/build") == [problem]


def test_a_wheel_above_its_limit_is_named(wheels, monkeypatch, tmp_path):
    path = wheel(tmp_path, **{"kestrel_norm/data": "x" * 1_300_000})
    assert problems(wheels, path) == []
    monkeypatch.setitem(wheels.MOST_BYTES, "kestrel_norm", 1_200_000)
    assert problems(wheels, path) == ["has 1.3 MB: at most 1.2"]


def test_both_kinds_of_kernels_are_built_for_all_architectures(wheels, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from cute_build import driver

    assert list(driver.ARCHS) == wheels.ALL_ARCHS
    assert f"set(KESTREL_ALL_ARCHS {' '.join(wheels.ALL_ARCHS)})" in (TOOLS / "cmake/KestrelFamily.cmake").read_text()


def test_a_wrong_tag_is_named(wheels, binary_tag, tmp_path):
    assert problems(wheels, wheel(tmp_path, binary_tag)) == ["holds no binary, but has not the tag py3-none-any"]
    found = problems(wheels, wheel(tmp_path, "py3-none-linux_x86_64", wheels.ALL_ARCHS))
    assert found == [f"has not the tag {binary_tag}"]


def test_missing_architectures_and_local_memory_are_named(wheels, binary_tag, machine_code, tmp_path):
    path = wheel(tmp_path, binary_tag, wheels.ALL_ARCHS)
    *rest, last = wheels.held
    wheels.held = rest
    assert problems(wheels, path) == [f"has no machine code for sm_{wheels.ALL_ARCHS[-1]}"]
    for stack, local in ((16, 0), (0, 8)):
        wheels.held = [*rest, machine_code.Kernel(last.arch, "spills", 255, stack, local, 0)]
        assert problems(wheels, path) == [f"spills for sm_{last.arch}: {stack} B stack, {local} B local memory"]
    wheels.held = [each for each in (*rest, last) if each.arch not in ("86", "89")]
    assert problems(wheels, path) == []  # their GPUs run machine code of sm_80
    wheels.held = wheels.held[1:]
    assert problems(wheels, path) == [f"has no machine code for sm_{arch}" for arch in ("80", "86", "89")]
    wheels.held = []
    assert problems(wheels, path) == ["holds no kernel"]
    wheels.held = [*rest, last]
    one = wheel(tmp_path, binary_tag, wheels.ALL_ARCHS[:1])
    assert problems(wheels, one) == [f"was built for {wheels.ALL_ARCHS[:1]} only"]


def test_kernels_without_the_wide_loads_they_claim_are_named(machine_code, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "library", SimpleNamespace(problems=None))
    monkeypatch.setitem(sys.modules, "wheel_checks_main", None)
    module = load(TOOLS / "wheel_checks" / "__main__.py", "wheel_checks_main")
    claims = ["^wide", "^gone", {"kernels": "^hopper", "archs": ["90"]}]
    (tmp_path / "vector_loads.json").write_text(json.dumps({"kestrel_norm": claims}))
    monkeypatch.setattr(module, "HERE", tmp_path)
    kernels = [
        machine_code.Kernel(arch, name, 40, 0, 0, loads)
        for arch, name, loads in (("80", "wide", 1), ("90", "wide", 0), ("80", "hopper", 0), ("90", "hopper", 3))
    ]
    assert module.wide_load_problems("kestrel_norm", kernels) == [
        "wide for sm_90 has no 16-byte load",
        "vector_loads.json names '^gone', which matches no kernel",
    ]
    assert module.wide_load_problems("kestrel_rope", kernels) == []


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def version(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "version_tool", None)
    module = load(TOOLS / "version.py", "version_tool")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for folder, package in (("packages/norm", "kestrel_norm"), ("meta", "kestrel_kernels")):
        source = tmp_path / folder / "src" / package
        source.mkdir(parents=True)
        (source / "__init__.py").write_text('__version__ = "0.1.0"\n')
        (tmp_path / folder / "pyproject.toml").write_text(
            f'[project]\nname = "{package}"\nversion = "0.1.0"\ndependencies = [\n  "torch>=2.10",\n'
            '  "kestrel-runtime==0.1.0",\n  "kestrel-moe[jit]==0.1.0",\n]\n'
        )
    return module


def test_one_version_everywhere_passes_and_any_other_is_named(version, capsys):
    assert version.check() == 0
    assert "version 0.1.0 in all 8 places of 2 distributions" in capsys.readouterr().out
    for name, old in (
        ("meta/pyproject.toml", "moe[jit]==0.1.0"),
        ("packages/norm/src/kestrel_norm/__init__.py", "0.1.0"),
    ):
        path = version.ROOT / name
        text = path.read_text()
        path.write_text(text.replace(old, old.replace("0.1.0", "0.1.1")))
        assert version.check() == 1
        assert f"0.1.1      {name}" in capsys.readouterr().err
        path.write_text(text)


def test_a_sibling_that_is_not_pinned_is_named(version):
    path = version.ROOT / "meta" / "pyproject.toml"
    path.write_text(path.read_text().replace("runtime==0.1.0", "runtime>=0.1.0"))
    with pytest.raises(SystemExit, match=r"meta/pyproject.toml:6: kestrel-runtime must be pinned with =="):
        version.check()


def test_a_bump_rewrites_every_place_and_nothing_else(version):
    path = version.ROOT / "meta" / "pyproject.toml"
    before = path.read_text()
    assert version.bump("0.10.12") == 0
    assert path.read_text() == before.replace("0.1.0", "0.10.12")
    assert {place.version for place in version.places()} == {"0.10.12"}
    with pytest.raises(SystemExit, match="expected a version like"):
        version.bump("1.2")
