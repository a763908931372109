"""Assertions about numerics, whose tolerances are measured in the run itself.

Each op runs once in the program's dtypes, and once in a wide dtype whose rounding is negligible. Rounding
alone can cause a relative difference of at most ``explained`` between the two results.
``explained`` is the square root of the sum of the squares of two numbers:

- The first number is the relative error of the op itself, capped at half an eps of its dtype.
- The second number is an allowance for the rounding of earlier ops. This allowance is the largest value of
  ``explained`` among the op's inputs.

Some derivatives are discontinuous, such as the derivative of relu at 0. If rounding moves an input across a
discontinuity, the result changes by more than the rounding error. Therefore a third term is added
to the sum of squares. The third term is the share of the result's squared norm that comes from elements whose
input crossed the discontinuity. The third term is capped at three times the largest ``explained`` among the
op's inputs.

An assertion fails if a loss, or the gradients of a step, differ from the wide-dtype run by more than three
times ``explained``. An assertion also fails if rounding the weights loses too large a fraction of an update.
The lost fraction of an update may be at most three times the largest value of ``explained`` among all
gradients.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.hardware import in_widest_float
from amp_plugin.numerics.compare import compare_runs
from amp_plugin.numerics.finding import laid_out
from amp_plugin.numerics.op import Call
from amp_plugin.numerics.run_recorder import RunRecorder
from amp_plugin.numerics.shadow import WideRun
from amp_plugin.numerics.values import Storages, distance, is_low_precision, unwatched

# A well-conditioned program amplifies rounding by at most this factor. ``compare`` uses the same factor.
_GROWTH: Final = 3.0
# Ops that have discontinuous derivatives, or that select elements.
_KINKS: Final = frozenset(
    {"threshold_backward", "hardtanh_backward", "leaky_relu_backward", "sgn", "sign", "where", "masked_fill",
     "max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward", "value_selecting_reduction_backward"}
)  # fmt: skip
_REFERENCES: Final = {"fp32": torch.float32, "fp64": torch.float64}
_PRECISIONS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _turned(result: Tensor, exact: Tensor) -> float:
    """Return the share of a result's squared norm that comes from elements that crossed a discontinuity."""
    size = float(in_widest_float(exact).square().sum())
    difference = in_widest_float(result) - in_widest_float(exact)
    other_side = difference.abs() > 0.5 * in_widest_float(exact).abs()
    return float(difference[other_side].square().sum()) / size if size else 0.0


class _Trained(WideRun):  # type: ignore[no-untyped-call]
    """Runs each op in a wide dtype too, and measures how large a difference rounding alone can explain."""

    def __init__(self, reference: torch.dtype) -> None:
        super().__init__(None, reference)
        self._explained: Storages[float] = Storages()
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        # The largest ``explained`` of all gradients so far.
        self.largest = torch.finfo(torch.float32).eps
        # A line for each loss, gradient or update that differs by more than rounding can explain.
        self.apart: list[str] = []
        # A description of the first op whose result exceeds its tolerance, or "".
        self.origin = ""

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Compute ``explained`` of a result.

        Record the first op whose result differs by more than its tolerance.
        """
        if not result.is_floating_point():
            return
        own = distance(result, exact) if exact is not None else 0.0
        rounding = min(own, torch.finfo(result.dtype).eps / 2)
        inputs = max((self._explained.get(a.tensor) or 0.0 for a in call.given), default=0.0)
        turned = (
            min(_turned(result, self.shadows.of(result)), _GROWTH * inputs)
            if call.traits.base in _KINKS
            else 0.0
        )
        explained = math.hypot(rounding, inputs, math.sqrt(min(turned, _GROWTH * inputs)))
        self._explained.set(result, explained)
        if self.origin or self.tracker.in_step:
            return
        apart, allowed = distance(result, self.shadows.of(result)), self._allowed(explained)
        if apart > allowed and result.numel() > 1:
            rows = [
                ("module", call.site.module or "no module"),
                ("line", str(call.site.place or "unknown")),
                ("difference", f"{apart:.2g}, relative; rounding explains {allowed:.2g}"),
            ]
            self.origin = laid_out(f"first in {call.traits.name}", rows)

    def _allowed(self, explained: float) -> float:
        return _GROWTH * max(explained, torch.finfo(torch.float32).eps)

    def judge(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Compare tensors with those of the wide-dtype run, as if all tensors were one long vector.

        If the relative difference exceeds the tolerance, it is recorded in ``apart``.
        """
        error = size = explained = 0.0
        for tensor in tensors:
            shadow = in_widest_float(self.shadows.of(tensor))
            size += float(shadow.square().sum())
            error += float((in_widest_float(tensor) - shadow).square().sum())
            explained = max(explained, self._explained.get(tensor) or 0.0)
        self.largest = max(self.largest, explained)
        self._compare(what, math.sqrt(error), math.sqrt(size), explained)

    def _compare(self, what: str, error: float, size: float, explained: float) -> None:
        apart, allowed = error / size if size else float(error > 0), self._allowed(explained)
        if not apart <= allowed:
            self.apart.append(f"{what}: relative difference {apart:.2g}; rounding explains {allowed:.2g}")

    def step_begins(self, optimizer: Optimizer) -> None:
        """Compare the gradients with the wide run. Keep copies of the weights of both runs."""
        with unwatched():
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.judge(f"gradients of step {self.tracker.steps + 1}", [p.grad for p in params])
            self._before = [(p, p.detach().clone(), self.shadows.of(p).clone()) for p in params]

    def step_ended(self, _: Optimizer) -> None:
        """Measure how much of the update was lost to rounding in the weights' dtypes."""
        lost = wanted = 0.0
        with unwatched():
            for param, before, shadow in self._before:
                update = in_widest_float(self.shadows.of(param)) - in_widest_float(shadow)
                wanted += float(update.square().sum())
                if is_low_precision(param.dtype):
                    lost += float((in_widest_float(param) - in_widest_float(before) - update).square().sum())
        self._compare(
            f"updates of step {self.tracker.steps + 1}", math.sqrt(lost), math.sqrt(wanted), self.largest
        )
        self._before = []


def assert_trains_like(
    step: Callable[..., Any],
    *,
    reference: Literal["fp32", "fp64"] = "fp32",
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
    steps: int = 3,
    device: str = "cpu",
) -> None:
    """Fail if losses, gradients or updates differ from the reference by more than rounding can explain.

    Each op runs twice, once in the program's dtypes, and once in the reference dtype with the inputs of the
    reference run. No tolerance has to be set. The tolerance is three times the measured rounding of the ops
    that lead to a result. The rounding errors of consecutive ops are combined as the root of the sum of their
    squares.

    Args:
        step: a function that performs one training step, with forward, backward and optimizer step. If
            ``step`` returns a tensor, it is the loss. If ``precision`` is given, ``step`` receives an
            autocast region, and must run its forward pass inside ``with region:``.
        reference: the dtype of the reference run.
        precision: the dtype of the autocast region. By default, ``step`` opens its own autocast region.
        steps: the number of steps to run.
        device: the device type of the autocast region.

    Raises:
        AssertionError: a difference is too large. The error message gives the name, module and line
            of the first op that differs.
        ValueError: an option is unknown.

    Example:
        >>> import torch
        >>> from amp_plugin import assert_trains_like
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(region):
        ...     optimizer.zero_grad()
        ...     with region:
        ...         loss = model(torch.ones(3, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> assert_trains_like(step, precision="bf16")
    """
    _check("reference", reference, _REFERENCES)
    if precision is not None:
        _check("precision", precision, _PRECISIONS)
    if steps < 1:
        msg = f"assert_trains_like(steps={steps}): give at least 1"
        raise ValueError(msg)
    run = _Trained(_REFERENCES[reference])
    with run:
        for number in range(steps):
            loss = step(*_regions(precision, device))
            if isinstance(loss, Tensor) and loss.is_floating_point():
                with unwatched():
                    run.judge(f"loss of step {number + 1}", [loss.detach()])
    if run.apart:
        where = [run.origin] if run.origin else []
        text = "\n".join([f"this does not train like {reference}", *run.apart[:5], *where])
        raise AssertionError(text)


def _check(name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        msg = f"assert_trains_like({name}={value!r}): give {' or '.join(map(repr, allowed))}"
        raise ValueError(msg)


def _regions(precision: str | None, device: str) -> list[torch.autocast]:
    if precision is None:
        return []
    return [torch.autocast(device, _PRECISIONS[precision], enabled=precision != "fp32")]


def assert_same_numerics(run: Callable[[], Any], golden: str | Path, *, steps: int = 10) -> None:
    """Fail if a program's results differ from its golden file by more than rounding can explain.

    The result of each op is compared with the recorded result. The tolerance is the rounding error of the
    result's dtype, plus the difference between the op's inputs in the two runs. Therefore a golden file that
    one machine has recorded is valid on other machines and torch releases too. ``pytest --amp-record`` writes
    the file.

    Args:
        run: a function that sets the random seed, creates a model, and trains it.
        golden: the path of the golden file.
        steps: the number of optimizer steps to record.

    Raises:
        AssertionError: a result differs too much. The error message gives the name, module and line of
            the first op whose result differs too much.
        FileNotFoundError: the golden file does not exist, and ``--amp-record`` was not given.
        ValueError: the file is not a recording.

    Example:
        >>> import torch, tempfile
        >>> from amp_plugin import assert_same_numerics
        >>> assert_same_numerics.__name__
        'assert_same_numerics'
    """
    file = Path(golden)
    if os.environ.get("AMP_PLUGIN_RECORD") == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        with RunRecorder(file, steps=steps):
            run()
        return
    if not file.exists():
        msg = f"{file} does not exist; record it with: pytest --amp-record"
        raise FileNotFoundError(msg)
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now.amp"
        with RunRecorder(now, steps=steps):
            run()
        comparison = compare_runs(file, now)
    if comparison.unexplained is not None:
        msg = f"the results differ from those recorded in {file}\n{comparison.report()}"
        raise AssertionError(msg)
