"""Checks, shared reference pieces, binaries, and the test helpers themselves."""

from __future__ import annotations

import ctypes
import json
import lzma
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import kestrel_runtime
from kestrel_runtime import Binary, UnsupportedError, arch_of, binary, check, cute, paged_cache, reference, state

# Known-answer vectors of the paper's authors (Random123, kat_vectors, philox4x32 10): key, counter, result.
PHILOX_VECTORS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "expected"), PHILOX_VECTORS)
def test_philox_gives_the_published_vectors(key, counter, expected) -> None:
    assert tuple(reference.philox4x32(torch.tensor(key), torch.tensor(counter)).tolist()) == expected


WORDS = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=50)
@given(st.tuples(WORDS, WORDS), st.tuples(WORDS, WORDS, WORDS, WORDS))
def test_philox_is_the_generator_of_the_paper(key, counter) -> None:
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    assert reference.philox4x32(torch.tensor(key), torch.tensor(counter)).tolist() == [c0, c1, c2, c3]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_rounding_goes_to_the_nearest_code_and_saturates(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].unique()
    x = torch.cat((torch.randn(2000) * 40, finite, torch.tensor([1e30, -1e30, float("inf"), 448.0, 464.0, 0.0])))
    clamped = x.double().clamp(finite.min(), finite.max())
    least = (clamped[:, None] - finite.double()).abs().amin(dim=1)
    got = reference.to_fp8(x, dtype)
    assert torch.equal((got.double() - clamped).abs(), least)
    midpoints = (finite[:-1] + finite[1:]) / 2
    even = reference.to_fp8(midpoints, dtype).view(torch.uint8) & 1
    assert int(even.sum()) == 0, "a tie goes to the even code"
    assert reference.to_fp8(torch.tensor([float("nan")]), dtype).float().isnan().item()


def test_the_scale_of_a_row_is_that_of_its_largest_finite_magnitude() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, -3.5], [inf, -3.5], [-inf, 3.5], [nan, -3.5], [inf, nan]])
    codes, scale = reference.quantise_rows(x)
    assert scale.flatten().tolist() == torch.tensor([3.5, 3.5, 3.5, 3.5, 1e-12]).div(448).tolist()
    assert codes.float()[1:3].tolist() == [[448.0, -448.0], [-448.0, 448.0]]
    assert codes.float()[3:, 0].isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("table", "expected"),
    [(None, [[-1, 0, 1, 3, -1], [-1, 4, 5, 7, -1]]), ([[5, -1], [2, 0]], [[-1, 20, 21, 23, -1], [-1, 8, 9, 11, 0]])],
)
def test_a_position_has_a_slot_where_its_page_exists(table, expected) -> None:
    positions = torch.tensor([[-1, 0, 1, 3, 4]] * 2)
    table = None if table is None else torch.tensor(table)
    assert paged_cache.slots_of(positions, table, 4).tolist() == expected
    far = torch.tensor([[7, 8, 2**40]] * 2)
    beyond = [[-1] * 3] * 2 if table is None else [[-1, -1, -1], [3, -1, -1]]
    assert paged_cache.slots_of(far, table, 4).tolist() == beyond


def test_int4_codes_of_a_nan_are_codes_and_their_scale_is_nan() -> None:
    x = torch.tensor([[0.0, 15.0, 3.0], [0.0, float("nan"), 3.0]])
    codes, scale, zero = paged_cache.encode_int4(x, -1)
    assert codes[0].tolist() == [0, 15, 3]
    assert bool(((codes >= 0) & (codes <= 15)).all())
    assert scale.isnan().tolist() == zero.isnan().tolist() == [False, True]


def test_int8_codes_saturate_and_a_nan_stays_in_the_scale() -> None:
    inf, nan = float("inf"), float("nan")
    codes, scale = paged_cache.encode_int8(torch.tensor([[127.0, -1.5], [inf, -127.0], [nan, 1.0], [0.0, 0.0]]))
    assert codes[:2].tolist() == [[127, -2], [127, -127]]
    assert scale[[0, 1, 3]].tolist() == [1, 1, 1]
    assert scale[2].isnan()


def test_int4_packing_round_trips_with_the_even_index_in_the_low_nibble() -> None:
    codes = torch.randint(-8, 8, (5, 6))
    packed = reference.pack_int4(codes)
    assert packed.shape == (5, 3)
    assert packed.dtype == torch.uint8
    assert torch.equal(reference.unpack_int4(packed), codes.int())
    assert int(packed[0, 0]) & 0xF == int(codes[0, 0]) % 16
    assert torch.equal(reference.unpack_int4(reference.pack_int4(codes % 16), signed=False), (codes % 16).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 1000, 32768, 50000])
def test_a_row_sum_is_the_same_alone_and_among_others(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, n, dtype=dtype, generator=torch.Generator().manual_seed(n))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # torch splits a sum to a single number across threads from 32768 terms on
        sums = reference.row_sums(x)
        assert sums.shape == (2, 3, 1)
        # n - 1 additions in any order: at most n roundings of half an ulp of the sum of magnitudes; in float64 the sum
        # to compare with has as many
        roundings = 2 * n if dtype == torch.float64 else n
        bound = roundings * torch.finfo(dtype).eps / 2 * x.double().abs().sum(-1, keepdim=True)
        assert bool(((sums.double() - x.double().sum(-1, keepdim=True)).abs() <= bound).all())
        for i in range(2):
            for j in range(3):
                assert torch.equal(reference.row_sums(x[i : i + 1, j : j + 1])[0, 0], sums[i, j])
                assert torch.equal(reference.row_sums(x[i, j : j + 1])[0], sums[i, j])
    finally:
        torch.set_num_threads(threads)
    assert reference.row_sums(x[:0]).shape == (0, 3, 1)


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotation_is_a_complex_product(is_neox: bool) -> None:
    """Each part is a sum of two products in float32: three roundings of at most half an ulp of |x| each."""
    x, angle = torch.randn(3, 8), torch.randn(3, 4)
    cos, sin = angle.cos(), angle.sin()

    def pairs(values: torch.Tensor) -> torch.Tensor:
        values = values.double()
        first, second = (values[:, :4], values[:, 4:]) if is_neox else (values[:, 0::2], values[:, 1::2])
        return torch.complex(first, second)

    exact = pairs(x) * torch.complex(cos.double(), sin.double())
    error = pairs(reference.rotate(x, cos, sin, is_neox)) - exact
    bound = 3 * 2**-24 * pairs(x).abs()
    assert bool((error.real.abs() <= bound).all())
    assert bool((error.imag.abs() <= bound).all())


@pytest.mark.parametrize(
    ("value", "options", "error", "text"),
    [
        (3, {"dtype": torch.float32}, TypeError, "expected a tensor, got int"),
        (torch.zeros(2), {"dtype": torch.int32}, TypeError, "expected dtype int32, got float32"),
        (torch.zeros(2), {"dtype": check.FLOATS[:2]}, TypeError, "expected dtype bfloat16 or float16, got float32"),
        (torch.zeros(2), {"ndim": (2, 3)}, ValueError, r"expected a 2-D or 3-D tensor, got 1-D of shape \(2,\)"),
        (torch.zeros(2, 3).t(), {"last_contiguous": True}, ValueError, "got stride 3"),
    ],
)
def test_tensor_check_names_expected_and_got(value, options, error, text) -> None:
    with pytest.raises(error, match=f"op: argument 'x': .*{text}"):
        check.tensor("op", "x", value, **options)


@pytest.mark.parametrize(
    ("value", "options", "error"),
    [(True, {}, TypeError), ("1", {}, TypeError), (1.5, {"integer": True}, TypeError), (float("nan"), {}, ValueError)]
    + [(0, {"above": 0}, ValueError), (3, {"maximum": 2}, ValueError), (-1, {"minimum": 0}, ValueError)]
    + [(2**63, {}, ValueError), (-(2**70), {"integer": True}, ValueError), (10**400, {"minimum": 0}, ValueError)],
)
def test_number_check_refuses(value, options, error) -> None:
    with pytest.raises(error, match="op: argument 'n': expected .*, got"):
        check.number("op", "n", value, **options)
    check.number("op", "n", 1, integer=True, minimum=0, maximum=2, above=0)
    check.number("op", "n", 2**64 - 1, integer=True, maximum=2**64 - 1)


@pytest.mark.parametrize("value", ["no", "", None, 0, 1, 1.0, torch.tensor(True)], ids=repr)
def test_flag_check_accepts_bools_alone(value: object) -> None:
    with pytest.raises(TypeError, match="op: argument 'inverse': expected True or False, got "):
        check.flag("op", "inverse", value)
    check.flag("op", "inverse", True)
    check.flag("op", "inverse", False)


class Incomparable:
    """Refuses to be compared or shown."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ("other", "'other'"),
        (np.ones(3), "array"),
        (torch.ones(3, 16), r"a Tensor of shape \(3, 16\)$"),
        (torch.tensor(1.0), r"a Tensor of shape \(\)$"),
        (Incomparable(), "a Incomparable$"),
        ("x" * 5000, r"'x{76}\.\.\.$"),
        (["row"], "\\['row'\\]"),
        (None, "None"),
    ],
    ids=["text", "array", "tensor", "scalar", "incomparable", "long", "list", "none"],
)
def test_choice_refuses_values_of_any_type_in_few_words(value: object, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^op: argument 'mode': expected one of 'row', 'tensor', got {got}"):
        check.choice("op", "mode", value, ("row", "tensor"))
    check.choice("op", "mode", "row", ("row", "tensor"))


@pytest.mark.parametrize("value", [torch.ones(3, 16), torch.empty(9, device="meta"), [0] * 1000, -(10**5000)], ids=type)
def test_number_check_shows_any_value_in_few_words(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="op: argument 'n': expected .*, got .{1,90}$"):
        check.number("op", "n", value, integer=True, minimum=0)


def test_disjoint_refuses_elements_that_share_memory() -> None:
    check.disjoint("op", "x", torch.zeros(1, 3).expand(1, 3))
    with pytest.raises(ValueError, match=r"'x': expected a tensor to write .*, got strides \(0, 1\)"):
        check.disjoint("op", "x", torch.zeros(1, 3).expand(2, 3))
    with pytest.raises(ValueError, match=r"'x': expected a tensor to write .*, got strides \(7, 1\)"):
        check.disjoint("op", "x", torch.zeros(16).as_strided((2, 8), (7, 1)))


def _addresses(x: torch.Tensor) -> list[int]:
    """The offsets of all elements in their storage."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return torch.arange(count).as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()


@st.composite
def views(draw) -> torch.Tensor:
    """A view of any strides into one buffer."""
    rank = draw(st.integers(0, 4))
    sizes = [draw(st.integers(0, 5)) for _ in range(rank)]
    strides = [draw(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 40, 100])) for _ in range(rank)]
    return BUFFER.as_strided(sizes, strides, draw(st.integers(0, 60)))


BUFFER = torch.zeros(4000)


@settings(deadline=None, max_examples=500)
@given(a=views(), b=views(), shift=st.integers(0, 300))
def test_overlap_is_found_where_elements_share_an_address_and_nowhere_else(a, b, shift) -> None:
    in_a, in_b = _addresses(a), _addresses(b)

    def accepts(function, *args) -> bool:
        try:
            function("op", *args)
        except ValueError:
            return False
        return True

    assert accepts(check.disjoint, "a", a) == (len(set(in_a)) == len(in_a))
    assert accepts(check.no_overlap, "a", a, "b", b) == (not set(in_a) & set(in_b))
    narrow = BUFFER.view(torch.uint8).as_strided((3,), (5,), shift)
    in_bytes = {4 * i + k for i in in_a for k in range(4)}
    assert accepts(check.no_overlap, "a", a, "b", narrow) == (not in_bytes & set(_addresses(narrow)))


def test_overlap_of_large_caches_is_decided_by_their_strides_alone() -> None:
    wide = torch.empty(64, 16, 8, 256)
    check.no_overlap("op", "k", wide[..., :128], "v", wide[..., 128:])
    check.no_overlap("op", "k", wide[:, ::2], "v", wide[:, 1::2].transpose(1, 2))
    with pytest.raises(ValueError, match="'k': expected a tensor to write that shares no memory with 'v', got tensors"):
        check.no_overlap("op", "k", wide[..., :129], "v", wide[..., 128:])
    for few in (wide[31:33, 7:9, 3:5, 1:], wide[:, 1:].transpose(1, 2)):
        with pytest.raises(ValueError, match="tensors that overlap"):
            check.no_overlap("op", "k", wide[..., ::2], "v", few)
    check.no_overlap("op", "k", wide, "v", wide.view(64, 16, 8, 256), may_be_same=True)


def test_tensors_without_addresses_never_overlap() -> None:
    with FakeTensorMode():
        fake = torch.empty(4)
    meta = torch.empty(4, device="meta")
    for tensor in (fake, meta, torch.empty(4).as_subclass(type("Sub", (torch.Tensor,), {}))):
        assert not check.has_memory(tensor)
        check.no_overlap("op", "a", tensor, "b", tensor)
    sparse = torch.ones(4).to_sparse()
    assert not check.has_memory(sparse)
    check.no_overlap("op", "a", torch.empty(4), "b", sparse)
    torch.func.vmap(lambda x: check.no_overlap("op", "a", x, "b", x) or x)(torch.empty(2, 4))  # batched: one type
    assert check.has_memory(torch.empty(4))
    assert check.has_memory(torch.nn.Parameter(torch.empty(4)))


def test_same_names_the_tensor_that_differs() -> None:
    x, meta = torch.zeros(2), torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match="'b': expected device cpu as a has, got meta"):
        check.same("op", "device", a=x, skipped=None, b=meta)
    with pytest.raises(TypeError, match="'b': expected dtype float32 as a has, got float16"):
        check.same("op", "dtype", a=x, b=x.half())


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "80"), ((8, 6), "86"), ((8, 7), None), ((8, 9), "89"), ((9, 0), "90a"), ((10, 0), "100f")]
    + [((10, 3), "100f"), ((12, 0), "120f"), ((12, 1), "120f"), ((7, 5), None), ((11, 0), None), ((13, 0), None)],
)
def test_gpu_runs_only_an_architecture_that_is_listed(capability, arch) -> None:
    assert arch_of(capability) == arch


def test_family_without_a_binary_is_unsupported_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kestrel_nobinary"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    bare = Binary("kestrel_nobinary")
    assert bare.manifest is None
    with pytest.raises(UnsupportedError, match="has no binary here"):
        _ = bare.anything
    (package / "_lib").mkdir()
    fields = {"family": "kestrel_nobinary", "archs": ["90a"], "functions": [], "cute": False}
    (package / "_lib" / "manifest.json").write_text(json.dumps(fields))
    fresh = Binary("kestrel_nobinary")
    assert fresh.manifest is not None
    assert fresh.manifest.archs == ("90a",)
    with pytest.raises(UnsupportedError, match="has no binary here"):
        fresh.function("anything")
    fields["archs"] = []
    (package / "_lib" / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedError, match="was built without kernels"):
        Binary("kestrel_nobinary").function("anything")
    with pytest.raises(UnsupportedError, match="is not installed"):
        _ = Binary("kestrel_missing_family").folder


@pytest.mark.parametrize(
    ("arch", "functions", "runs"),
    [
        ("86", ["topk_sm80", "topk_sm90a"], "topk_sm80"),
        ("89", ["topk_sm80", "topk_sm89"], "topk_sm89"),
        ("86", ["topk_sm86"], "topk_sm86"),
        ("90a", ["topk_sm80", "topk_sm90a"], "topk_sm90a"),
        ("90a", ["topk_sm80"], None),
        ("80", ["topk_sm86"], None),
    ],
)
def test_gpus_of_sm_86_and_sm_89_run_a_kernel_of_sm_80_where_there_is_none_for_them(
    arch: str, functions: list[str], runs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Binary("kestrel_anyfamily")
    family.__dict__["manifest"] = binary.Manifest("kestrel_anyfamily", (arch,), tuple(functions), True)
    family.function = lambda name: name
    monkeypatch.setattr(binary, "_device_arch", lambda index: arch)
    monkeypatch.setattr(binary, "_check_driver", lambda: None)
    monkeypatch.setattr(cute, "compiled", lambda *call: None)
    assert family.kernel(SimpleNamespace(name="topk"), 0) == runs


def test_a_device_without_an_index_is_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Binary("kestrel_anyfamily")
    family.__dict__["manifest"] = binary.Manifest("kestrel_anyfamily", ("80", "90a"), ("topk_sm80", "topk_sm90a"), True)
    family.function = lambda name: name
    monkeypatch.setattr(binary, "_device_arch", {0: "80", 3: "90a"}.get)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for device, arch in ((torch.device("cuda"), "90a"), (torch.device("cuda", 0), "80"), (0, "80")):
        assert family.arch(device) == f"sm{arch}"
        assert family.kernel(SimpleNamespace(name="topk"), device) == f"topk_sm{arch}"


@pytest.mark.parametrize(("version", "is_new_enough"), [(12090, False), (13000, True), (13010, True)])
def test_a_driver_older_than_the_machine_code_is_named(
    version: int, is_new_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(binary, "_driver_version", lambda: version)
    with nullcontext() if is_new_enough else pytest.raises(UnsupportedError, match="CUDA 12.09?; R580"):
        binary._check_driver()


@pytest.mark.parametrize("holds_cute", [True, False])
def test_a_library_without_cute_kernels_needs_no_runtime_library(
    holds_cute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(cute, "open_runtime_library", lambda: opened.append("runtime library"))
    monkeypatch.setattr(binary, "_load_library", lambda path: SimpleNamespace(get_function=path.stem.__add__))
    family = Binary("kestrel_anyfamily")
    family.__dict__["manifest"] = binary.Manifest("kestrel_anyfamily", ("90a",), ("_f",), holds_cute)
    family.__dict__["library"] = tmp_path / "library.so"
    assert family.function("_f") == "library_f"
    assert opened == ["runtime library"] * holds_cute


@pytest.fixture
def packed_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plain = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
    packed = binary.packed(tmp_path / "library.so")
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    binary._loaded.cache_clear()
    return packed


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_packed_library_loads_and_leaves_no_file(in_memory: bool, packed_library: Path) -> None:
    with binary.unpacked(packed_library, in_memory=in_memory) as file:
        assert file.name == "library.so"
        assert file.is_symlink() is in_memory
        assert file.read_bytes() == lzma.decompress(packed_library.read_bytes())
        ctypes.CDLL(str(file))
    assert list(packed_library.parent.iterdir()) == [packed_library]


def load_as_ctypes(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(error) from None  # as tvm_ffi says it


def test_a_packed_library_is_loaded_once(packed_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []
    monkeypatch.setattr("tvm_ffi.load_module", lambda path: paths.append(path) or load_as_ctypes(path))
    assert binary._load_library(packed_library) is binary._load_library(packed_library)
    assert len(paths) == 1


@pytest.mark.parametrize("why", ["no such function", "refused", "cannot be executed"])
def test_a_packed_library_is_written_where_memory_cannot_be_loaded(
    why: str, packed_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[bool] = []

    def load(path: str) -> ctypes.CDLL:
        paths.append(Path(path).is_symlink())
        if why == "cannot be executed" and paths[-1]:
            raise RuntimeError("failed to map segment")
        return load_as_ctypes(path)

    def refuse(name: str) -> int:
        raise OSError(name)

    monkeypatch.setattr("tvm_ffi.load_module", load)
    if why == "no such function":
        monkeypatch.delattr("os.memfd_create")
    elif why == "refused":
        monkeypatch.setattr("os.memfd_create", refuse)
    assert isinstance(binary._load_library(packed_library), ctypes.CDLL)
    assert paths[-1] is False
    assert list(packed_library.parent.iterdir()) == [packed_library]


def test_without_a_folder_to_unpack_into_the_binary_is_unsupported(
    packed_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(packed_library.parent / "missing"))
    with pytest.raises(UnsupportedError, match=r"library\.so\.xz cannot be unpacked here.*TMPDIR"):
        binary._load_library(packed_library)


def test_without_lzma_the_binary_is_unsupported(packed_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(UnsupportedError, match="without lzma"):
        binary._load_library(packed_library)


def test_a_family_finds_its_library_plain_or_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kestrel_packedfamily" / "_lib"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Binary("kestrel_packedfamily").library is None
    for name in ("kestrel_packedfamily.so.xz", "kestrel_packedfamily.so"):
        (folder / name).touch()
        assert Binary("kestrel_packedfamily").library == folder / name


def test_missing_cute_runtime_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute, "runtime_library_path", lambda: None)
    cute.open_runtime_library.cache_clear()
    with pytest.raises(UnsupportedError, match="nvidia-cutlass-dsl-libs-cu13"):
        cute.open_runtime_library()
    cute.open_runtime_library.cache_clear()


def test_cute_runtime_is_found_in_the_layout_pip_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia_cutlass_dsl" / "cu13" / "lib" / cute.LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cute.runtime_library_path() is not None


def test_compiled_kernels_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cute.cache_folder() == tmp_path / "kestrel-kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cute.cache_folder() == tmp_path / ".cache" / "kestrel-kernels"

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cute.cache_folder() is None


@pytest.mark.parametrize("changed", ["kestrel_x.kernels", "kestrel_runtime.cute_dsl", "variant", "arch", "version"])
def test_a_compiled_kernel_is_kept_under_a_name_of_all_that_made_it(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = ("kestrel_x.kernels", "kestrel_runtime.cute_dsl")
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "kernel.py").write_bytes(b"one")
    versions = {"nvidia-cutlass-dsl": "4.8.0", "apache-tvm-ffi": "0.1.11"}

    def find_spec(name: str) -> SimpleNamespace:
        return SimpleNamespace(origin=str(tmp_path / name / "__init__.py"))

    def digest(variant: str = "variant", arch: str = "90a") -> str:
        with monkeypatch.context() as patched:
            patched.setattr("importlib.util.find_spec", find_spec)
            patched.setattr("importlib.metadata.version", versions.__getitem__)
            return cute._digest("kestrel_x", variant, arch)

    before = digest()
    assert digest() == before
    if changed in packages:
        (tmp_path / changed / "kernel.py").write_bytes(b"two")
    elif changed == "version":
        versions["apache-tvm-ffi"] = "0.1.9"
    assert digest(**({changed: "other"} if changed in ("variant", "arch") else {})) != before


def test_import_loads_no_binary_and_reads_the_backend_variable() -> None:
    code = "import kestrel_runtime as k, sys; print(k.current_backend(), 'tvm_ffi' in sys.modules)"
    folder = str(Path(kestrel_runtime.__file__).parents[1])
    environment = {"PYTHONPATH": folder, "KESTREL_BACKEND": "reference", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["reference", "False"]


def test_an_unknown_backend_variable_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTREL_BACKEND", "quick")
    with pytest.raises(ValueError, match="KESTREL_BACKEND: expected one of auto, kernel, reference, got 'quick'"):
        runpy.run_path(state.__file__)
