"""Find the module that produced the first nan or inf in a skipped step.

::

    after a skipped step, register hooks on all modules for the next 8 steps

    in a forward hook, compute the largest magnitude of each input and output, on the device

    in a backward hook, compute the largest magnitude of the output gradients, on the device

    if a step with hooks is skipped, copy the magnitudes to the CPU, in the order of computation

    at the first call to a module after an optimizer step, discard the magnitudes recorded before the step

The largest magnitude of a tensor is nan or inf if and only if an element is not finite. Nothing is copied
from the device to the CPU until a step is skipped.
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

STEPS_AFTER_SKIP: Final = 8  # the module hooks stay active for this many steps after a skipped step
STEPS_IN_ALL: Final = 64  # in one run, the module hooks are active for at most this many steps
_MOST_NUMBERS: Final = 50_000  # at most this many magnitudes are stored per step
_MOST_TENSORS: Final = 8  # at most this many tensors are measured per call to a module
_DTYPES: Final = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_PLAIN: Final = {Tensor, nn.Parameter}


Largest = tuple[str, str, Tensor]
"""A module's name, the word ``"input"``, ``"output"`` or ``"gradient"``, and the largest magnitude."""


class ModuleWatch:
    """Finds the module that produced the first nan or inf in a skipped step.

    The hooks on the modules are active only for a few steps after a skipped step.
    """

    path = None  # this object writes no page

    def __init__(self, log: StepLog, models: Sequence[nn.Module]) -> None:
        self._log = log
        self._hooks = ModuleHooks(models, self._measure)
        self._numbers: list[Largest] = []
        # Maps the id of each measured tensor to (weak reference to the tensor, version counter).
        self._measured: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # The ids of all optimizers that have stepped since the last measurement.
        self._stepped: set[int] = set()
        self._just_begun = False  # whether the hooks were added after this iteration's backward pass
        # _left: for how many more steps the hooks stay active if no further step is skipped.
        # _budget: for how many more steps of this run the hooks may be active.
        self._left, self._budget = 0, STEPS_IN_ALL
        self._open = ExitStack()

    def open(self) -> None:
        """Subscribe to the step log, to notice the first skipped step."""
        self._log.subscribe(self._look, first=True)

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Stop watching the current models, and watch these models from now on."""
        self._rest()
        self._hooks = ModuleHooks(models, self._measure)

    def __enter__(self) -> Self:
        """Call ``open``."""
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Remove all hooks, and stop watching."""
        self._log.unsubscribe(self._look)
        self._rest()

    def _rest(self) -> None:
        """Remove the hooks until the next skipped step."""
        self._left = 0
        self._open.close()
        self._forget()

    def _look(self, step: StepResult) -> None:
        """Look at a finished step.

        If the step was skipped, name the module that produced the first nan or inf, and keep the hooks.
        """
        with only_warning("the watch of modules", self.close):
            was_on = self._left > 0
            optimizer = id(step.optimizer())
            if optimizer in self._stepped:  # no module has run since this optimizer's last step
                self._forget()
            self._stepped.add(optimizer)
            self._budget -= was_on
            if step.skipped:
                if was_on and not self._just_begun:
                    step.add_modules(self._found())
                self._left = min(STEPS_AFTER_SKIP, self._budget)
            elif was_on:
                self._left -= 1
            if self._left > 0 and not was_on:
                self._begin()
            elif self._left <= 0 and was_on:
                self._rest()

    def _forget(self) -> None:
        """Discard the measurements of an iteration that has ended."""
        self._numbers.clear()
        self._measured.clear()
        self._stepped.clear()
        self._just_begun = False

    def _begin(self) -> None:
        self._just_begun = True
        # Inside this context, the step log finds out right after each step whether the step was skipped.
        # Therefore, the magnitudes that the hooks have collected belong to the step that has just ended.
        self._open.enter_context(self._log.watched())
        self._hooks.open()
        self._open.callback(self._hooks.close)

    # -- on the device ---------------------

    def _measure(self, name: str, module: nn.Module, given: Any, made: Any) -> None:
        with only_warning("the watch of modules", self.close):
            if not (module.training or torch.is_grad_enabled()) or _is_traced():
                return
            if self._stepped:
                self._forget()
            name = f"{name or '(model)'} ({type(module).__name__})"
            self._add(name, "input", list(filter(self._is_new, _tensors(given))))
            outputs = list(filter(self._is_new, _tensors(made)))
            self._add(name, "output", outputs)
            if torch.is_grad_enabled():
                nodes = {output.grad_fn: output.output_nr for output in outputs if output.grad_fn is not None}
                for node in nodes:  # a hook on the tensor itself would be visible to the user's code
                    node.register_prehook(partial(self._measure_gradients, name))

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether a tensor has not been measured yet.

        Most inputs of a module have already been measured as the output of another module.
        """
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
                        low, high = torch.aminmax(local)  # on a CPU ten times as fast as a norm
                        self._numbers.append((name, what, torch.maximum(high, low.neg())))

    # -- on the CPU ------------------------

    def _found(self) -> FirstModules:
        """Read the largest magnitudes of this step's tensors, and say where the first nan or inf appeared.

        The CPU waits for the device once.
        """
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
    """Return a sentence that says where the first nan or inf appeared, or ``""`` if there was none."""
    place = next((place for place, entry in enumerate(seen) if not math.isfinite(entry[2])), None)
    if place is None:
        return ""
    name, what, value = seen[place]
    largest = max((entry[2] for entry in seen[:place]), default=None)
    before = "" if largest is None else f"; the largest magnitude before it was {largest:.3g}"
    what = "gradient of the output" if what == "gradient" else what
    return f"the {what} of {name} was the first with {value:g}{before}"


def _is_traced() -> bool:
    """Return whether a module runs in a trace, a functorch transform or a checkpointing recomputation."""
    in_backward = torch._C._current_graph_task_id() != -1
    return (
        in_backward
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _tensors(values: Any) -> list[Tensor]:
    """Return up to 8 tensors from nested containers, leaving out tensors whose values cannot be read."""
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
    """Copy 0-dim tensors to the CPU, with one copy for each device and dtype."""
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
