"""Errors of the scaler in the words of an Accelerate program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from amp_plugin.scaling.grad_scaler import GradScaler


def refuse_before_backward(scaler: GradScaler, call: str) -> None:
    """Raise if no loss has been scaled yet: gradients, if any, came from a loss that was not.

    Args:
        scaler: the accelerator's; a disabled one never refuses.
        call: what the program has called.

    Raises:
        RuntimeError: ``accelerator.backward`` has not been called.
    """
    if scaler.is_enabled() and not scaler.has_scaled:
        msg = (
            f"{call} before any accelerator.backward(loss): fp16 needs its scaled loss; "
            "write accelerator.backward(loss) instead of loss.backward()"
        )
        raise RuntimeError(msg)


@contextmanager
def naming_unprepared(scaler: GradScaler, params: Sequence[Tensor], call: str) -> Iterator[None]:
    """Let the scaler's error about parameters of no optimizer it knows say what to do in Accelerate.

    Args:
        scaler: the accelerator's.
        params: what the program has given.
        call: what it has called.

    Raises:
        RuntimeError: parameters with gradients belong to no optimizer that was prepared.
    """
    try:
        yield
    except RuntimeError:
        groups = [group for optimizer in scaler.optimizers for group in optimizer.param_groups]
        known = {id(param) for group in groups for param in group["params"]}
        foreign = sum(param.grad is not None and id(param) not in known for param in params)
        if not foreign:
            raise
        msg = (
            f"{call}: {foreign} of the {len(params)} parameters belong to no prepared optimizer, so that in "
            "fp16 the scale of their gradients is unknown; call optimizer = accelerator.prepare(optimizer) "
            "for the one that steps them, or clip the parameters of prepared optimizers only"
        )
        raise RuntimeError(msg) from None
