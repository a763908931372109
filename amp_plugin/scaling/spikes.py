"""Spikes are steps whose gradient norm or loss is far above its running mean.

::

    hear(loss)        Record a loss whose backward pass is about to begin.
    judge(step)       Decide with one op on the device whether the step is a spike, and update the mean.
    raise_for_spike   Raise SpikeError, once the host knows that the step was a spike.

The running mean and deviation of norms or losses are tensors on the device. Therefore a spike needs no host
sync, whether the step is skipped or its gradients are clipped.
:func:`amp_plugin.kernels.reference.judge_step_` defines the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.kernels import ops
from amp_plugin.options import Spike
from amp_plugin.scaling.loss_scale import moved
from amp_plugin.scaling.step_log import StepResult, reference_to

# A norm below this multiple of the mean is not a spike, because such norms are common in some recipes.
_LEAST_FACTOR = 4.0
# The lower limit for the standard deviation of losses, as a fraction of their mean.
# Without the limit, small changes of a nearly constant loss would count as spikes.
_LEAST_LOSS_DEVIATION = 0.01

_KEY = "spikes"

_NO_LOSS = (
    "on_spike=Spike(of='loss'): no loss was seen before this step. Call {backward}, outside of compiled "
    "code, or use of='norm'."
)


class SpikeError(RuntimeError):
    """Raised if a step is a spike and ``on_spike`` has ``action="raise"``. The step changes no weights.

    A trainer can load its last checkpoint, skip some batches, and continue. The next step is judged again.

    Attributes:
        kind: The type of the optimizer.
        of: ``"norm"`` or ``"loss"``.
        value: The norm or loss of the step.
        limit: The largest norm or loss that would not have been a spike.

    Example:
        >>> from amp_plugin import SpikeError
        >>> error = SpikeError("AdamW", "norm", 31.2, 4.5)
        >>> str(error).partition(".")[0], error.limit
        ('AdamW: the norm of this step is 31', 4.5)
    """

    def __init__(self, kind: str, of: str, value: float, limit: float) -> None:
        super().__init__(kind, of, value, limit)  # pickled by them
        self.kind, self.of, self.value, self.limit = kind, of, value, limit

    def __str__(self) -> str:
        return (
            f"{self.kind}: the {self.of} of this step is {self.value:g}, a spike: up to {self.limit:g} is "
            "ordinary. The step was not taken. Load an earlier checkpoint, or leave the batch out and go on. "
            "on_spike='skip' leaves it out by itself."
        )


class Spikes:
    """Judges steps by the rule of ``on_spike=``, and keeps the statistics of each optimizer.

    The statistics of an optimizer are a tensor (float32 ``[4]``, on the optimizer's device). The tensor
    contains the mean, the variance, the number of steps, and 1 if the error of an earlier spike has yet to be
    raised.

    Args:
        rule: What counts as a spike. With None no step is judged.
    """

    def __init__(self, rule: Spike | None) -> None:
        self._rule = rule
        # References to optimizers with their statistics, in the order of their first steps.
        self._known: list[tuple[Callable[[], Any], Tensor]] = []
        # Statistics from a loaded state dict. At its first step, an optimizer takes the next entry.
        self._saved: list[list[float]] = []
        self._losses: list[Tensor] = []
        self._has_stepped = False  # True if an optimizer has stepped since the last loss

    def hear(self, loss: Any) -> None:
        """Note a loss before its backward pass. All losses since the last step are added up."""
        if self._rule is None or self._rule.of != "loss":
            return
        if self._has_stepped:
            self._losses, self._has_stepped = [], False
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().float().reshape(()))

    def judge(
        self,
        optimizer: Optimizer,
        norms: tuple[Tensor, Tensor],
        found_inf: Tensor,
        trackers: Sequence[Tensor],
        backward: str,
    ) -> Tensor | None:
        """Decide whether a step is a spike, with one kernel launch and without a host sync.

        With ``of="loss"`` on several ranks, one collective adds up the losses.

        Args:
            optimizer: The optimizer that steps.
            norms: The norm of the gradients before clipping, and their current norm (both float32, 0-dim).
            found_inf: 1.0 if a gradient is not finite (float32, 0-dim).
            trackers: The growth trackers of the loss scales by which the losses were multiplied.
            backward: The call that runs a backward pass in the user's framework. An error message quotes this
                call.

        Returns:
            The result of ``judge_step_``; None without ``on_spike``.

        Raises:
            RuntimeError: ``of="loss"`` is set, but there was no loss before this step.
        """
        rule, (before, now) = self._rule, norms
        if rule is None:
            return None
        self._has_stepped = True
        device = found_inf.device
        values = [before] if rule.of == "norm" else self._values(device, backward)
        least = _LEAST_LOSS_DEVIATION if rule.of == "loss" else (_LEAST_FACTOR - 1) / rule.sigma
        judged: Tensor = torch.ops.amp_plugin.judge_step_(
            [moved(value, device) for value in values],
            now,
            found_inf,
            self._statistics_of(optimizer, device),
            [tracker for tracker in trackers if tracker.device == device],
            rule.sigma,
            rule.window,
            rule.warmup,
            least,
            ops.SPIKE_ACTIONS[rule.action],
        )
        return judged

    @property
    def clips(self) -> bool:
        """Whether the gradients of a step that is a spike are clipped (``action="clip"``)."""
        return self._rule is not None and self._rule.action == "clip"

    def _values(self, device: torch.device, backward: str) -> list[Tensor]:
        """Return losses that add up to the loss of the step. All ranks get the same sum."""
        if not self._losses:
            raise RuntimeError(_NO_LOSS.format(backward=backward))
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return self._losses
        losses = torch.stack([moved(loss, device) for loss in self._losses])
        total = losses.sum() / distributed.get_world_size()
        distributed.all_reduce(total)
        return [total]

    def _statistics_of(self, optimizer: Optimizer, device: torch.device) -> Tensor:
        """Return the statistics of an optimizer on a device."""
        for place, (known, numbers) in enumerate(self._known):
            if known() is optimizer:
                self._known[place] = known, numbers.to(device)
                return self._known[place][1]
        saved = self._saved.pop(0) if self._saved else [0.0] * 4
        numbers = torch.tensor(saved, dtype=torch.float32, device=device)
        self._known.append((reference_to(optimizer), numbers))
        return numbers

    def raise_for_spike(self, before: Callable[[], object], step: StepResult) -> None:
        """Raise SpikeError if the step was a spike and ``action`` is ``"raise"``.

        After the error, the optimizers can step again.

        Args:
            before: A function to call before the error is raised, so that the optimizer may step again.
            step: The result of the step.
        """
        rule, judged = self._rule, step.judged
        if rule is not None and judged is not None and rule.action == "raise" and step.verdict == "spike":
            for _, numbers in self._known:
                numbers[3].zero_()
            before()
            raise SpikeError(step.kind, rule.of, judged[3].item(), judged[4].item())

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of each optimizer; empty without ``on_spike``.

        The host waits for the device.
        """
        known = [[*numbers[:3].tolist(), 0.0] for known, numbers in self._known if known() is not None]
        return {} if self._rule is None else {_KEY: known + self._saved}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load saved statistics, which go to the optimizers in the order of their first steps."""
        if self._rule is not None and _KEY in saved:
            self._known, self._saved = [], [[float(number) for number in numbers] for numbers in saved[_KEY]]

    def __reduce__(self) -> Any:
        """Copy and pickle the rule and the statistics as plain numbers, without optimizers."""
        return Spikes, (self._rule,), self.state_dict()

    __setstate__ = load_state_dict
