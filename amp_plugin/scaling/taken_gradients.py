"""Gradients that hooks take away during a scaled backward, as optimizers offloaded to the CPU do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class TakenGradients:
    """Tells gradients that hooks have taken away from those that no backward has made.

    Only parameters that have such hooks are watched.

    Args:
        params: The parameters.
        ledger: That of their gradients, which knows the parameters with hooks.

    Attributes:
        seen: Parameters that a scaled backward has reached, and that had no gradient at its end.
    """

    def __init__(self, params: list[Tensor], ledger: Any) -> None:
        self._params = params
        self._ledger = ledger
        self._hooks: list[RemovableHandle] = []
        self.seen: list[Tensor] = []

    def watch(self) -> None:
        """Learn which of the parameters the coming backward passes reach."""
        self.unwatch()
        for param in self._with_taking_hooks():
            note = partial(_note_reached, self.seen, param)
            self._hooks.append(param.register_hook(note))  # type: ignore[no-untyped-call]

    def unwatch(self) -> None:
        """Remove what :meth:`watch` has put on the parameters."""
        while self._hooks:
            self._hooks.pop().remove()

    def assume_reached(self) -> None:
        """Assume that a backward before the optimizer was met has reached all of them."""
        self.seen += [param for param in self._with_taking_hooks() if param.grad is None]

    def split(self, params: list[Tensor], ledger: Any) -> TakenGradients:
        """Return what is known of some of the parameters, which their own set watches from now on."""
        self.unwatch()
        part = TakenGradients(params, ledger)
        part.seen = [param for param in self.seen if any(param is own for own in params)]
        return part

    def _with_taking_hooks(self) -> Iterator[Tensor]:
        for position in self._ledger.hooked(self._params):
            param = self._params[position]
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            keep = all(getattr(hook, "keeps_gradients", False) for hook in hooks.values())
            if param.requires_grad and not keep:
                yield param


def _note_reached(seen: list[Tensor], param: Tensor, _: Tensor) -> None:
    """At the end of the backward that has reached it, note a parameter that has no gradient then."""

    def look() -> None:
        if param.grad is None:
            seen.append(param)

    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(look)
