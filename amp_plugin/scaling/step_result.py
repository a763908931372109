"""The result of one optimizer step, read without a host sync until asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from amp_plugin.scaling.loss_scale import capturing
from amp_plugin.scaling.overflows import OverflowReport

_NOTHING_TO_DO = "nothing was to be unscaled, clipped or checked"


class HostFlag:
    """A device flag (one element; above 0 means set) on its way to the host.

    On CUDA and XPU it is copied to pinned memory behind the work already queued; on the CPU it is read at
    once, on other devices when somebody waits for it.
    """

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag
        self._copy = flag
        self._arrived: torch.Event | None = None
        self.lasting = not capturing(flag.device)  # else a CUDA graph writes it at each replay
        if flag.device.type in {"cuda", "xpu"} and self.lasting:
            self._copy = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(flag.reshape(()), non_blocking=True)
            self._arrived = torch.Event(flag.device)
            self._arrived.record(torch.accelerator.current_stream(flag.device))  # else of the current device

    @staticmethod
    def at_once(flag: Tensor) -> bool | None:
        """Return a flag that the host can read without waiting, on the CPU; None elsewhere."""
        on_host = flag.device.type == "cpu" and not capturing(flag.device)
        return bool(flag.item() > 0) if on_host else None

    def known(self) -> bool | None:
        """Return the flag if the host can know it without waiting, else None."""
        if self._arrived is None:
            return self.at_once(self._flag)
        return bool(self._copy.item() > 0) if self._arrived.query() else None

    def wait(self) -> bool:
        """Return the flag: a host sync if it is not known yet."""
        known = self.known()
        return bool(self._flag.item() > 0) if known is None else known


class StepResult:
    """The result of one ``scaler.step(optimizer)``.

    Owns its tensors: later steps do not change it. That of a step captured in a CUDA graph shows
    the last replay. Every property but :attr:`norm` and :attr:`found_inf` waits for the device when
    first read.

    Attributes:
        norm: Norm of the unscaled gradients before clipping, float32, 0-dim; None if the optimizer
            had no gradients, or nothing was measured because the scaler is disabled.
        found_inf: 1.0 if the step was skipped, else 0.0; float32, 0-dim.
        not_one_pass_because: Why the optimizer's own step ran; empty if it was taken in one pass.
    """

    def __init__(
        self,
        *,
        norm: Tensor | None,
        found_inf: Tensor,
        scale_before: Tensor | None,
        report: Callable[[], OverflowReport],
        scale_after: Sequence[Tensor] = (),
        known: bool | None = None,
        obstacle: str = _NOTHING_TO_DO,
    ) -> None:
        self.norm = norm
        self.not_one_pass_because = obstacle
        self.found_inf = found_inf
        self._scale_before = scale_before
        self._scale_after = scale_after  # filled by the update that follows
        self._report = report
        self._skipped = known
        self._flag = None if known is not None else HostFlag(found_inf)

    @classmethod
    def unscaled(cls, norm: Tensor | None = None, obstacle: str = _NOTHING_TO_DO) -> StepResult:
        """Return the result of a step without a loss scale: taken, with its norm if that was measured."""
        return cls(
            norm=norm,
            found_inf=torch.zeros((), device="cpu"),
            scale_before=None,
            report=OverflowReport,
            known=False,
            obstacle=obstacle,
        )

    @property
    def one_pass(self) -> bool:
        """Whether the step was taken in one pass."""
        return not self.not_one_pass_because

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped."""
        if self._skipped is not None or self._flag is None:
            return bool(self._skipped)
        skipped = self._flag.wait()
        if self._flag.lasting:
            self._skipped = skipped
        return skipped

    def skipped_if_known(self) -> bool | None:
        """Return whether the step was skipped, or None if the host would have to wait to know."""
        if self._skipped is None and self._flag is not None and self._flag.lasting:
            self._skipped = self._flag.known()
        return self._skipped

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients came with a loss scale."""
        return self._scale_before is not None

    @property
    def scale_before(self) -> float:
        """The loss scale the gradients came with."""
        return 1.0 if self._scale_before is None else float(self._scale_before.item())

    @property
    def scale_after(self) -> float:
        """The loss scale after the update that followed; ``scale_before`` until it is applied."""
        return float(self._scale_after[0].item()) if self._scale_after else self.scale_before

    def overflow_report(self) -> OverflowReport:
        """Return the names of the parameters whose gradients were not finite, and what that means."""
        report = self._report()
        if report:
            return replace(report, scaled=self.scale_before > 1.0)
        if self.skipped:
            return OverflowReport(elsewhere=True)
        not_finite = self.norm is not None and not bool(torch.isfinite(self.norm))
        return OverflowReport(unattributed=True) if not_finite else report

    def __repr__(self) -> str:
        """Show the numbers: a host sync."""
        norm = None if self.norm is None else self.norm.item()
        return (
            f"StepResult(skipped={self.skipped}, norm={norm}, scale_before={self.scale_before}, "
            f"scale_after={self.scale_after})"
        )
