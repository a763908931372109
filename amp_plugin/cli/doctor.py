"""Collect facts about this machine and about what amp_plugin would do on it. This loads the native core."""

from __future__ import annotations

import os
import platform
import warnings
from collections import Counter
from importlib import metadata
from typing import Any, Final

import torch
from rich.markup import escape
from rich.table import Table

import amp_plugin
from amp_plugin.casting.rules import OpRules
from amp_plugin.cli.arguments import show
from amp_plugin.hardware import NEEDS, Hardware, chosen_for, hardware_of, speed_advice
from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.build_cache import cache_root
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.options import KNOWN_VARIABLES, PREFIX, LossScaleOptions, unknown_variables
from amp_plugin.precision import DTYPES
from amp_plugin.weights import one_pass

_SCALE = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
_COMPANIONS = ("lightning", "pytorch-lightning", "accelerate", "transformers", "cuda-core")

Part = dict[str, Any]


_DEFAULT: Final = "fp16"  # the precision that the report covers if the user gives none


def examine(precision: str | None, device_type: str) -> dict[str, Any]:
    """Return the whole report as a JSON-serializable dict.

    If ``precision`` is None, the report describes a run in the default precision.
    """
    with warnings.catch_warnings():  # The report itself gives the reasons.
        warnings.simplefilter("ignore")
        core, kernels, cache = native_core_state(), cuda_kernels_state(), cache_state()
        planned = plan(precision, device_type)
    unset = f"; unset it, or use one of these: {', '.join(KNOWN_VARIABLES)}"
    unknown = {
        name: f"amp_plugin does not read this variable{hint or unset}"
        for name, hint in unknown_variables(os.environ).items()
    }
    return {
        "versions": versions(),
        "devices": devices(),
        "native_core": core,
        "cuda_kernels": kernels,
        "cache": cache,
        "plan": planned,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(PREFIX)},
        "unknown_variables": unknown,
        "healthy": not (
            core["reason"] or kernels["reason"] or cache["problem"] or planned["problem"] or unknown
        ),
    }


def versions() -> Part:
    """Map the names of packages to their versions, or to None if a package is not installed."""
    found: Part = {
        "amp_plugin": amp_plugin.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda (torch's)": torch.version.cuda,
    }
    for name in _COMPANIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> list[Part]:
    """Return the facts about each device, such as its name and the formats in which it is fast."""
    hardware = hardware_of("cpu")
    cpu = {
        "device": "cpu",
        "name": hardware.name,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **_formats(hardware),
    }
    return [cpu, *(_cuda(index) for index in range(torch.cuda.device_count()))]


def _cuda(index: int) -> Part:
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": f"cuda:{index}",
        "name": properties.name,
        "architecture": f"sm_{properties.major}{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        **_formats(hardware_of("cuda", index)),
    }


def _formats(hardware: Hardware) -> Part:
    """Return the formats in which a device is fast, and what precision="auto" chooses for it and why."""
    choice = chosen_for(hardware)
    fast = [name for name in NEEDS if hardware.computes(name)]
    return {"fast": fast, "auto": choice.precision, "auto_because": choice.reason}


def native_core_state() -> Part:
    """Return whether the native core is loaded and, if it is not, the reason."""
    core = native_core()
    return {
        "loaded": core.loaded,
        "library": str(core.library) if core.library else None,
        "compile_seconds": round(core.seconds, 1) if core.loaded else None,
        "reason": core.reason,
    }


def cuda_kernels_state() -> Part:
    """Run one CUDA kernel on the current GPU, and return whether it worked."""
    if not torch.cuda.is_available():
        return {"usable": False, "reason": "", "note": "no CUDA device"}
    core = cuda_core()
    note = "compiled at first use" if core.loaded else "plain torch ops are used"
    return {"usable": core.loaded, "reason": core.reason, "note": note}


def cache_state() -> Part:
    """Return the folder of the build cache, its size in bytes, and any problem with the folder."""
    try:
        root = cache_root()
    except (OSError, ValueError) as error:
        return {"folder": None, "bytes": 0, "problem": str(error)}
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    return {"folder": str(root), "bytes": size, "problem": ""}


def plan(precision: str | None, device_type: str) -> Part:
    """Return the dtype, kernels and loss scale that a run in ``precision`` on ``device_type`` would use.

    If ``precision`` is None, the default precision is used.
    """
    because = ""
    if precision is None:
        choice = chosen_for(hardware_of(device_type))
        precision = _DEFAULT
        because = f"{_DEFAULT} is only the default of --precision; auto would take {choice.precision}"
    elif precision == "auto":
        choice = chosen_for(hardware_of(device_type))
        precision, because = choice.precision, choice.reason
    mixed, problem = precision != "fp32", ""
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        problem = f"torch finds no {device_type} device on this machine; plan for another with --device"
    rules = Counter(rule.value for rule in OpRules.default(device_type).rules.values()) if mixed else {}
    kernels = "amp_plugin" if native_core_state()["loaded"] else "torch"
    no_kernels, scale = one_pass.unavailable(device_type), LossScaleOptions()
    return {
        "precision": precision,
        "auto": because,
        "device": device_type,
        "autocast": mixed,
        "dtype": str(DTYPES[precision]).removeprefix("torch."),
        "ops": dict(sorted(rules.items())),
        "kernels": None if problem else kernels,
        "one_pass_steps": f"none: {no_kernels}" if no_kernels else ", ".join(one_pass.OPTIMIZERS),
        "loss_scale": {name: getattr(scale, name) for name in _SCALE} if precision == "fp16" else None,
        "problem": problem,
        "advice": "" if problem else speed_advice(precision, device_type),
    }


def print_report(report: dict[str, Any]) -> None:
    """Print the report that :func:`examine` returns. Empty entries are left out."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, part in report.items():
        if title == "healthy" or not part:
            continue
        table.add_row(f"[bold]{title}[/]")
        rows = {entry["device"]: entry for entry in part} if isinstance(part, list) else part
        for name, value in rows.items():
            if value not in ("", None, {}):
                parts = value.items() if isinstance(value, dict) else ()
                text = ", ".join(f"{key} {part}" for key, part in parts) or str(value)
                table.add_row(f"  [cyan]{escape(name)}[/]", escape(text))
    show(table)
    print("All is well." if report["healthy"] else "Something is missing or wrong: see the reasons.")
