"""Constants that are defined in Python, in C++ and in CUDA have the same values in all of them."""

import re
from pathlib import Path

import pytest
import torch

import amp_plugin.kernels
from amp_plugin.casting import compiled, installed_kernels
from amp_plugin.kernels import reference
from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda import rule_names
from amp_plugin.kernels.ops import HYSTERESIS_MODES

KERNELS = Path(amp_plugin.kernels.__file__).parent


def source(name: str) -> str:
    return (KERNELS / name).read_text(encoding="utf-8")


def constant(name: str, constant: str) -> int:
    """Return the value of an integer constant in a C++ source."""
    return int(re.search(rf"\b{constant} = (-?\d+)", source(name))[1])


def enumerators(name: str, enum: str) -> list[str]:
    """Return the names in an enum, in order. Names without a value are counted from 0."""
    body = re.search(rf"enum (?:class )?{enum} : \w+ {{(.*?)}}", source(name), re.DOTALL)[1]
    return [part.strip() for part in body.split(",") if part.strip()]


def test_hysteresis_modes():
    in_cpp = dict(part.split(" = ") for part in enumerators("csrc/cuda_layout.h", "HysteresisMode"))
    numbers = {name.removeprefix("k").lower(): int(number) for name, number in in_cpp.items()}
    assert numbers == HYSTERESIS_MODES


def test_flag_bits():
    for file, inf, nan in [
        ("csrc/scaling_chunk.h", "kInf", "kNan"),
        ("cuda/elements.cuh", "kHasInf", "kHasNan"),
    ]:
        assert (constant(file, inf), constant(file, nan)) == (reference.INF_FLAG, reference.NAN_FLAG)


@pytest.mark.native
def test_optimizer_rules():
    """Each rule has the same count of numbers and counters, and the same states, in the reference and in its
    header.
    """
    kinds = ("signed", "square", "second square", "weight")
    described = [
        f"{name} {len(rule.numbers)} {rule.counters} {' '.join(str(kinds.index(state)) for state in rule.states)}".strip()
        for name, rule in reference.RULES.items()
    ]
    assert native_core().extension.step_rules() == described
    assert rule_names() == list(reference.RULES)


def test_op_rules():
    in_cpp = enumerators("csrc/autocast_kernel.h", "Rule")
    spelled = ["k" + rule.value.title().replace("_", "") for rule in installed_kernels.RULE_CODES]
    assert in_cpp == ["kNone", *spelled]
    assert list(installed_kernels.RULE_CODES.values()) == list(range(1, len(in_cpp)))
    assert constant("csrc/region.h", "kNoRules") == installed_kernels.NO_RULES


def test_device_numbers():
    """The numbers equal those of c10::DeviceType."""
    header = Path(torch.__file__).parent / "include/torch/headeronly/core/DeviceType.h"
    numbers = dict(re.findall(r"^  (\w+) = (\d+),", header.read_text(), re.MULTILINE))
    assert {name: int(numbers[name.upper()]) for name in installed_kernels.DEVICE_NUMBERS} == (
        installed_kernels.DEVICE_NUMBERS
    )


def test_the_devices_that_say_which_rules_are_in_force():
    text = source("csrc/rules_in_force.h")
    devices = re.findall(r"k(?:Low|High)Digit = c10::DeviceType::(\w+)", text)
    assert tuple(name.lower() for name in devices) == compiled.DIGITS
    zeros = re.search(r"kLowDigit \? c10::k(\w+) : c10::k(\w+)", text).groups()
    assert tuple(getattr(torch, name.lower()) for name in zeros) == compiled.ZEROS
