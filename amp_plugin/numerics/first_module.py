"""Which module made the first number that is not finite, in the steps after a skipped one.

::

    a step is skipped:          hooks on modules are placed, for some steps
    a module is called:         the largest magnitudes of its inputs and outputs, on the device; no sync
    a gradient reaches it:      the largest magnitude of its outputs' gradients, likewise
    the next step is skipped:   the host reads these numbers, in the order in which they were made
    a step is taken:            they are dropped

A largest magnitude is nan or inf exactly where an element is not finite.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from amp_plugin.kernels.tracers import untraced
from amp_plugin.messages import only_warning
from amp_plugin.numerics.module_hooks import ModuleHooks
from amp_plugin.numerics.values import unwatched
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.overflows import FirstModules
from amp_plugin.scaling.step_log import StepLog, StepResult

STEPS_AFTER_SKIP: Final = 8  # with hooks, after each skipped one
STEPS_IN_ALL: Final = 64  # with hooks, of one run
_MOST_NUMBERS: Final = 50_000  # of one step; what is wrong first is wanted
_MOST_TENSORS: Final = 8  # of one call
_DTYPES: Final = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_PLAIN: Final = {Tensor, nn.Parameter}


Largest = tuple[str, str, Tensor]
"""A module, ``"input"``, ``"output"`` or ``"gradient"``, and the largest magnitude: 0-dim, on the device."""


class ModuleWatch:
    """Name the module at which a step went wrong, by hooks that are on for some steps after a skipped one."""

    path = None  # of a page

    def __init__(self, log: StepLog, models: Sequence[nn.Module]) -> None:
        self._log = log
        self._hooks = ModuleHooks(models, self._measure)
        self._numbers: list[Largest] = []
        self._measured: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # tensors, with their versions
        self._left, self._budget = 0, STEPS_IN_ALL  # steps with hooks: until the next skip, and in this run
        self._open = ExitStack()

    def open(self) -> None:
        """Wait for the first skipped step."""
        self._log.subscribe(self._look, first=True)

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Watch these models from now on."""
        self._rest()
        self._hooks = ModuleHooks(models, self._measure)

    def __enter__(self) -> Self:
        """Wait for the first skipped step, until the block ends."""
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Remove everything."""
        self._log.unsubscribe(self._look)
        self._rest()

    def _rest(self) -> None:
        """Remove the hooks until the next skipped step."""
        self._left = 0
        self._open.close()
        self._forget()

    def _look(self, step: StepResult) -> None:
        """Name the module of a skipped step, and be there for the next one."""
        with only_warning("the watch of modules", self.close):
            was_on = self._left > 0
            self._budget -= was_on
            if step.skipped:
                if was_on:
                    step.add_modules(self._found())
                self._left = min(STEPS_AFTER_SKIP, self._budget)
            elif was_on:
                self._left -= 1
            self._forget()
            if self._left > 0 and not was_on:
                self._begin()
            elif self._left <= 0 and was_on:
                self._rest()

    def _forget(self) -> None:
        self._numbers.clear()
        self._measured.clear()

    def _begin(self) -> None:
        # Each step is read before the next one begins, so that these numbers are those of the step.
        self._open.enter_context(self._log.watched())
        self._hooks.open()
        self._open.callback(self._hooks.close)

    # -- on the device -----------------------------------------------------------------------

    def _measure(self, name: str, module: nn.Module, given: Any, made: Any) -> None:
        with only_warning("the watch of modules", self.close):
            if not (module.training or torch.is_grad_enabled()) or _is_traced():
                return
            name = f"{name or '(model)'} ({type(module).__name__})"
            self._add(name, "input", list(filter(self._is_new, _tensors(given))))
            outputs = list(filter(self._is_new, _tensors(made)))
            self._add(name, "output", outputs)
            if torch.is_grad_enabled():
                nodes = {output.grad_fn: output.output_nr for output in outputs if output.grad_fn is not None}
                for node in nodes:  # not the tensors, which are the user's
                    node.register_prehook(partial(self._measure_gradients, name))

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether these numbers were not measured yet: most inputs are another module's output."""
        version = 0 if tensor.is_inference() else tensor._version
        known, known_version = self._measured.get(id(tensor), (None, 0))
        if known is not None and known() is tensor and known_version == version:
            return False
        self._measured[id(tensor)] = weakref.ref(tensor), version
        return True

    @untraced
    def _measure_gradients(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        if self._left > 0:
            with only_warning("the watch of modules", self.close):
                self._add(name, "gradient", _tensors(gradients))

    def _add(self, name: str, what: str, tensors: Sequence[Tensor]) -> None:
        if len(self._numbers) < _MOST_NUMBERS:
            with unwatched():
                for tensor in tensors:
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    if local.numel() and not capturing(local.device):
                        low, high = torch.aminmax(local)  # ten times as fast as a norm on a CPU
                        self._numbers.append((name, what, torch.maximum(high, low.neg())))

    # -- on the host -------------------------------------------------------------------------

    def _found(self) -> FirstModules:
        """Return what the numbers of this step say: a host sync."""
        values = _on_host([number for *_, number in self._numbers])
        places = [(module, what) for module, what, _ in self._numbers]
        seen = [(*place, value) for place, value in zip(places, values, strict=True)]
        forward = [entry for entry in seen if entry[1] != "gradient"]
        backward = [entry for entry in seen if entry[1] == "gradient"]
        return FirstModules(
            forward=_sentence(forward),
            backward=_sentence(backward),
            unseen=tuple(self._hooks.unseen),
            numbers=len(seen),
        )


def _sentence(seen: Sequence[tuple[str, str, float]]) -> str:
    """Return where the first number that is not finite was seen; empty if there was none."""
    place = next((place for place, entry in enumerate(seen) if not math.isfinite(entry[2])), None)
    if place is None:
        return ""
    name, what, value = seen[place]
    largest = max((entry[2] for entry in seen[:place]), default=None)
    before = "" if largest is None else f"; the largest magnitude before it was {largest:.3g}"
    what = "gradient of the output" if what == "gradient" else what
    return f"the {what} of {name} was the first with {value:g}{before}"


def _is_traced() -> bool:
    """Whether a call is traced, transformed by functorch, or checkpoint's second one in the backward pass."""
    in_backward = torch._C._current_graph_task_id() != -1
    return (
        in_backward
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _tensors(values: Any) -> list[Tensor]:
    """Return the first tensors in nested containers whose numbers can be looked at."""
    found = [
        leaf
        for leaf in tree_leaves(values)
        if (type(leaf) in _PLAIN or isinstance(leaf, DTensor))
        and leaf.dtype in _DTYPES
        and leaf.layout is torch.strided
        and leaf.device.type != "meta"
    ]
    return found[:_MOST_TENSORS]


def _on_host(numbers: Sequence[Tensor]) -> list[float]:
    """Return numbers of several devices and dtypes, one copy for each."""
    values = [0.0] * len(numbers)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, number in enumerate(numbers):
        kinds.setdefault((number.device, number.dtype), []).append(place)
    with unwatched():
        for places in kinds.values():
            found = torch.stack([numbers[place] for place in places]).tolist()
            for place, value in zip(places, found, strict=True):
                values[place] = value
    return values
