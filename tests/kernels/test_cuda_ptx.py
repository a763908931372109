"""The PTX that NVRTC generates: width and number of loads, and the order in which blocks combine their
results.
"""

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
    assert ptx.count(LOAD) >= 12  # 4 in flight for each element size
    assert (ptx.count(STORE) >= 12) is (name != "norm_check")


def loads_before_a_use(ptx: str) -> list[int]:
    """Return how many 16-byte loads follow each other without arithmetic on elements or a store between them."""
    use = r"\b(?:fma|mul|add|abs|cvt|setp\.\w+)(?:\.\w+)*\.f(?:16|32|64)\b|\bst\.global"
    marks = re.findall(rf"({re.escape(LOAD)})|(?:{use})", ptx)
    runs = "".join("L" if load else "." for load in marks)
    return [len(run) for run in re.findall("L+", runs)]


@pytest.mark.parametrize(
    ("name", "in_flight"),
    [("norm_check", 4), ("unscale", 4), ("multiply", 4), ("norm_check", 2), ("norm_check", 8)],
)
def test_a_thread_has_its_loads_on_their_way_before_it_uses_one(name, in_flight):
    """1024 threads with 4 x 16 bytes each have 64 KB in flight per multiprocessor.

    HBM3 needs about 40 KB to stay busy.
    """
    assert {tuning.in_flight for tuning in [Tuning(), *TUNINGS.values()]} == {4}
    assert set(loads_before_a_use(ptx_of(name, Tuning(blocks=2, in_flight=in_flight)))) == {in_flight}
    assert ".minnctapersm 2" in ptx_of(name, Tuning(blocks=2, in_flight=in_flight))


@pytest.mark.parametrize("name", ["norm_check", "unscale", "multiply", "step adam"])
def test_the_last_block_sees_what_the_others_wrote(name):
    """The order is: writes of a block, barrier, count, barrier, reads. The count alone releases and acquires."""
    marks = re.findall(r"(?m)^\s*(?:@%?\w+ )?(bar|barrier|membar|fence|atom)\.([\w.:]*)", ptx_of(name))
    words = ["count" if (op, "acq_rel.gpu" in rest) == ("atom", True) else op for op, rest in marks]
    (at,) = [place for place, word in enumerate(words) if word == "count"]
    assert [word.replace("barrier", "bar") for word in words[at - 1 : at + 2]] == ["bar", "count", "bar"]
    assert not {"membar", "fence"} & {*words}


@pytest.mark.parametrize("name", ["norm_check", "unscale"])
def test_the_last_block_waits_once_for_what_the_others_left(name):
    """256 threads read the 528 results of an H100.

    If each waited for one load at a time, it would take three trips to L2.
    """
    behind_the_count = ptx_of(name).rpartition("atom.acq_rel")[2]
    before_the_first_is_used = re.split(r"add(?:\.rn)?\.f64", behind_the_count)[0]
    assert before_the_first_is_used.count("ld.global.f64") == Tuning().in_flight


def test_one_thread_works_out_what_adam_multiplies_by():
    """That is two powers, a root and divisions in float64.

    On most GPUs, a thousand threads would need 50 us for them.
    """
    (guarded,) = [
        part
        for part in re.split(r"\bbar(?:rier)?\.(?:cta\.)?sync", ptx_of("step adam"))
        if "sqrt.rn.f64" in part
    ]
    first_branch = re.search(r"@(%p\d+) bra", guarded)[1]
    (tested,) = re.findall(rf"setp\.\w+\.\w+ \s*{first_branch}, (%r\d+), 0;", ptx_of("step adam"))
    assert re.search(rf"mov\.u32 \s*{tested}, %tid\.x;", ptx_of("step adam"))


def test_a_product_is_rounded_before_it_is_added_to():
    """Splitting float32 weights, and equal bits with the CPU's steps, depend on this."""
    source = 'extern "C" __global__ void k(float* p) { *p = p[0] * p[1] + p[2]; }'
    assert "fma" not in ptx(source, Kernel(name="k"))


def test_a_number_that_divides_all_elements_is_not_divided_by_one_by_one():
    """The remaining divisions are those by the root of a second moment, at most one per root."""
    assert "div.rn.f32" not in ptx_of("step sgd_momentum")
    assert 0 < ptx_of("step adam").count("div.rn.f32") <= ptx_of("step adam").count("sqrt.rn.f32")
