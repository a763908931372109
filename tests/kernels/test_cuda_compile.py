"""Every CUDA source compiles with NVRTC for every architecture that we name, and cubins are cached."""

import gc
import itertools
import re
import stat
import sys

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core")

from amp_plugin.kernels.cuda import LAYOUT, NORMS, SOURCES, Kernel, Tuning, all_kernels
from amp_plugin.kernels.cuda import compile as cuda_compile
from amp_plugin.kernels.cuda.compile import (
    ARCHITECTURES,
    all_cubins,
    architecture_for,
    cached_cubin,
    compile_cubin,
    identity_of,
)

CLIP_FACTOR, UPDATE_SCALE = Kernel(name="clip_factor"), Kernel(name="update_scale")
ELF = b"\x7fELF"
OF_EACH_SOURCE = [kernel for kernel in all_kernels() if kernel.norm in {"", NORMS[0]}]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


# This uses the cache, whose key contains sources, options and NVRTC's version. So only changed sources are
# compiled.
@pytest.mark.parametrize(
    ("kernel", "architecture"),
    [
        *itertools.product(OF_EACH_SOURCE, ARCHITECTURES),
        *((kernel, "sm_90") for kernel in all_kernels() if kernel not in OF_EACH_SOURCE),
    ],
    ids=lambda given: given if isinstance(given, str) else given.title,
)
def test_every_source_compiles_for_every_architecture(kernel, architecture):
    code = cached_cubin(kernel, architecture)
    assert code.startswith(ELF)
    assert kernel.name.encode() in code


@pytest.mark.parametrize("file", sorted(SOURCES.glob("*.cu*")), ids=lambda file: file.name)
def test_a_source_asks_for_nothing_that_nvrtc_lacks(file):
    """Sources include no header of the CUDA toolkit.

    NVRTC 13.0, which torch 2.11 installs, does not support generic lambdas.
    """
    text = file.read_text()
    for header in re.findall(r"^\s*#\s*include\s+(.*)$", text, re.MULTILINE):
        assert header.startswith('"')
        assert (SOURCES / header.strip('"')).exists()
    assert re.findall(r"\]\([^()]*\bauto\b[^()]*\)", text) == []


@pytest.mark.parametrize("name", ["step", "multiply"])
def test_headers_in_the_working_directory_are_not_ours(name, tmp_path, monkeypatch):
    kernel = next(kernel for kernel in all_kernels() if kernel.name == name)
    code = compile_cubin(kernel, "sm_90")
    for header in (*SOURCES.glob("*.cuh"), LAYOUT):
        (tmp_path / header.name).write_text('#error "of the working directory"')
    monkeypatch.chdir(tmp_path)
    assert compile_cubin(kernel, "sm_90") == code


@pytest.mark.parametrize("damage", [lambda code: code[:100], lambda code: code[:50] + bytes(len(code) - 50)])
def test_a_damaged_cubin_is_compiled_again(cache, damage):
    code = cached_cubin(UPDATE_SCALE, "sm_90")
    (cubin,) = cache.glob("*.cubin")
    cubin.write_bytes(damage(cubin.read_bytes()))
    assert cached_cubin(UPDATE_SCALE, "sm_90") == code


def test_a_cubin_is_compiled_once(cache, monkeypatch):
    code = cached_cubin(UPDATE_SCALE, "sm_90")
    monkeypatch.setattr(cuda_compile, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert cached_cubin(UPDATE_SCALE, "sm_90") == code
    (cubin,) = cache.glob("*.cubin")
    assert cubin.name.startswith("update_scale-sm_90-")
    assert (stat.S_IMODE(cache.stat().st_mode), stat.S_IMODE(cubin.stat().st_mode)) == (0o755, 0o644)


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("nvrtc_version", "99.0"),
        ("_sources", "another source"),
        ("architecture", "sm_80"),
        ("kernel", Kernel(name="norm_check", norm="Maximum")),
        ("tuning_of", Tuning(blocks=2)),
    ],
    ids=["nvrtc", "source", "architecture", "norm", "tuning"],
)
def test_a_cubin_belongs_to_its_source_architecture_and_compiler(cache, monkeypatch, changed, value):
    compiled = []
    monkeypatch.setattr(cuda_compile, "compile_cubin", lambda *what: compiled.append(what) or ELF)
    given = {"kernel": Kernel(name="norm_check", norm="Squares"), "architecture": "sm_90"}
    cached_cubin(*given.values())
    if changed in given:
        given[changed] = value
    else:
        monkeypatch.setattr(cuda_compile, changed, lambda *_: value)
    cached_cubin(*given.values())
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_used_is_said(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(shared))
    with pytest.warns(RuntimeWarning, match="are compiled for this process alone: others can write"):
        assert cached_cubin(UPDATE_SCALE, "sm_90").startswith(ELF)


@pytest.mark.parametrize(
    ("capability", "known", "architecture"),
    [
        ((9, 0), [75, 90, 100], "sm_90"),
        ((8, 9), [75, 80, 86, 90], "sm_86"),  # this NVRTC is older than the GPU
        ((12, 1), [90, 120], "sm_120"),
        ((10, 3), [90, 100, 103, 120], "sm_103"),
    ],
)
def test_the_newest_code_that_a_gpu_runs(monkeypatch, capability, known, architecture):
    monkeypatch.setattr(cuda_compile.nvrtc, "nvrtcGetNumSupportedArchs", lambda: (0, len(known)))
    monkeypatch.setattr(cuda_compile.nvrtc, "nvrtcGetSupportedArchs", lambda: (0, known))
    assert architecture_for(*capability) == architecture


def test_a_gpu_that_is_too_new_for_nvrtc_is_refused():
    with pytest.raises(RuntimeError, match=r"compiles for up to sm_\d+, not for sm_990; install a newer"):
        architecture_for(99, 0)
    assert architecture_for(9, 0) == "sm_90"


def test_all_are_compiled_with_one_line_and_only_once(cache, monkeypatch, capsys):
    monkeypatch.setattr(cuda_compile, "compile_cubin", lambda *_: ELF)
    cuda_compile._announce.cache_clear()
    for _ in range(2):
        assert [*all_cubins("sm_90")] == [*all_kernels()]
    assert capsys.readouterr().err == "amp_plugin: compiling CUDA kernels for sm_90 (once) ...\n"


def test_what_decides_the_last_bits_has_a_number(monkeypatch):
    """The number fits float32, in which ranks compare it."""
    ours = identity_of("sm_90", [528])
    assert ours == identity_of("sm_90", [528]) == torch.tensor(float(ours)).item() > 0
    others = {identity_of("sm_80", [528]), identity_of("sm_90", [456])}
    monkeypatch.setattr(cuda_compile, "nvrtc_version", lambda: "99.0")
    assert len({ours, *others, identity_of("sm_90", [528])}) == 4


@pytest.fixture
def amp(monkeypatch):
    """Run the command line with a native core that already exists."""
    from typer.testing import CliRunner

    from amp_plugin.cli import app
    from amp_plugin.kernels import build

    monkeypatch.setattr(build, "build_core", lambda **_: ("ready.so", 0.0))
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_the_command_line_builds_ahead(amp, cache, monkeypatch):
    monkeypatch.setattr(cuda_compile, "compile_cubin", lambda *_: ELF)
    result = amp("build", "--cuda", "sm_80", "--cuda", "sm_90")
    count = 2 * len(list(all_kernels()))
    assert result.exit_code == 0, result.output
    assert f"{count} CUDA kernels for sm_80, sm_90 are in the cache" in result.output
    assert len(list(cache.glob("*.cubin"))) == count


def test_the_command_line_refuses_what_it_cannot_build(amp, cache, monkeypatch):
    result = amp("build", "--cuda", "sm_12")
    assert result.exit_code == 1
    assert "NVRTC cannot compile update_scale.cu for sm_12" in result.output
    monkeypatch.setitem(sys.modules, "amp_plugin.kernels.cuda.compile", None)
    result = amp("build", "--cuda", "sm_90")
    assert result.exit_code == 1
    assert "pip install 'cuda-core>=" in result.output


def test_a_source_that_does_not_compile_says_where(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text("__global__ void broken( {")
    monkeypatch.setattr(cuda_compile, "SOURCES", tmp_path)
    error = r"cannot compile broken\.cu for sm_90: (.|\n)*broken\.cu\(1\): error"
    with pytest.raises(RuntimeError, match=error) as caught:
        compile_cubin(Kernel(name="broken"), "sm_90")
    # NVRTC ends its log with a null byte, and grep treats such text as binary
    assert "\0" not in str(caught.value)


def test_an_error_of_nvrtc_is_freed_without_a_word(monkeypatch):
    """cuda-core's Program prints an error if it is freed in a reference cycle."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    for _ in range(20):
        with pytest.raises(RuntimeError) as caught:
            compile_cubin(UPDATE_SCALE, "sm_12")
        cycle = [caught.value]
        cycle.append(cycle)
        del caught, cycle
    gc.collect()
    assert not heard
