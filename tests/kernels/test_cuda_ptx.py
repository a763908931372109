"""The PTX that NVRTC makes of the sources: width and number of loads, order in which blocks combine."""

import functools
import re

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core")

from cuda.bindings import nvrtc

from amp_plugin.kernels.cuda import TUNINGS, Kernel, Tuning, tuning_of
from amp_plugin.kernels.cuda.compile import options_for, source_of

LOAD = "ld.global.ca.v4.u32"
STORE = "st.global.wb.v4.u32"


@functools.cache
def ptx_of(name: str, tuning: Tuning | None = None) -> str:
    file, _, rule = name.partition(" ")
    kernel = Kernel(name=file, rule=rule) if rule else Kernel(name=file, norm="Squares")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TUNINGS, file, tuning or tuning_of(kernel))
        return ptx(source_of(kernel), kernel)


def ptx(source: str, kernel: Kernel) -> str:
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"", 0, [], [])
    options = options_for(kernel, "sm_90").as_bytes("nvrtc")
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(status) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode().rstrip("\0")


@pytest.mark.parametrize("name", ["norm_check", "unscale", "multiply"])
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


@pytest.mark.parametrize(
    ("name", "in_flight"),
    [("norm_check", 4), ("unscale", 4), ("multiply", 4), ("norm_check", 2), ("norm_check", 8)],
)
def test_a_thread_has_its_loads_on_their_way_before_it_uses_one(name, in_flight):
    """4 x 16 bytes in each of 1024 threads: 64 KB a multiprocessor; HBM3 needs some 40 KB to stay busy."""
    assert {tuning.in_flight for tuning in [Tuning(), *TUNINGS.values()]} == {4}
    assert set(loads_before_a_use(ptx_of(name, Tuning(blocks=2, in_flight=in_flight)))) == {in_flight}
    assert ".minnctapersm 2" in ptx_of(name, Tuning(blocks=2, in_flight=in_flight))


@pytest.mark.parametrize("name", ["norm_check", "unscale", "multiply", "step adam"])
def test_the_last_block_sees_what_the_others_wrote(name):
    """A block's writes, a barrier, the count, a barrier, the reads; the count releases and acquires, alone."""
    marks = re.findall(r"(?m)^\s*(?:@%?\w+ )?(bar|barrier|membar|fence|atom)\.([\w.:]*)", ptx_of(name))
    words = ["count" if (op, "acq_rel.gpu" in rest) == ("atom", True) else op for op, rest in marks]
    (at,) = [place for place, word in enumerate(words) if word == "count"]
    assert [word.replace("barrier", "bar") for word in words[at - 1 : at + 2]] == ["bar", "count", "bar"]
    assert not {"membar", "fence"} & {*words}


@pytest.mark.parametrize("name", ["norm_check", "unscale"])
def test_the_last_block_waits_once_for_what_the_others_left(name):
    """The 528 results of an H100 are read by 256 threads; one after the other they would take three trips to L2."""
    behind_the_count = ptx_of(name).rpartition("atom.acq_rel")[2]
    before_the_first_is_used = re.split(r"add(?:\.rn)?\.f64", behind_the_count)[0]
    assert before_the_first_is_used.count("ld.global.f64") == Tuning().in_flight


def test_one_thread_works_out_what_adam_multiplies_by():
    """Two powers, a root and divisions in float64: on most GPUs a thousand threads would take 50 us for them."""
    (guarded,) = [
        part
        for part in re.split(r"\bbar(?:rier)?\.(?:cta\.)?sync", ptx_of("step adam"))
        if "sqrt.rn.f64" in part
    ]
    first_branch = re.search(r"@(%p\d+) bra", guarded)[1]
    (tested,) = re.findall(rf"setp\.\w+\.\w+ \s*{first_branch}, (%r\d+), 0;", ptx_of("step adam"))
    assert re.search(rf"mov\.u32 \s*{tested}, %tid\.x;", ptx_of("step adam"))


def test_a_product_is_rounded_before_it_is_added_to():
    """The split of float32 weights in halves, and the bits of the CPU's steps, rest on it."""
    source = 'extern "C" __global__ void k(float* p) { *p = p[0] * p[1] + p[2]; }'
    assert "fma" not in ptx(source, Kernel(name="k"))


def test_a_number_that_divides_all_elements_is_not_divided_by_one_by_one():
    """What is left of divisions: by the root of a second moment, at most once for each root."""
    assert "div.rn.f32" not in ptx_of("step sgd_momentum")
    assert 0 < ptx_of("step adam").count("div.rn.f32") <= ptx_of("step adam").count("sqrt.rn.f32")
