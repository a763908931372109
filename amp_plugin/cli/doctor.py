"""Report what this machine has and what amp_plugin does on it, as plain data.

Each part is a dictionary of strings, numbers and booleans, ready for JSON. Making the report
compiles and loads the native core, as its first use would.
"""

from __future__ import annotations

import os
import platform
import sys
import textwrap
import warnings
from collections import Counter
from importlib import metadata
from typing import Any

import torch
from rich import filesize
from rich.console import Console
from rich.markup import escape

import amp_plugin
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.rules_files import TABLES
from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.build_cache import cache_root
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.options import KNOWN_VARIABLES, PREFIX, LossScaleOptions, unknown_variables
from amp_plugin.precision import DTYPES, cpu_capabilities, is_fast, speed_advice
from amp_plugin.scaling import one_pass
from amp_plugin.weights.formats import FORMATS

_COMPANIONS = ("lightning", "pytorch-lightning", "accelerate", "transformers", "cuda-core")

Part = dict[str, Any]


def examine(precision: str, device_type: str) -> dict[str, Any]:
    """Return the whole report."""
    core, kernels, cache = native_core_state(), cuda_kernels_state(), cache_state()
    planned, unknown = plan(precision, device_type), unknown_variables_state()
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


def default_device() -> str:
    """Return the type of this machine's accelerator, ``"cpu"`` if it has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in TABLES else "cpu"


def versions() -> Part:
    """Return name -> version of what is installed, None for what is not."""
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
    """Return the name of each device and which precisions it computes fast."""
    return [_cpu(), *(_cuda(index) for index in range(torch.cuda.device_count()))]


def _cpu() -> Part:
    return {
        "device": "cpu",
        "name": str(cpu_capabilities().get("cpu_name") or platform.processor() or platform.machine()),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "fast_bf16": bool(is_fast("bf16", "cpu")),
        "fast_fp16": bool(is_fast("fp16", "cpu")),
    }


def _cuda(index: int) -> Part:
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": f"cuda:{index}",
        "name": properties.name,
        "architecture": f"sm_{properties.major}{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "fast_bf16": is_fast("bf16", "cuda", index),
        "fast_fp16": is_fast("fp16", "cuda", index),
    }


def native_core_state() -> Part:
    """Return whether the native core is loaded, and why it is not."""
    with warnings.catch_warnings():  # the report gives the reason
        warnings.simplefilter("ignore")
        core = native_core()
    return {
        "loaded": core.loaded,
        "library": str(core.library) if core.library else None,
        "compile_seconds": round(core.seconds, 1) if core.loaded else None,
        "reason": core.reason,
    }


def cuda_kernels_state() -> Part:
    """Return whether the CUDA kernels work on the current GPU, after trying one."""
    if not torch.cuda.is_available():
        return {"usable": False, "reason": "", "note": "no CUDA device"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the report gives the reason
        core = cuda_core()
    note = "compiled at first use" if core.loaded else "plain torch ops are used"
    return {"usable": core.loaded, "reason": core.reason, "note": note}


def cache_state() -> Part:
    """Return folder, bytes and problem of the build cache."""
    try:
        root = cache_root()
    except (OSError, ValueError) as error:
        return {"folder": None, "bytes": 0, "problem": str(error)}
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    return {"folder": str(root), "bytes": size, "problem": ""}


def unknown_variables_state() -> dict[str, str]:
    """Return name -> advice for each environment variable that looks misspelt."""
    unset = f"; unset it; known are {', '.join(KNOWN_VARIABLES)}"
    hints = unknown_variables(os.environ).items()
    return {name: f"nothing reads this variable{hint or unset}" for name, hint in hints}


def plan(precision: str, device_type: str) -> Part:
    """Return what a run in ``precision`` on ``device_type`` does."""
    problem, mixed = _problem(device_type), precision != "fp32"
    rules = Counter(rule.value for rule in OpRules.default(device_type).rules.values()) if mixed else {}
    kernels = "amp_plugin" if native_core_state()["loaded"] else "torch"
    return {
        "precision": precision,
        "device": device_type,
        "autocast": mixed,
        "dtype": str(DTYPES[precision]).removeprefix("torch."),
        "ops": dict(sorted(rules.items())),
        "kernels": None if problem else kernels,
        "one_pass_steps": _one_pass_steps(device_type),
        "loss_scale": _loss_scale() if precision == "fp16" else None,
        "bytes_per_parameter": _bytes_per_parameter(precision),
        "problem": problem,
        "advice": "" if problem else speed_advice(precision, device_type),
    }


def _bytes_per_parameter(precision: str) -> Part:
    """Return ``weights=...`` -> bytes per parameter with AdamW and gradients in fp32, between two steps."""
    gradient_and_moments = 3 * torch.float32.itemsize
    stored = {
        name: form.dtype.itemsize + form.kept_bytes + gradient_and_moments
        for name, form in FORMATS.items()
        if form.dtype is DTYPES[precision]
    }
    return {"fp32": torch.float32.itemsize + gradient_and_moments, **stored}


def _one_pass_steps(device_type: str) -> str:
    reason = one_pass.unavailable(device_type)
    return f"none: {reason}" if reason else ", ".join(one_pass.OPTIMIZERS)


def _loss_scale() -> Part:
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    return {name: getattr(LossScaleOptions(), name) for name in names}


def _problem(device_type: str) -> str:
    if device_type == "cpu" or torch.get_device_module(device_type).is_available():
        return ""
    found = f"torch {torch.__version__} finds no {device_type} device on this machine"
    return f"{found}; plan for another with --device, or ask on a machine that has one"


# -- printed -------------------------------------------------------------------------------------


def print_report(report: dict[str, Any]) -> None:
    """Print a report of :func:`examine` for people."""
    console = Console(soft_wrap=True, highlight=False)
    parts = {title: _rows(part) for title, part in report.items() if part and title != "healthy"}
    width = max(len(name) for rows in parts.values() for name, _ in rows)
    for title, rows in parts.items():
        console.print(f"[bold]{_words(title)}[/]")
        for name, value in rows:
            first, *others = _lines(value, console.width - width - 4)
            console.print(f"  [cyan]{escape(name):<{width}}[/]  {escape(first)}")
            for line in others:
                console.print(f"  {'':<{width}}  {escape(line)}")
    is_well = "[green]All is well.[/]", "[yellow]Something is missing or wrong: see the reasons.[/]"
    console.print(is_well[not report["healthy"]])


def _lines(text: str, width: int) -> list[str]:
    """Break text between words for a terminal; a path stays whole, to be copied."""
    if not sys.stdout.isatty():
        return [text]
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]


def _rows(part: Any) -> list[tuple[str, str]]:
    """Return name -> text of a part, what is empty left out; the devices are a part that is a list."""
    if isinstance(part, list):
        part = {entry["device"]: {**entry, "device": None} for entry in part}
    if "bytes_per_parameter" in part:
        by_weights = {f"weights={name}": size for name, size in part["bytes_per_parameter"].items()}
        part = part | {"bytes_per_parameter": f"{_text(by_weights)}; with AdamW"}
    rows = [(_words(name), value) for name, value in part.items() if value not in ("", None, {})]
    sizes = {"bytes": "size"}
    return [
        (sizes.get(name, name), filesize.decimal(value) if name in sizes else _text(value))
        for name, value in rows
    ]


def _words(name: str) -> str:
    """Return a key of the report as words, names of settings and packages unchanged."""
    return name.replace("_", " ") if name.islower() and name != "amp_plugin" else name


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_words(k)} {_text(item)}" for k, item in value.items() if item is not None)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
