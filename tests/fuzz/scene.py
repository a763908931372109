"""The real side of a sequence: GradScaler and float32 parameters, which printed lines of Python control."""

import functools
import math
import re
from typing import Any

import torch

from tests.fuzz import prelude
from tests.fuzz.model import NO, YES, Model
from tests.fuzz.scale_model import DEFAULT, Disagreement, OutOfDomainError
from tests.fuzz.sequences import Setup

_IMPORTS = """\
import copy, pickle
import torch
from torch.nn import Parameter
from amp_plugin import GradScaler
from tests.fuzz.prelude import *"""
_TORCHS_OWN = "expected Tensor as element"  # fused SGD with momentum, if some parameters join later
_LARGEST, _SMALLEST = 1e36, 1e-34


@functools.lru_cache(maxsize=4096)
def _compiled(line: str) -> Any:
    return compile(line, "<sequence>", "exec")


class Scene:
    """Runs lines and records them, and compares the results with the oracle."""

    def __init__(self, setup: Setup, oracle: Model, scaler: type) -> None:
        self.lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._oracle = oracle
        self._scale_names = oracle.scales.names
        self._weights: list[torch.Tensor] = []
        self.run(_IMPORTS)
        self._names["GradScaler"] = scaler
        for index, value in enumerate(setup.weights()):
            self.run(f"p{index} = Parameter(torch.tensor({value}))")
        self.params: list[torch.Tensor] = [self._names[f"p{i}"] for i in range(len(oracle.params))]
        for o, (kind, members) in enumerate(zip(setup.kinds, setup.members, strict=True)):
            self.run(f"o{o} = optimizer({kind!r}, [{params(members)}])")
        options = "".join(f", {name}={value!r}" for name, value in setup.options.items())
        self.run(f'scaler = GradScaler("cpu"{options})')
        self.keep_weights()

    def run(self, line: str, refused: str = NO, text: str = "") -> bool:
        """Run a line. Return whether it was ``refused`` with a RuntimeError that contains ``text``."""
        self.lines.append(line)
        try:
            exec(_compiled(line), self._names)
        except Exception as error:
            if _TORCHS_OWN in str(error):
                raise OutOfDomainError from error
            if (
                refused == NO
                or not isinstance(error, RuntimeError | AssertionError)
                or not re.search(text, str(error))
            ):
                raise Disagreement(f"raised {type(error).__name__}: {error}") from error
            self.lines[-1] = (
                f"try:\n    {line}\nexcept (RuntimeError, AssertionError) as error:\n    print(error)"
            )
            return True
        if refused == YES:
            raise Disagreement(f"must raise RuntimeError ({text})")
        return False

    def __getitem__(self, name: str) -> Any:
        return self._names[name]

    def scales(self) -> dict[str, float]:
        """Return the loss scales. Unlike ``get_scale()``, it does not apply a requested update."""
        shared = self._names["scaler"].core.shared
        return {name: shared.scale_of(name or None).item() for name in self._scale_names}

    def look(self) -> None:
        """Compare scales and unscaled gradients. End the sequence if numbers leave float32's range."""
        oracle = self._oracle
        oracle.shown = self.scales()
        oracle.scales.see(oracle.shown)
        for index in oracle.present(range(len(self.params))):
            right = oracle.params[index].grad.tolist()
            finite = [abs(x) for x in right if math.isfinite(x) and x]
            if finite and (
                max(finite) * oracle.scales.largest() > _LARGEST
                or min(finite) * oracle.scales.smallest() < _SMALLEST
            ):
                raise OutOfDomainError
            if oracle.gradients[index].unscaled:
                self._compare_gradient(index, right)

    def _compare_gradient(self, index: int, right: list[float]) -> None:
        grad = self.params[index].grad
        if grad is None:
            raise Disagreement(f"p{index}.grad is None, it should be {right}")
        if not all(_close(a, b, 1e-4 * abs(b)) for a, b in zip(grad.tolist(), right, strict=True)):
            raise Disagreement(f"p{index}.grad is {grad.tolist()}, unscaled it should be {right}")

    def keep_weights(self) -> None:
        """Remember the weights before a step, and give the oracle the same ones."""
        self._weights = [param.detach().double() for param in self.params]
        with torch.no_grad():
            for param, value in zip(self._oracle.params, self._weights, strict=True):
                param.copy_(value)

    def compare_weights(self) -> None:
        """Compare how far the weights have moved since the last time.

        End the sequence if the right ones leave float32's range.
        """
        for index, (param, right, before) in enumerate(
            zip(self.params, self._oracle.params, self._weights, strict=True)
        ):
            for value, other, start in zip(param.tolist(), right.tolist(), before.tolist(), strict=True):
                if not math.isfinite(other) or abs(other) > 1e6:
                    raise OutOfDomainError
                if not _close(value, other, 1e-3 * abs(other - start) + 2e-6 * max(1.0, abs(other))):
                    moved = f"moved by {value - start:.6g}, should have by {other - start:.6g}"
                    raise Disagreement(f"p{index} {moved}")
        self.keep_weights()

    def see_state(self, state: dict[str, Any]) -> None:
        ours = state.get("amp_plugin", {"hysteresis_tracker": 1, "losses": {}})
        numbers = {DEFAULT: {**state, "hysteresis_tracker": ours["hysteresis_tracker"]}, **ours["losses"]}
        keys = ("scale", "_growth_tracker", "hysteresis_tracker")
        shown = {name: tuple(numbers[name][key] for key in keys) for name in self._scale_names}
        self._oracle.scales.see_state(shown)


def params(indices: Any) -> str:
    """Return the printed names of parameters, such as ``p0, p1``."""
    return ", ".join(f"p{i}" for i in indices)


def terms(pairs: Any) -> str:
    """Return the printed terms of a loss, such as ``(p0, 3.0), (p1, 2.0)``."""
    return ", ".join(f"(p{i}, {factor})" for i, factor in pairs)


def named(name: str) -> str:
    """Return the printed scale name for a call of ``scale``, or nothing for the default scale."""
    return f", name={name!r}" if name else ""


def value_of(kind: str, pairs: Any, weights: list[torch.Tensor]) -> torch.Tensor:
    return getattr(prelude, kind)(*((weights[i], factor) for i, factor in pairs))


def _close(value: float, right: float, tolerance: float) -> bool:
    if not math.isfinite(right):
        return not math.isfinite(value)
    return abs(value - right) <= tolerance
