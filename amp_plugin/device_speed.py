"""Which 16-bit precisions a device computes fast."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

import torch

from amp_plugin.user_warnings import warn_user

# Names of instruction sets in /proc/cpuinfo, of x86-64 and of Arm.
_BF16_ARITHMETIC: Final = {"avx512_bf16", "amx_bf16", "bf16"}
_FP16_ARITHMETIC: Final = {"avx512_fp16", "amx_fp16", "asimdhp"}


def processor_facts() -> tuple[str, set[str]]:
    """Return the processor's name and its instruction sets; none where /proc/cpuinfo does not tell."""
    name, flags = platform.processor() or platform.machine(), set()
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() in {"flags", "Features"}:
            flags = set(value.split())
    return name, flags


def is_fast(precision: str, device_type: str, index: int = 0) -> bool | None:
    """Say whether a device has arithmetic of a precision; None if that is not known.

    Args:
        precision: ``"fp16"`` or ``"bf16"``.
        device_type: ``"cpu"`` or ``"cuda"``; of others nothing is known.
        index: which GPU.
    """
    if device_type == "cpu":
        flags = processor_facts()[1]
        return (
            bool(flags & (_FP16_ARITHMETIC if precision == "fp16" else _BF16_ARITHMETIC)) if flags else None
        )
    if device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(index).major >= (7 if precision == "fp16" else 8)
    return None


def speed_advice(precision: str, device_type: str) -> str:
    """Return what to know of a precision's speed on a device; empty if it is fast, or nothing is known."""
    if precision not in {"fp16", "bf16"} or is_fast(precision, device_type) is not False:
        return ""
    other = "bf16" if precision == "fp16" else "fp16"
    better = f"; {other} is" if is_fast(other, device_type) else ", expect no speed-up"
    return f"{precision} is not fast on this {device_type}{better}"


def warn_of_slow_fp16(precision: str, device_type: str) -> None:
    """Say at the start of a run that its device has no fp16 arithmetic, as ``amp-plugin doctor`` does."""
    advice = speed_advice(precision, device_type) if precision == "fp16" else ""
    if advice:
        warn_user(f"{advice}. The numbers are right all the same; amp-plugin doctor shows what is fast here")
