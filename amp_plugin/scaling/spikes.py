"""Spikes: steps whose gradient norm or loss is far above its running mean.

::

    hear(loss)        a backward pass is about to begin from it
    judge(step)       one op on the device: is it a spike? what does the running mean learn from it?
    raise_for_spike   once the host knows

Mean and deviation stay on the device, and so does the verdict: a step that is skipped or clipped for a spike
waits for nobody. The rule is that of :func:`amp_plugin.kernels.reference.judge_step_`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.kernels import ops
from amp_plugin.options import Spike
from amp_plugin.scaling.loss_scale import moved
from amp_plugin.scaling.step_log import StepResult, reference_to

_LEAST_FACTOR = 4.0  # of the mean: norms below are ordinary in some of our recipes, whatever their deviation
_LEAST_LOSS_DEVIATION = 0.01  # of the mean: a loss that hardly changes has a deviation of nearly 0

_NO_LOSS = (
    "on_spike=Spike(of='loss'): no loss was seen before this step. Call {backward}, outside of compiled "
    "code, or use of='norm'."
)


class SpikeError(RuntimeError):
    """A step was a spike, and ``on_spike`` has ``action="raise"``. The weights are those before that step.

    A trainer can load its last checkpoint, skip some batches, and go on: the next step is judged again.

    Attributes:
        kind: The type of the optimizer.
        of: ``"norm"`` or ``"loss"``.
        value: The norm or loss of the step.
        limit: The largest value that would not have been a spike.

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


class Verdict(NamedTuple):
    """What a step is to do.

    Attributes:
        norm: The norm of the gradients times ``factor``, float32, 0-dim.
        found_inf: 1.0 if it is to be skipped, float32, 0-dim.
        factor: What the gradients are multiplied by, float32, 0-dim; None for 1.
        judged: All that ``judge_step_`` returns; None if nobody looks for spikes.
    """

    norm: Tensor
    found_inf: Tensor
    factor: Tensor | None = None
    judged: Tensor | None = None


class _Statistics(NamedTuple):
    """Mean, variance, steps and held of an optimizer's values, float32 ``[4]``, on its device."""

    optimizer: Callable[[], Any]
    numbers: Tensor


class Spikes:
    """What is known of the values of a scaler's optimizers.

    Args:
        rule: What counts as a spike; None: nothing does, and steps are not judged.
    """

    def __init__(self, rule: Spike | None) -> None:
        self._rule = rule
        self._known: list[_Statistics] = []  # in the order in which the optimizers stepped first
        self._saved: list[list[float]] = []  # of optimizers that have yet to step, in that order
        self._losses: list[Tensor] = []
        self._has_stepped = False  # since the last loss

    def hear(self, loss: Any) -> None:
        """Take a loss that a backward pass begins from; those before the next step are added up."""
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
    ) -> Verdict:
        """Judge a step: one launch, no host sync; ``of="loss"`` on several ranks takes a collective more.

        Args:
            optimizer: Whose step it is.
            norms: The norm before any clip, and as it is now, float32, 0-dim.
            found_inf: 1.0 if a gradient is not finite, float32, 0-dim.
            trackers: The growth trackers of the loss scales that its gradients came with.
            backward: How the user calls backward, for an error.

        Raises:
            RuntimeError: No loss was heard.
        """
        rule, (before, now) = self._rule, norms
        if rule is None:
            return Verdict(now, found_inf)
        self._has_stepped = True
        device = found_inf.device
        values = [before] if rule.of == "norm" else self._values(device, backward)
        least = _LEAST_LOSS_DEVIATION if rule.of == "loss" else (_LEAST_FACTOR - 1) / rule.sigma
        judged = torch.ops.amp_plugin.judge_step_(
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
        is_clip = rule.action == "clip"
        return Verdict(judged[5] if is_clip else now, judged[0], judged[1] if is_clip else None, judged)

    def _values(self, device: torch.device, backward: str) -> list[Tensor]:
        """Return what adds up to the loss of the step, the same on all ranks."""
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
        for place, known in enumerate(self._known):
            if known.optimizer() is optimizer:
                if known.numbers.device != device:
                    self._known[place] = known._replace(numbers=known.numbers.to(device))
                return self._known[place].numbers
        saved = self._saved.pop(0) if self._saved else [0.0] * 4
        numbers = torch.tensor(saved, dtype=torch.float32, device=device)
        self._known.append(_Statistics(reference_to(optimizer), numbers))
        return numbers

    def release(self) -> None:
        """Let steps be taken again after a spike that was raised."""
        for known in self._known:
            known.numbers[3].zero_()

    def raise_for_spike(self, before: Callable[[], object], step: StepResult) -> None:
        """Raise SpikeError if a step was a spike that is to raise; for the log of steps.

        Args:
            before: Called before it raises, so that the next step is not taken for a second one.
            step: The step.
        """
        rule, judged = self._rule, step.judged
        if rule is not None and judged is not None and rule.action == "raise" and step.verdict == "spike":
            self.release()
            before()
            raise SpikeError(step.kind, rule.of, judged[3].item(), judged[4].item())

    def state_dict(self) -> list[list[float]]:
        """Return mean, variance and steps of each optimizer: a host sync."""
        gone = [known for known in self._known if known.optimizer() is None]
        self._known = [known for known in self._known if known not in gone]
        return [[*known.numbers[:3].tolist(), 0.0] for known in self._known] + self._saved

    def load_state_dict(self, saved: Sequence[Sequence[float]]) -> None:
        """Take over what was saved, optimizer by optimizer in the order in which they stepped first."""
        self._known, self._saved = [], [[float(number) for number in numbers] for numbers in saved]

    def __getstate__(self) -> dict[str, Any]:
        """Keep numbers, without optimizers and their device."""
        return {"_rule": self._rule, "_saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_rule"])  # type: ignore[misc]
        self._saved = state["_saved"]
