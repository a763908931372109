"""The public interface: names, parameters with their defaults, and keys of state dicts.

``python -m tests.public_interface`` writes it to ``public_interface.json``. Users see every change in that
file, so describe it in the CHANGELOG.
"""

import enum
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch

import amp_plugin

FILE = Path(__file__).with_suffix(".json")


def describe(name: str, value: Any) -> dict[str, Any]:
    """Return the parameters of a function, or of each public method of one of our classes."""
    if not inspect.isclass(value):
        return {name: _parameters(value)} if callable(value) else {name: None}
    if issubclass(value, enum.Enum):  # its parameters depend on the version of Python
        return {name: ", ".join(value.__members__)}
    found = {name: _parameters(value)}
    for attribute in sorted(dir(value)):
        home = next((kind for kind in value.__mro__ if attribute in vars(kind)), None)
        if attribute.startswith("_") or home is None or not home.__module__.startswith("amp_plugin"):
            continue
        member = inspect.getattr_static(value, attribute)
        inner = getattr(member, "__func__", member)
        found[f"{name}.{attribute}"] = _parameters(inner) if inspect.isfunction(inner) else None
    return found


def _parameters(function: Any) -> str | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    given = [p for p in parameters if p.name != "self"]
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given)
    return re.sub(r" object at 0x\w+", "", shown)


def state_keys() -> dict[str, list[str]]:
    """Return the keys of saved states."""
    scaler = amp_plugin.GradScaler("cpu", losses=["named"])
    state, disabled = scaler.state_dict(), amp_plugin.GradScaler("cpu", enabled=False)
    return {
        "GradScaler.state_dict()": sorted(state),
        "GradScaler.state_dict()['amp_plugin']": sorted(state["amp_plugin"]),
        "... ['losses']['named']": sorted(state["amp_plugin"]["losses"]["named"]),
        "GradScaler(enabled=False).state_dict()": sorted(disabled.state_dict()),
        "torch.amp.GradScaler.state_dict()": sorted(torch.amp.GradScaler("cpu").state_dict()),
    }


def interface() -> dict[str, Any]:
    """Return the whole interface in a form that JSON can hold."""
    found: dict[str, Any] = {}
    for name in dir(amp_plugin):
        if not name.startswith("__"):
            found |= describe(name, getattr(amp_plugin, name))
    from amp_plugin.scaling import OverflowReport, StepResult, grad, gradient_penalty

    for value in (OverflowReport, StepResult, grad, gradient_penalty):
        found |= describe(f"scaling.{value.__name__}", value)
    return {"names": found, "states": state_keys()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(interface(), indent=1, sort_keys=True) + "\n")
