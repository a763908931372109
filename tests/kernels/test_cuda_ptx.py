"""What NVRTC makes of the sources: how wide memory is read, how much at once, and in which order blocks meet."""

from __future__ import annotations

import functools
import re

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core")

from cuda.bindings import nvrtc

from amp_plugin.kernels.cuda.compile import SOURCES

IN_FLIGHT = 4  # kInFlight
LOAD = "ld.global.ca.v4.u32"
STORE = "st.global.wb.v4.u32"


@functools.cache
def ptx_of(name: str) -> str:
    source = (SOURCES / f"{name}.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source, b"", 0, [], [])
    options = [b"-arch=compute_90", b"-std=c++17", b"-DNORM=Squares", f"-I{SOURCES}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(status) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode()


@pytest.mark.parametrize("name", ["norm_check", "unscale", "multiply", "cast"])
def test_loads_and_stores_are_sixteen_bytes_wide(name):
    ptx = ptx_of(name)
    assert ptx.count(LOAD) >= 12  # 4 in flight for each width of element
    assert (ptx.count(STORE) >= 12) is (name != "norm_check")


def loads_before_a_use(ptx: str) -> list[int]:
    """Return how many 16-byte loads stand in a row, with no arithmetic on elements and no store between."""
    use = r"\b(?:fma|mul|add|abs|cvt|setp\.\w+)(?:\.\w+)*\.f(?:16|32|64)\b|\bst\.global"
    marks = re.findall(rf"({re.escape(LOAD)})|(?:{use})", ptx)
    runs = "".join("L" if load else "." for load in marks)
    return [len(run) for run in re.findall("L+", runs)]


@pytest.mark.parametrize("name", ["norm_check", "unscale", "multiply", "cast"])
def test_a_thread_has_four_loads_on_their_way_before_it_uses_one(name):
    """4 x 16 bytes in each of 1024 threads: 64 KB a multiprocessor; HBM3 needs some 40 KB to stay busy."""
    runs = loads_before_a_use(ptx_of(name))
    assert runs
    assert set(runs) == {IN_FLIGHT}


@pytest.mark.parametrize("name", ["norm_check", "unscale", "multiply", "adam"])
def test_the_last_block_sees_what_the_others_wrote(name):
    """A block's writes, a barrier, a fence, the count, a fence, a barrier, the reads: in this order."""
    marks = re.findall(r"(?m)^\s*(?:@%?\w+ )?(bar|barrier|membar|fence|atom)\.([\w.:]*)", ptx_of(name))
    words = ["count" if (op, ".add" in rest) == ("atom", True) else op for op, rest in marks]
    (at,) = [place for place, word in enumerate(words) if word == "count"]
    around = [word.replace("barrier", "bar").replace("fence", "membar") for word in words[at - 2 : at + 3]]
    assert around == ["bar", "membar", "count", "membar", "bar"]
    assert not [rest for op, rest in marks if op in {"membar", "fence"} and "cta" in rest]


@pytest.mark.parametrize("name", ["norm_check", "unscale"])
def test_the_last_block_waits_once_for_what_the_others_left(name):
    """The 528 results of an H100 are read by 256 threads; one after the other they would take three trips to L2."""
    behind_the_count = ptx_of(name).rpartition("membar")[2]
    before_the_first_is_used = behind_the_count.partition("add.f64")[0]
    assert before_the_first_is_used.count("ld.global.f64") == IN_FLIGHT
