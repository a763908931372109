"""AmpMonitor: show the loss scale and what it does, and stop a run that only skips."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from amp_plugin.adapters.endless_skips import EndlessSkips, explanation
from amp_plugin.adapters.lightning.trainer_precision import TrainerPrecision
from amp_plugin.adapters.option_checks import names_checked, number
from amp_plugin.scaling.replay import Recorder
from amp_plugin.scaling.skips_in_a_row import ReadStep
from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.store import weight_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from amp_plugin.scaling.step_result import StepResult
    from amp_plugin.weights.store import WeightBytes


class Monitor:
    """Log the loss scale, the skipped steps and the gradient norm; stop a run that only skips.

    The progress bar and any logger get ``loss_scale``, ``skipped_steps`` and ``grad_norm``, the norm of
    the unscaled gradients before clipping; with several optimizers one each: ``grad_norm/0``,
    ``grad_norm/1``, in the order of ``configure_optimizers``. In bf16 and fp32, where nothing is scaled, they
    get ``grad_norm``, and ``skipped_steps`` from the first skip on.
    A run that is stopped has its last step run once more, with the same batch, random numbers and weights,
    under :func:`amp_plugin.diagnose`; the error holds its report.
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
        self._skips = EndlessSkips(
            max_skips_in_a_row,
            in_fp16="compute the named modules in fp32 (fp32_modules=[...]), use AmpPrecision('bf16')",
            option="AmpMonitor(max_skips_in_a_row=...)",
        )
        self._recorder = Recorder()
        self._stepped_in_batch: dict[int, StepResult] = {}
        self._warned = False
        self.weight_bytes: WeightBytes | None = None

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far, as far as they are read."""
        return self._skips.count

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
        self._skips.note(id(optimizer), result)
        self._stepped_in_batch[id(optimizer)] = result
        self._recorder.end_window()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on counting where a resumed run has stopped."""
        self._skips.begin_anew(trainer.precision_plugin.skipped_steps)
        self._stepped_in_batch.clear()
        self.weight_bytes = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read what the last optimizer steps have left."""
        self._read(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """While steps are being skipped, note how to run this one again."""
        again = partial(trainer.precision_plugin.run_again, pl_module, batch, batch_idx)
        self._recorder.remember(again, wanted=self._skips.going_on())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the newest optimizer steps; read the device every few steps."""
        stepped, self._stepped_in_batch = self._stepped_in_batch, {}
        if not stepped:
            return
        if self.weight_bytes is None:
            self.weight_bytes = weight_bytes(pl_module, *trainer.strategy.optimizers)
            self.package.utilities.rank_zero_info(f"training holds {self.weight_bytes}")
        plugin = trainer.precision_plugin
        on_host = plugin.device == "cpu"
        if self._skips.unread() >= (self.every_n_steps or (1 if on_host else trainer.log_every_n_steps)):
            self._read(trainer, pl_module)
        for place, optimizer in enumerate(trainer.optimizers):
            result = stepped.get(id(optimizer))
            if result is not None and result.norm is not None:
                name = "grad_norm" if len(trainer.optimizers) == 1 else f"grad_norm/{place}"
                pl_module.log(name, result.norm, prog_bar=True)
        scale = plugin.current_scale()  # a result's scale_after waits for the device
        if scale is not None:
            pl_module.log("loss_scale", scale.clone(), prog_bar=True)
        if scale is not None or self.skipped_steps:
            pl_module.log("skipped_steps", float(self.skipped_steps), prog_bar=True)

    def _read(self, trainer: Any, pl_module: Any) -> None:
        explain = partial(self._explain, trainer, pl_module)
        for result in self._skips.results(wait=True, explain=explain):
            if result.skipped and not self._warned and result.scale_after < 1.0:
                self._warn_below_one(result)

    def _explain(self, trainer: Any, pl_module: Any, step: ReadStep) -> str:
        optimizer = next(optimizer for optimizer in trainer.optimizers if id(optimizer) == step.key)
        return explanation(self._recorder.replay_of(step, optimizer, pl_module.parameters()), pl_module)

    def _warn_below_one(self, result: StepResult) -> None:
        self._warned = True
        self.package.utilities.rank_zero_only(warn_user)(
            f"the loss scale fell to {result.scale_after:g}, below 1: gradients overflow without any "
            f"scaling ({result.overflow_report().summary()}). Look for a diverging loss, lower the learning "
            "rate, or use AmpPrecision('bf16')"
        )
