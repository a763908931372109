"""Closures under the guard: the gradients are looked at whenever a call of the closure returns.

If they are not finite, the step is left from inside the closure. torch's optimizers have changed nothing by
then, LBFGS apart; what another one has changed is put back from a copy. Whether it needs one, its
first step shows: an optimizer that calls its closure once, before it changes a weight, is copied only then.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from amp_plugin.scaling.closures import Closure, Snapshot, uses_gradients_before_closure
from amp_plugin.scaling.guard import Check, Guard, given_found_inf, skips_by_itself
from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.memory_order import match_memory_order
from amp_plugin.scaling.optimizer_window import OptimizerWindow


class _NonfiniteError(Exception):
    """Leaves ``optimizer.step`` from inside its closure."""


def step(
    guard: Guard,
    window: OptimizerWindow,
    optimizer: Optimizer,
    closure: Closure,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Step an optimizer with a closure.

    Returns:
        What ``optimizer.step`` returns; the loss of the last call if the step was given up.

    Raises:
        RuntimeError: It was given up, and what it had changed by then cannot be put back.
    """
    with ExitStack() as flags:
        calls = _GuardedCalls(guard, window, optimizer, closure, flags)
        saved = Snapshot(optimizer) if calls.may_change_early() else None
        try:
            value = optimizer.step(calls.run, *args, **kwargs)
        except _NonfiniteError:
            value = calls.loss
            if saved is not None:
                saved.restore()
            elif calls.changed_early:
                raise RuntimeError(_not_put_back_text(optimizer)) from None
        finally:
            calls.remember_changes()
    guard.close(window, calls.check, skipped=calls.skipped)
    return value


class _GuardedCalls:
    """The calls of one step's closure, and what was found in their gradients.

    Attributes:
        check: That of the last call.
        skipped: Whether the step is given up; None if only the device knows.
        changed_early: Whether the optimizer has changed a weight before a call.
        loss: What the last call returned.
    """

    def __init__(
        self, guard: Guard, window: OptimizerWindow, optimizer: Optimizer, closure: Closure, flags: ExitStack
    ) -> None:
        self._guard, self._window, self._optimizer = guard, window, optimizer
        self._closure, self._flags = closure, flags
        self._foreign = uses_gradients_before_closure(optimizer)
        self._versions = self._versions_now()
        self._called = False
        self.check = Check()
        self.skipped: bool | None = False
        self.changed_early = False
        self.loss: Any = None

    def may_change_early(self) -> bool:
        """Whether the optimizer may change anything before the last call of its closure."""
        known = self._window.unscaled.changes_early
        return isinstance(self._optimizer, LBFGS) or (self._foreign and known is not False)

    def remember_changes(self) -> None:
        """Note for the next step what this one has shown."""
        if self._called:
            self._window.unscaled.changes_early = bool(
                self._window.unscaled.changes_early or self.changed_early
            )

    def run(self) -> Any:
        """Run the closure, and leave the step if its gradients are not finite."""
        self.changed_early |= self._called or self._versions != self._versions_now()
        self._called = True
        with torch.enable_grad():
            self.loss = self._closure()
        with torch.no_grad():
            self._look()
        match_memory_order(self._optimizer)
        return self.loss

    def _look(self) -> None:
        self.check = self._guard.check(self._window)
        found = self.check.found
        self.skipped = False
        if found is None or capturing(found.device):
            return
        if not self._foreign and skips_by_itself(self._optimizer, found):
            self.skipped = None
            self._flags.enter_context(given_found_inf(self._optimizer, found))
        elif found.item() > 0:
            self.skipped = True
            raise _NonfiniteError

    def _versions_now(self) -> list[int]:
        return [param._version for param in self._window.params] if self._foreign else []


def _not_put_back_text(optimizer: Optimizer) -> str:
    kind = type(optimizer).__name__
    return (
        f"{kind}: a closure's gradients are not finite after the step has changed weights. Earlier steps did "
        "not do that before their last call of the closure, so no copy was kept to put them back. Load the "
        f"last checkpoint; a {kind} made anew keeps copies if its first step is such a one."
    )
