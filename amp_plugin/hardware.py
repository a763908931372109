"""Determines which number formats are fast on a device, and which precision "auto" chooses for it.

The hardware's generation decides. ``torch.cuda.is_bf16_supported()`` is not used, because it also returns
True for GPUs that only emulate bfloat16. The table ``NEEDS`` lists the hardware on which each format is
fast.
"""

from __future__ import annotations

import functools
import logging
import platform
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from amp_plugin.messages import warn_user
from amp_plugin.precision import DTYPES, PrecisionName

_LOG: Final = logging.getLogger("amp_plugin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The hardware features that a device needs for fast arithmetic in a number format.

    Attributes:
        nvidia: the first NVIDIA compute capability with fast arithmetic in the format.
        nvidia_before: the first NVIDIA compute capability that no longer supports the format, or None.
        amd: prefixes of the names of AMD architectures that have fast arithmetic in the format.
        cpu: CPU instruction sets, by torch's names. A CPU needs at least one of them.
        xpu: properties of Intel GPUs, under torch's names for them. A GPU needs at least one of them.
        words: the text that error messages use to describe the required hardware.
    """

    nvidia: tuple[int, int]
    nvidia_before: tuple[int, int] | None = None
    amd: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    xpu: tuple[str, ...] = ()
    words: str


_XMX: Final = ("has_subgroup_matrix_multiply_accumulate",)
_FLOAT8: Final = Needs(
    nvidia=(8, 9),
    amd=("gfx94", "gfx95", "gfx12"),
    words="an NVIDIA GPU from compute capability 8.9 on (Ada, Hopper, Blackwell) or an AMD MI300 or later",
)
_BLACKWELL: Final = "an NVIDIA GPU of compute capability 10.x (Blackwell: B200, B300, GB200)"

NEEDS: Final[dict[str, Needs]] = {
    "fp16": Needs(
        nvidia=(7, 0),
        amd=("gfx90", "gfx94", "gfx95", "gfx10", "gfx11", "gfx12"),
        cpu=("avx512_fp16", "amx_fp16", "fp16_arith"),
        xpu=_XMX,
        words="an NVIDIA GPU from Volta on, or a processor with AVX512-FP16, AMX-FP16 or Arm's FP16",
    ),
    "bf16": Needs(
        nvidia=(8, 0),
        amd=("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"),
        cpu=("avx512_bf16", "amx_bf16", "bf16"),
        xpu=_XMX,
        words="an NVIDIA GPU from Ampere on, or a processor with AVX512-BF16, AMX-BF16 or Arm's BF16",
    ),
    "fp8": _FLOAT8,
    "fp8-rowwise": _FLOAT8,
    "mxfp8": Needs(nvidia=(10, 0), nvidia_before=(11, 0), words=_BLACKWELL),
    "nvfp4": Needs(nvidia=(10, 0), nvidia_before=(11, 0), words=_BLACKWELL),
}
"""Maps each format to the hardware on which it is fast. Formats below 16 bits use torchao's kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What torch reports about a device.

    Attributes:
        device: the device type: ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"mps"``.
        name: the vendor's product name for the device.
        capability: NVIDIA's compute capability; None for other devices.
        architecture: AMD's name for the architecture, such as ``"gfx942"``; empty for other devices.
        features: the instruction sets of a CPU, or the properties of an Intel GPU.
        is_known: False if torch does not report enough to tell which formats are fast.
    """

    device: str
    name: str = ""
    capability: tuple[int, int] | None = None
    architecture: str = ""
    features: frozenset[str] = field(default_factory=frozenset)
    is_known: bool = True

    def computes(self, format_name: str) -> bool | None:
        """Return whether the device has fast arithmetic in a number format, or None if that is unknown."""
        needs = NEEDS[format_name]
        if not self.is_known:
            return None
        if self.capability is not None:
            is_old = self.capability < needs.nvidia
            return not is_old and (needs.nvidia_before is None or self.capability < needs.nvidia_before)
        if self.architecture:
            return self.architecture.startswith(needs.amd) if needs.amd else False
        return bool(self.features.intersection(needs.cpu if self.device == "cpu" else needs.xpu))

    def __str__(self) -> str:
        """Return the device's type, name and architecture or features, such as ``cuda (Tesla T4, sm_75)``."""
        if self.capability is not None:
            told = f"sm_{self.capability[0]}{self.capability[1]}"
        else:
            told = self.architecture or ", ".join(sorted(self.features & _DECISIVE))
        parts = ", ".join(part for part in (self.name, told) if part)
        return f"{self.device} ({parts})" if parts else self.device


_DECISIVE: Final = frozenset(name for needs in NEEDS.values() for name in (*needs.cpu, *needs.xpu))


def cpu_capabilities() -> dict[str, Any]:
    """Return what torch reports about the CPU, or an empty dict if torch is too old to report it."""
    return dict(getattr(torch.cpu, "get_capabilities", dict)())


def hardware_of(device_type: str, index: int = 0) -> Hardware:
    """Return what torch reports about a device of this machine. If it is missing, ``is_known`` is False."""
    if device_type == "cpu":
        found = cpu_capabilities()
        return Hardware(
            device="cpu",
            name=str(found.get("cpu_name") or platform.processor() or platform.machine()),
            features=frozenset(name for name, value in found.items() if value is True),
            is_known=bool(found),
        )
    if device_type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            architecture = str(properties.gcnArchName).partition(":")[0]
            return Hardware(device="cuda", name=properties.name, architecture=architecture)
        return Hardware(device="cuda", name=properties.name, capability=(properties.major, properties.minor))
    if device_type == "xpu" and torch.xpu.is_available():
        found = torch.xpu.get_device_capability(index)
        features = frozenset(name for name, value in found.items() if value is True)
        return Hardware(device="xpu", name=torch.xpu.get_device_name(index), features=features)
    return Hardware(device=device_type, is_known=False)


def default_device() -> str:
    """Return the type of this machine's accelerator, or ``"cpu"`` if there is no supported one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in _ACCELERATORS else "cpu"


_ACCELERATORS: Final = ("cuda", "mps", "xpu")


def is_fast(format_name: str, device_type: str, index: int = 0) -> bool | None:
    """Return whether a device has fast arithmetic in a number format, or None if that is unknown."""
    return hardware_of(device_type, index).computes(format_name)


# -- "auto" ----------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionChoice:
    """The precision that ``precision="auto"`` chooses for a device.

    Attributes:
        precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        device: the type of the device.
        reason: why, as a sentence.
    """

    precision: PrecisionName
    device: str
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype for autocast."""
        return DTYPES[self.precision]


def choose_precision(device: str | None = None, index: int = 0) -> PrecisionChoice:
    """Choose a precision that is fast on a device: bf16 if possible, else fp16, else fp32.

    The option ``precision="auto"`` makes the same choice. The choice is fp16 for a GPU that only emulates
    bfloat16, and fp32 for a CPU without 16-bit instructions. Nothing is measured. The hardware's generation
    decides.

    Args:
        device: the type of the device. The default is this machine's accelerator, or ``"cpu"`` if it has
            none.
        index: which of several devices of the type.

    Returns:
        The precision, its dtype, and the reason.

    Example:
        >>> choice = choose_precision("cpu")
        >>> choice.precision in {"bf16", "fp16", "fp32"}
        True
        >>> region = torch.autocast("cpu", dtype=torch.bfloat16, enabled=choice.precision == "bf16")
        >>> scaler = torch.amp.GradScaler("cpu", enabled=choice.precision == "fp16")
    """
    return chosen_for(hardware_of(device or default_device(), index))


def chosen_for(hardware: Hardware) -> PrecisionChoice:
    """Choose the precision for a device, given what torch reports about it."""
    bf16, fp16 = hardware.computes("bf16"), hardware.computes("fp16")
    precision: PrecisionName = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if bf16:
        reason = f"{hardware} computes bf16 fast"
    elif fp16:
        reason = f"{hardware} computes fp16 fast, and bf16 at best by emulation"
    elif bf16 is None:
        reason = f"torch does not say whether {hardware} computes 16 bits fast"
    else:
        reason = f"{hardware} computes neither bf16 nor fp16 fast"
    return PrecisionChoice(precision=precision, device=hardware.device, reason=reason)


def auto_precision(device: str | None = None) -> PrecisionChoice:
    """Choose a precision for ``"auto"`` on a device. Log the choice and its reason once per process."""
    choice = choose_precision(device)
    _log_once(choice)
    return choice


@functools.cache
def _log_once(choice: PrecisionChoice) -> None:
    _LOG.info("precision 'auto' is %s on %s: %s", choice.precision, choice.device, choice.reason)


# -- advice about speed ----------------


def speed_advice(precision: str, device_type: str) -> str:
    """Return a warning if a precision is slow on a device, or "" if it is fast or the speed is unknown."""
    if precision not in {"fp16", "bf16"} or is_fast(precision, device_type) is not False:
        return ""
    other = "bf16" if precision == "fp16" else "fp16"
    better = f"; {other} is" if is_fast(other, device_type) else ", expect no speed-up"
    return f"{precision} is not fast on this {device_type}{better}"


def warn_of_slow_fp16(precision: str, device_type: str) -> None:
    """Warn that fp16 is slow if the run's device lacks fast fp16 arithmetic."""
    advice = speed_advice(precision, device_type) if precision == "fp16" else ""
    if advice:
        warn_user(f"{advice}. The results are right, only slow; amp-plugin doctor shows what is fast here")


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64 if a device supports it, else float32.

    CPUs and CUDA devices support float64. Every other device type is tested once, with a single float64
    multiplication.
    """
    if device.type in {"cpu", "cuda", "meta"}:
        return torch.float64
    try:
        with _disable_current_modes():
            float(torch.ones((), dtype=torch.float64, device=device) * 2)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def in_widest_float(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a real tensor to the widest floating-point dtype that its device can compute in."""
    return tensor.to(widest_float(tensor.device))
