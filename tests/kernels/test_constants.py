"""Numbers that Python, C++ and CUDA share: each source states its own, and they agree."""

from __future__ import annotations

import re
from pathlib import Path

import amp_plugin.kernels
from amp_plugin.casting import autocast_kernels
from amp_plugin.kernels import reference
from amp_plugin.kernels.cuda import description, tensor_table
from amp_plugin.kernels.ops import HYSTERESIS_MODES

KERNELS = Path(amp_plugin.kernels.__file__).parent
DTYPE_NAMES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double"}
DTYPE_NAMES |= {"complex64": "ComplexFloat", "complex128": "ComplexDouble"}


def source(name: str) -> str:
    return (KERNELS / name).read_text(encoding="utf-8")


def constant(name: str, constant: str) -> int:
    """Return an integer constant of a C++ source."""
    return int(re.search(rf"\b{constant} = (-?\d+)", source(name))[1])


def enumerators(name: str, enum: str) -> list[str]:
    """Return the names in an enum, in order; such as give no number are counted from 0."""
    body = re.search(rf"enum (?:class )?{enum} : \w+ {{(.*?)}}", source(name), re.DOTALL)[1]
    return [part.strip() for part in body.split(",") if part.strip()]


def fields(name: str, struct: str) -> list[tuple[str, int]]:
    """Return the fields of a struct and their sizes in bytes."""
    body = re.search(rf"struct (?:alignas\(16\) )?{struct} {{(.*?)\n}};", source(name), re.DOTALL)[1]
    bits = {"DType": 8, "u8": 8, "u16": 16, "u32": 32, "u64": 64}
    bits |= {"uint8_t": 8, "uint16_t": 16, "uint32_t": 32, "uint64_t": 64}
    return [(field, bits[kind] // 8) for kind, field in re.findall(r"^  (\w+) (\w+);", body, re.MULTILINE)]


def fields_of(dtype) -> list[tuple[str, int]]:
    return [(field, dtype[field].itemsize) for field in dtype.names]


def test_dtype_codes():
    named = {str(dtype).removeprefix("torch."): code for dtype, code in description.DTYPE_CODES.items()}
    in_cpp = re.findall(r"case at::k(\w+): return (\d+);", source("csrc/tensor_description.cpp"))
    assert {name: int(code) for name, code in in_cpp} == {DTYPE_NAMES[n]: code for n, code in named.items()}
    assert constant("csrc/tensor_description.cpp", "kUnknown") == description.UNKNOWN_DTYPE
    in_cuda = enumerators("cuda/elements.cuh", "DType")
    assert [name.removeprefix("k").lower() for name in in_cuda] == sorted(named, key=named.__getitem__)


def test_hysteresis_modes():
    in_cpp = dict(part.split(" = ") for part in enumerators("csrc/scaling_update.cpp", "HysteresisMode"))
    numbers = {name.removeprefix("k").lower(): int(number) for name, number in in_cpp.items()}
    assert numbers == HYSTERESIS_MODES
    assert constant("cuda/update_scale.cu", "kRestoreOnSuccess") == HYSTERESIS_MODES["apex"]
    assert constant("cuda/update_scale.cu", "kNeverBelowOne") == HYSTERESIS_MODES["deepspeed"]


def test_flag_bits():
    for file, inf, nan in [
        ("csrc/scaling_chunk.h", "kInf", "kNan"),
        ("cuda/elements.cuh", "kHasInf", "kHasNan"),
    ]:
        assert (constant(file, inf), constant(file, nan)) == (reference.INF_FLAG, reference.NAN_FLAG)
    file = "csrc/tensor_description.cpp"
    assert (constant(file, "kDense"), constant(file, "kAlike")) == (description.DENSE, description.ALIKE)


def test_records():
    described = fields("csrc/tensor_description.cpp", "Description")
    assert described == fields_of(description.DESCRIPTION)
    assert fields("cuda/tensor_table.cuh", "Row") == fields_of(tensor_table.ROW)
    assert constant("cuda/write_table.cu", "kRowsByValue") == tensor_table.ROWS_BY_VALUE


def test_op_rules():
    in_cpp = enumerators("csrc/autocast_kernel.h", "Rule")
    spelled = ["k" + rule.value.title().replace("_", "") for rule in autocast_kernels.RULE_CODES]
    assert in_cpp == ["kNone", *spelled]
    assert list(autocast_kernels.RULE_CODES.values()) == list(range(1, len(in_cpp)))
    assert constant("csrc/region.h", "kMaxRuleSets") == autocast_kernels.MAX_RULE_SETS
    assert constant("csrc/region.h", "kNoRules") == autocast_kernels.NO_RULES


def test_device_numbers():
    """As c10::DeviceType has them."""
    import torch

    header = Path(torch.__file__).parent / "include/torch/headeronly/core/DeviceType.h"
    numbers = dict(re.findall(r"^  (\w+) = (\d+),", header.read_text(), re.MULTILINE))
    assert {name: int(numbers[name.upper()]) for name in autocast_kernels.DEVICE_NUMBERS} == (
        autocast_kernels.DEVICE_NUMBERS
    )
