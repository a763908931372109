"""The sections of the benchmark report, in order. The module of a section is imported only when needed."""

from __future__ import annotations

from importlib import import_module

from benchmarks.setting import Section

CPU = {
    "ops": "autocast",
    "models": "forward_backward",
    "depth": "forward_backward",
    "kernels": "gradient_path",
    "clipping": "gradient_path",
    "steps": "steps",
    "tensors": "gradient_path",
    "weights": "weights",
    "compiled": "compiled",
    "diagnosis": "diagnosis",
    "host": "host_time",
    "memory": "memory",
    "first_use": "first_use",
    "lightning": "lightning",
    "accelerate": "accelerate",
}
NEEDS = {
    "steps": ("lion_pytorch", "schedulefree"),
    "diagnosis": ("altair", "jinja2", "vl_convert"),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
}
"""The packages that a section needs in addition to the dependencies of amp_plugin."""

CUDA = {"bandwidth": "cuda", "launches": "cuda", "forms": "forms", "training": "training", **CPU}


def keys(device: str) -> list[str]:
    """Return the keys of a device's benchmark sections, in the order of the report."""
    return list(CUDA if device == "cuda" else CPU)


def section(key: str) -> Section:
    """Return the benchmark section with this key, for the CPU or a GPU."""
    module = import_module(f"benchmarks.{CUDA[key]}")
    return next(section for section in module.SECTIONS if section.key == key)
