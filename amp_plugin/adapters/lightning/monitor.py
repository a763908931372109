"""AmpMonitor logs loss scale, skipped steps and gradient norms, and ends a run that skips every step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_plugin.adapters.lightning.trainer_precision import TrainerPrecision
from amp_plugin.adapters.session import endless_skips
from amp_plugin.messages import only_warning
from amp_plugin.options import whole
from amp_plugin.weights.store import WeightBytes, weight_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from amp_plugin.scaling.step_log import StepResult


class Monitor:
    """Log the loss scale, skipped steps and gradient norms, and end a run that skips every step.

    The progress bar and all loggers receive ``loss_scale``, ``skipped_steps`` and ``grad_norm``, the norm of
    the unscaled gradients before clipping. With several optimizers, the norms are ``grad_norm/0``,
    ``grad_norm/1`` and so on, in the order of ``configure_optimizers``. In bf16 and fp32 there is no loss
    scale, and ``skipped_steps`` is not logged before the first skipped step.

    The error that ends a run names the affected parameters, and the command that finds the failing op and its
    line. Results are read from a GPU only every few steps, so the error may come a few steps late.

    Args:
        max_skips_in_a_row: If one optimizer skips this many steps in a row, an error ends the run.
        every_n_steps: The number of optimizer steps between two reads from the GPU. If None, the Trainer's
            ``log_every_n_steps`` is used.
        report: The path of a run page (an HTML report, see ``amp_plugin.report``). With a run page, the host
            waits for the device at each step.

    Raises:
        ValueError: an argument is not a positive integer.
        TypeError: training starts under a Trainer without the AmpPrecision plugin.
        RuntimeError: ``max_skips_in_a_row`` consecutive steps were skipped. The error names the parameters.

    Example:
        >>> from amp_plugin import AmpMonitor
        >>> AmpMonitor(max_skips_in_a_row=10).max_skips_in_a_row
        10
    """

    skipped_steps: int = 0
    """The number of skipped optimizer steps that AmpMonitor has read so far."""

    weight_bytes: WeightBytes | None = None
    """Bytes per parameter, measured once each optimizer has stepped, or at the end.

    They are also logged once.
    """

    def __init__(
        self,
        max_skips_in_a_row: int = 50,
        every_n_steps: int | None = None,
        report: str | Path | None = None,
    ) -> None:
        self.max_skips_in_a_row = whole("max_skips_in_a_row", max_skips_in_a_row)
        self.every_n_steps = None if every_n_steps is None else whole("every_n_steps", every_n_steps)
        self.report = report
        self._read: list[StepResult] = []
        # The names of the optimizers that have taken a step since training began.
        self._have_stepped: set[str] = set()
        self._has_failed = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Subscribe to the optimizer steps of the Trainer's AmpPrecision."""
        plugin = trainer.precision_plugin
        if not isinstance(plugin, TrainerPrecision):
            msg = (
                f"AmpMonitor watches AmpPrecision, but this Trainer has {type(plugin).__name__}; "
                "add plugins=[AmpPrecision(...)] or remove AmpMonitor"
            )
            raise TypeError(msg)
        plugin.session.measure_norms(wanted=True)
        plugin.step_log.subscribe(self._read.append)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop watching."""
        plugin = trainer.precision_plugin
        if isinstance(plugin, TrainerPrecision):
            plugin.session.measure_norms(wanted=False)
            plugin.session.end_watch()
            plugin.step_log.unsubscribe(self._read.append)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching. The Trainer does not call ``teardown`` after an exception."""
        if isinstance(trainer.precision_plugin, TrainerPrecision):
            trainer.precision_plugin.session.end_watch(exception)
        self.teardown(trainer, pl_module, "")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue the counts of a resumed run."""
        self.skipped_steps = trainer.precision_plugin.skipped_steps
        self._read.clear()
        self._have_stepped.clear()
        self._new_norms(trainer)
        self.weight_bytes = None
        self._has_failed = False
        plugin = trainer.precision_plugin
        with only_warning("AmpMonitor", self._fail):
            plugin.session.growth.add([pl_module])
        path = plugin.session.watch([pl_module], self.report)
        if path is not None:
            plugin.package.utilities.rank_zero_info(f"the run report is in {path}")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read the remaining unread results of optimizer steps."""
        trainer.precision_plugin.step_log.read(wait=True)
        self._look(trainer)
        self._measure(trainer, pl_module, at_least=1)
        trainer.precision_plugin.session.end_watch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the latest optimizer steps. Read results from the device every few steps."""
        log = trainer.precision_plugin.step_log
        norms = self._new_norms(trainer)
        if norms is None:
            return
        if len(log.unread_steps()) >= (self.every_n_steps or trainer.log_every_n_steps):
            log.read(wait=True)
        self._look(trainer)
        self._measure(trainer, pl_module, at_least=len(trainer.strategy.optimizers))
        if not self._has_failed:
            with only_warning("AmpMonitor", self._fail):
                self._show(trainer, pl_module, norms)

    def _show(self, trainer: Any, pl_module: Any, norms: dict[str, Tensor]) -> None:
        # Lightning cannot infer a batch size from training_step(dataloader_iter), so batch_size is passed.
        # Lightning weights each logged value by the batch size. With batch_size=1, all steps weigh the same.
        log = partial(pl_module.log, prog_bar=True, batch_size=1)
        for name, norm in norms.items():
            log(name, norm)
        # Reading ``scale_after`` from a step's result would cause a host sync.
        scale = trainer.precision_plugin.current_scale()
        if scale is not None:
            log("loss_scale", scale.clone())
        if scale is not None or self.skipped_steps:
            log("skipped_steps", float(self.skipped_steps))

    def _fail(self) -> None:
        """Stop logging. A run that skips all steps still ends."""
        self._has_failed = True

    def _new_norms(self, trainer: Any) -> dict[str, Tensor] | None:
        norms: dict[str, Tensor] | None = trainer.precision_plugin.session.new_norms(trainer.optimizers)
        return norms

    def _look(self, trainer: Any) -> None:
        """Count the skipped steps that the host knows about. Raise if too many in a row were skipped."""
        plugin = trainer.precision_plugin
        read, self._read[:] = list(self._read), []
        for step in read:
            self.skipped_steps += step.skipped
            if not step.skipped:  # a skipped step makes no optimizer state
                self._have_stepped.add(step.name)
            if step.in_a_row == self.max_skips_in_a_row:
                raise endless_skips(step, plugin.words, plugin.session.growth)

    def _measure(self, trainer: Any, pl_module: Any, at_least: int) -> None:
        """Measure the bytes of memory per parameter.

        The memory is measured once, after ``at_least`` or more optimizers have taken a step.
        """
        if self.weight_bytes is not None or self._has_failed or len(self._have_stepped) < max(1, at_least):
            return
        with only_warning("AmpMonitor", self._fail):
            self.weight_bytes = weight_bytes(pl_module, *trainer.strategy.optimizers)
            trainer.precision_plugin.package.utilities.rank_zero_info(f"training holds {self.weight_bytes}")
