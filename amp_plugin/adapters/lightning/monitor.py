"""AmpMonitor: show the loss scale and what it does, and stop a run that only skips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from amp_plugin.adapters.lightning.trainer_precision import TrainerPrecision
from amp_plugin.adapters.option_checks import names_checked, number
from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.weight_bytes import weight_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from amp_plugin.scaling.step_result import StepResult
    from amp_plugin.weights.weight_bytes import WeightBytes


class Monitor:
    """Log the loss scale, the skipped steps and the gradient norm; stop a run that only skips.

    The progress bar and any logger get ``loss_scale``, ``skipped_steps`` and ``grad_norm``, the norm of
    the unscaled gradients before clipping. In bf16 and fp32, where nothing is scaled or skipped, they
    get ``grad_norm`` alone; it costs one more read of the gradients at each optimizer step there.
    After the first optimizer step one line tells the bytes a parameter (weights, what is kept beside them,
    gradients, optimizer state); ``weight_bytes`` holds them.
    On a GPU the device is read every few steps only, so warning and error come that much later.

    Args:
        max_skips_in_a_row: skipped optimizer steps in a row after which training stops.
        every_n_steps: optimizer steps between two reads of the device; None: each step on CPU,
            else the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: an argument is below 1.
        TypeError: when training starts, if the Trainer has no AmpPrecision.
        RuntimeError: while training, after ``max_skips_in_a_row`` skips; it names the parameters.

    Example:
        >>> from amp_plugin import AmpMonitor
        >>> AmpMonitor(max_skips_in_a_row=10).max_skips_in_a_row
        10
    """

    package: ClassVar[Any]
    """The framework: the module ``lightning.pytorch`` or ``pytorch_lightning``."""

    @names_checked
    def __init__(self, *, max_skips_in_a_row: int = 50, every_n_steps: int | None = None) -> None:
        for name, value in (("max_skips_in_a_row", max_skips_in_a_row), ("every_n_steps", every_n_steps)):
            if value is not None or name == "max_skips_in_a_row":
                number(name, value)
            if value is not None and value < 1:
                msg = f"{name}={value} must be at least 1 (optimizer steps)"
                raise ValueError(msg)
        self.max_skips_in_a_row = max_skips_in_a_row
        self.every_n_steps = every_n_steps
        self.skipped_steps = 0
        self._in_a_row: dict[int, int] = {}
        self._unread: list[tuple[int, StepResult]] = []
        self._warned = False
        self.weight_bytes: WeightBytes | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ask the Trainer's AmpPrecision to report each optimizer step."""
        plugin = trainer.precision_plugin
        if not isinstance(plugin, TrainerPrecision):
            msg = (
                f"AmpMonitor watches AmpPrecision, but this Trainer has {type(plugin).__name__}; "
                "add plugins=[AmpPrecision(...)] or remove AmpMonitor"
            )
            raise TypeError(msg)
        plugin.observers.append(self._stepped)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop watching."""
        observers = getattr(trainer.precision_plugin, "observers", [])
        if self._stepped in observers:
            observers.remove(self._stepped)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching: after an exception the Trainer does not call ``teardown``."""
        self.teardown(trainer, pl_module, "")

    def _stepped(self, optimizer: Optimizer, result: StepResult) -> None:
        self._unread.append((id(optimizer), result))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on counting where a resumed run has stopped."""
        self.skipped_steps = trainer.precision_plugin.skipped_steps
        self._in_a_row.clear()
        self._unread.clear()
        self.weight_bytes = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read what the last optimizer steps have left."""
        self._read()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the newest optimizer step; read the device every few steps."""
        if not self._unread:
            return
        if self.weight_bytes is None:
            self.weight_bytes = weight_bytes(pl_module, *trainer.strategy.optimizers)
            self.package.utilities.rank_zero_info(f"training holds {self.weight_bytes}")
        last = self._unread[-1][1]
        plugin = trainer.precision_plugin
        on_host = plugin.device == "cpu"
        if len(self._unread) >= (self.every_n_steps or (1 if on_host else trainer.log_every_n_steps)):
            self._read()
        if last.norm is not None:
            pl_module.log("grad_norm", last.norm, prog_bar=True)
        scale = plugin.current_scale()  # last.scale_after waits for the device
        if scale is None:
            return
        pl_module.log("loss_scale", scale.clone(), prog_bar=True)
        pl_module.log("skipped_steps", float(self.skipped_steps), prog_bar=True)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for optimizer, result in unread:
            in_a_row = self._in_a_row.get(optimizer, 0) + 1 if result.skipped else 0
            self._in_a_row[optimizer] = in_a_row
            self.skipped_steps += result.skipped
            if in_a_row >= self.max_skips_in_a_row:
                self._stop(result, in_a_row)
            if result.skipped and not self._warned and result.scale_after < 1.0:
                self._warn_below_one(result)

    def _warn_below_one(self, result: StepResult) -> None:
        self._warned = True
        self.package.utilities.rank_zero_only(warn_user)(
            f"the loss scale fell to {result.scale_after:g}, below 1: gradients overflow without any "
            f"scaling ({result.overflow_report()}). Look for a diverging loss, lower the learning rate, or "
            "use AmpPrecision('bf16')"
        )

    def _stop(self, result: StepResult, in_a_row: int) -> None:
        cause = f"loss scale {result.scale_after:g}; {result.overflow_report()}"
        msg = (
            f"{in_a_row} optimizer steps in a row were skipped because gradients overflowed ({cause}). "
            "Look for nan in the loss or the data, compute the named modules in fp32 (fp32_modules=[...]), "
            "use AmpPrecision('bf16'), or raise AmpMonitor(max_skips_in_a_row=...)"
        )
        raise RuntimeError(msg)
