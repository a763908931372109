"""Numbers that Python, C++ and CUDA share: each source states its own, and they agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import amp_plugin.kernels
from amp_plugin.casting import autocast_kernels
from amp_plugin.kernels import reference
from amp_plugin.kernels.cuda.catalogue import all_kernels
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


def fields(name: str, struct: str, more: dict[str, int]) -> list[tuple[str, int]]:
    """Return the fields of a struct and their sizes in bytes; ``more`` has the bits of other types."""
    body = re.search(rf"struct (?:alignas\(16\) )?{struct} {{(.*?)\n}};", source(name), re.DOTALL)[1]
    bits = {"DType": 8, "u8": 8, "u16": 16, "u32": 32, "u64": 64}
    bits |= {"uint8_t": 8, "uint16_t": 16, "uint32_t": 32, "uint64_t": 64, "uint8_t*": 64, "const void*": 64}
    bits |= more
    found = re.findall(r"^  ((?:const )?\w+\*?) (\w+)(?:\[(\w+)\])?;", body, re.MULTILINE)
    return [
        (field, bits[kind] // 8 * (constant(name, count) if count else 1)) for kind, field, count in found
    ]


def test_dtype_codes():
    in_cpp = re.findall(r"case at::k(\w+): return (\d+);", source("csrc/cuda_table.cpp"))
    in_cuda = enumerators("cuda/elements.cuh", "DType")
    spelled = [DTYPE_NAMES[name.removeprefix("k").lower()] for name in in_cuda]
    assert [name for name, _ in in_cpp] == spelled
    assert [int(code) for _, code in in_cpp] == list(range(len(spelled)))
    assert constant("csrc/cuda_table.h", "kLastCastable") == spelled.index("Double")


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


def test_records():
    bits = {
        "Address": 64,
        "const Row*": 64,
        "u32*": 64,
        "Partial*": 64,
        "float*": 64,
        "u8*": 64,
        "double": 64,
        "const double*": 64,
        "DeviceScalar": 128,
    }
    for struct, in_cpp, in_cuda in [
        ("Row", "csrc/cuda_table.h", "cuda/tensor_table.cuh"),
        ("Partial", "csrc/cuda_table.h", "cuda/tensor_table.cuh"),
        ("Table", "csrc/cuda_table.h", "cuda/tensor_table.cuh"),
        ("Results", "csrc/cuda_gradients.cpp", "cuda/measure.cuh"),
        ("DeviceScalar", "csrc/cuda_scalar.h", "cuda/elements.cuh"),
        ("Measurements", "csrc/cuda_ranks.cpp", "cuda/packed_measurements.cuh"),
        ("Packed", "csrc/cuda_ranks.cpp", "cuda/packed_measurements.cuh"),
    ]:
        ours, theirs = fields(in_cpp, struct, bits), fields(in_cuda, struct, bits)
        assert ours == theirs, struct
        assert len(ours) >= 2, struct


def test_constants_of_launches():
    for name in ("kThreads", "kBlocksPerMultiprocessor"):
        assert constant("csrc/cuda_kernels.h", name) == constant("cuda/tensor_table.cuh", name)
    for name in ("kGranuleBytes", "kGranuleElements"):
        assert constant("csrc/cuda_table.h", name) == constant("cuda/tensor_table.cuh", name)


@pytest.mark.gpu
@pytest.mark.native
def test_the_list_of_cuda_kernels():
    in_cpp = torch.ops.amp_plugin._cuda_kernels()
    assert in_cpp == [f"{kernel.name} {kernel.norm or ''} {kernel.threads}" for kernel in all_kernels()]


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
