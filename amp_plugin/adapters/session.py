"""A Session represents one training run in one precision. Every entry point has a Session.

An entry point such as AmpPrecision only translates calls from its framework into calls to a Session:

- ``Session(options, words=...)`` takes the options, and the names that error messages use for the framework's
  calls.
- ``set_up_weights(model)`` is called before the model is wrapped or moved.
- ``begin(device, groups)`` is called once the device is known. ``begin`` activates op rules, and tells the
  scaler which device is in use.
- ``add(models, optimizers)`` passes parameter names to the scaler, and sets the dtypes of optimizer states.
- ``region()``, ``backward()`` and ``step()`` make up an optimizer step.
- ``end()`` restores float32 weights and the earlier op rules, and finishes the run page.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from amp_plugin.adapters.scaler import GradientOrigins, register, torch_optimizer
from amp_plugin.casting.region import autocast
from amp_plugin.casting.rules import TABLES, OpRules
from amp_plugin.casting.rules_in_force import pop, push
from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.formats.layers import LayerFormats, read_formats
from amp_plugin.hardware import auto_precision, choose_precision, default_device, warn_of_slow_fp16
from amp_plugin.messages import OptionError, naming, only_warning, warn_user
from amp_plugin.numerics.growth import WeightGrowth
from amp_plugin.options import PluginOptions, PrecisionOptions, loss_scale_options
from amp_plugin.patches import random_numbers_kept
from amp_plugin.precision import (
    BELOW_16_BITS,
    TRAINING_DTYPES,
    PrecisionName,
    refuse_other_precision,
    stores_all,
)
from amp_plugin.scaling import penalty
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.shared import OUR_KEY
from amp_plugin.scaling.step_log import StepLog, StepResult, run_of_skips
from amp_plugin.scaling.words import PLAIN, Words
from amp_plugin.sharding.fully_shard import add_up_in_fp32
from amp_plugin.sharding.plan import DtypePlan
from amp_plugin.sharding.report import check_against_plan
from amp_plugin.weights.ddp import is_sharded_model, reduce_in_fp32
from amp_plugin.weights.formats import HALVES
from amp_plugin.weights.optimizer_hooks import add_optimizer
from amp_plugin.weights.store import convert_to_fp32, is_stored, restore_weights, store_weights

if TYPE_CHECKING:
    from amp_plugin.numerics.first_module import ModuleWatch
    from amp_plugin.run_page.report import RunReport

_NOTHING: Final[Mapping[str, Any]] = {}


class Session:
    """One training run in one precision. Each entry point has a Session.

    A copy or pickle of a Session keeps the options, the scaler and the counts, but not the models, the active
    op rules or the run page.

    Args:
        options: the options of the entry point, checked.
        precision: ``"fp16"``, ``"bf16"``, ``"fp32"``, ``"auto"``, or a format below 16 bits. The value is
            ``"fp32"`` if another engine, such as DeepSpeed, does the casting.
        words: how error messages write the user's calls, such as ``optimizer.step()``.
        sources: maps each option that was set to where its value came from, such as an environment
            variable.
        enabled: False scales no loss, not even in fp16.

    Attributes:
        options: as given.
        precision: the argument ``precision``, or the precision that ``"auto"`` has chosen.
        words: as given.
        sources: as given.
        device: the device type, such as ``"cuda"``. It is empty until the run begins.
        models: the models that were passed to :meth:`set_up_weights`, in order.
        growth: measures how much the weights have grown. The error about too many skipped steps mentions
            this growth.
        origins: records which gradients came from scaled backward passes.
        at_end: an exit stack with the changes that :meth:`end` undoes.
        measures_norms: True if gradient norms are measured even without clipping.
        attempted_steps: the number of optimizer steps so far, including skipped steps.
        is_aside: True inside :meth:`aside`, where optimizers step without the scaler.
    """

    # Restores the op rules that applied before the last run began.
    _in_force = ExitStack()

    def __init__(
        self,
        options: PrecisionOptions,
        precision: str = "fp32",
        *,
        words: Words = PLAIN,
        sources: Mapping[str, str] = _NOTHING,
        enabled: bool = True,
    ) -> None:
        self.options, self.precision, self.words, self.sources = options, precision, words, sources
        if precision == "auto":
            self.compute_in(auto_precision(self._asked_device).precision, named="precision")
        self.device = ""
        self.models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.origins = GradientOrigins()
        self.at_end = ExitStack()
        self.measures_norms = False
        self.attempted_steps = 0
        self.is_aside = False
        # The results that new_norms() has returned, as weak references, because results refer to parameters.
        self._seen: list[weakref.ref[StepResult]] = []
        # The ids of the optimizers that have stepped in the current iteration.
        self._stepped: set[int] = set()
        # The growth of the weights, which helps to explain an error about too many skipped steps.
        self.growth = WeightGrowth()
        self._enabled = enabled
        self.formats = LayerFormats()
        if isinstance(options, PluginOptions):
            self._read_formats(self.precision)
        self._scaler: Any = None
        # True if the scaler was enabled when it was created or assigned.
        self._came_enabled = False
        # True if a module has float32 buffers or is one of fp32_modules.
        self._meets_fp32 = False
        # The finalizer that ends the run page or module watch, at the latest when the process ends.
        self._ends_watch: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the state of the current run out of copies and pickles."""
        own = {**vars(self), "at_end": ExitStack(), "_stepped": set(), "_seen": [], "_ends_watch": None}
        del own["models"]
        return own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes, and subscribe to the copied scaler's step log, which is empty."""
        self.__dict__.update(state)
        self.models = weakref.WeakKeyDictionary()
        if self._scaler is not None:
            self._follow_log()

    # -- settings from the options ---------

    @property
    def eval_precision(self) -> PrecisionName:
        """The precision of evaluation."""
        return cast("PrecisionName", self.options.eval_precision or self.precision)

    @property
    def rules(self) -> OpRules | None:
        """The op rules of the run, or None for the default rules."""
        return cast("OpRules | None", self.options.rules)

    @property
    def scales_loss(self) -> bool:
        """Whether training needs a loss scale. Only fp16 does."""
        return self.precision == "fp16"

    @property
    def changes_forward(self) -> bool:
        """Whether models compute in 16 bits in training, in evaluation or in both."""
        return self.precision != "fp32" or self.eval_precision in {"fp16", "bf16"}

    @property
    def training_dtype(self) -> torch.dtype:
        """The dtype in which training computes, which is bfloat16 for formats below 16 bits."""
        return TRAINING_DTYPES[self.precision]

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes of weights, compute and gradient reduction, for FSDP."""
        return DtypePlan(
            compute=self.training_dtype,  # type: ignore[arg-type] # to a name
            fp32_modules=self.options.fp32_modules,
            reduce=self.options.reduce,
            weights=self.options.weights,
        )

    def compute_in(self, precision: str, *, named: str, converts: bool = True) -> None:
        """Set the precision, for frameworks that decide it after the options are known.

        Args:
            precision: the precision, as for the constructor.
            named: the framework's name for it.
            converts: True if amp_plugin converts Linear layers to a format below 16 bits. False if the
                framework does it.

        Raises:
            OptionError: the option ``weights`` requires a dtype other than the one in which models compute.
        """
        with naming(self.sources):
            refuse_other_precision(self.options.weights, precision, named=named)
        self.precision = precision
        self._read_formats(precision if converts else "bf16")

    def _read_formats(self, precision: str) -> None:
        """Read from the options which Linear layers to convert, and to which format."""
        with naming(self.sources):
            patterns = read_formats(self.options.formats)
            if patterns and self.training_dtype is not torch.bfloat16:
                allowed = (
                    "formats= together with precision='bf16' or a precision below 16 bits, not with "
                    f"{precision!r}"
                )
                raise OptionError(option="formats", value=self.options.formats, allowed=allowed)
            self.formats = LayerFormats(
                default=precision if precision in BELOW_16_BITS else "bf16",
                patterns=patterns,
                recipe=self.options.recipe if isinstance(self.options, PluginOptions) else None,
                emulate=self.options.emulate,
            )

    # -- beginning and end -----------------

    def begin(
        self,
        device: str,
        groups: Mapping[str, Any] = _NOTHING,
        *,
        follows_default: bool = False,
        is_first_rank: bool = True,
    ) -> None:
        """Begin a run on a device.

        The run's op rules apply to the whole process and replace those of earlier runs.

        Args:
            device: the device type.
            groups: the process groups whose ranks step together, as ``scaler_groups()`` returns them.
            follows_default: True if ``torch.autocast`` blocks use amp_plugin's kernels even without op rules
                in the options.
            is_first_rank: True if this process gives the warnings.
        """
        asked = self._asked_device
        if asked not in {None, device}:
            msg = f"device={asked!r} was given, but the model runs on {device!r}; delete device="
            raise OptionError(option="device", value=asked, allowed=repr(device), text=msg)
        self._refuse_other_choice(device)
        self.formats.refuse_device(device)
        if self.device != device and is_first_rank:
            warn_of_slow_fp16(self.precision, device)
        self.device = device
        default = OpRules.default(device) if follows_default and device in TABLES else None
        self.follow(self.rules or default)
        self.place(groups)

    @property
    def _asked_device(self) -> str | None:
        """The device type that the options name, or None."""
        return self.options.device if isinstance(self.options, PluginOptions) else None

    def _refuse_other_choice(self, device: str) -> None:
        """Raise OptionError if "auto" would have chosen another precision for the model's device."""
        chose = isinstance(self.options, PluginOptions) and self.options.precision == "auto"
        choice = choose_precision(device) if chose else None
        if choice is None or choice.precision == self.precision:
            return
        msg = (
            f"precision='auto' chose {self.precision!r} for this machine's {default_device()}, but the model "
            f"runs on {device!r}, where it chooses {choice.precision!r}; give device={device!r} next to "
            "'auto'"
        )
        raise OptionError(option="device", value=None, allowed=repr(device), text=msg)

    def place(self, groups: Mapping[str, Any]) -> None:
        """Give the scaler its device type, and the process groups whose ranks step together."""
        self.scaler.core.place(self.device, **groups)
        if self.options.exact_schedulers:
            self.scaler.core.log.wait_for()

    def follow(self, rules: OpRules | None) -> None:
        """Activate op rules until this run ends or another run begins. Deactivate rules of earlier runs."""
        Session.forget_rules()
        Session._in_force = own = ExitStack()
        if rules is not None:
            own.callback(pop, push(rules))
            self.at_end.callback(own.close)

    @staticmethod
    def forget_rules() -> None:
        """Deactivate the op rules of the last run if that run has not ended."""
        Session._in_force.close()

    def end(self, *, warn: Callable[[str], object] | None, error: BaseException | None = None) -> None:
        """End the run. Weights are converted back to float32, and earlier op rules are restored.

        The loss scale and the step counts do not change.

        Args:
            warn: a function that is called with a warning if all steps of the run were skipped. None gives no
                warning.
            error: the error that ended the run, if one did.
        """
        self.end_watch(error)
        self.origins.unwatch()
        self.at_end.close()
        if self._scaler is not None:
            self._scaler.core.log.end_run(warn)
        while self.models:
            restore_weights(self.models.popitem()[0])

    # -- weights ---------------------------

    @property
    def are_all_stored(self) -> bool:
        """Whether all weights are stored in 16 bits. If so, activations are 16-bit too."""
        return stores_all(self.options.weights)

    @property
    def replaces_autocast(self) -> bool:
        """Whether models run without autocast, because all their weights and buffers are in 16 bits."""
        return self.are_all_stored and not self._meets_fp32

    def set_up_weights(self, model: nn.Module, fp32_modules: Sequence[str] = ()) -> bool:
        """Convert a model's weights to the storage format that the option ``weights`` specifies.

        This method is called before the model is wrapped or moved. At the end of a run the weights become
        float32, and ``set_up_weights`` may be called again for the next run.

        Returns:
            True if the model had weights in 16 bits before this call. A checkpoint that was loaded into
            16-bit weights has been rounded to 16 bits.
        """
        weights = self.options.weights
        stores = weights != "fp32"
        if model in self.models and (not stores or is_stored(model)):
            return False
        self.models[model] = None
        came_narrow = not is_stored(model) and any(
            param.requires_grad and param.dtype in HALVES for param in model.parameters()
        )
        if stores:
            store_weights(model, weights=weights, fp32_modules=fp32_modules)
            self._meets_fp32 |= bool(fp32_modules) or any(map(_has_fp32_buffers, model.modules()))
        # Convert 16-bit weights to float32, unless the run is in fp32 or the model is sharded.
        elif self.precision != "fp32" and not is_sharded_model(model):
            if line := convert_to_fp32(model):
                warn_user(line)
        else:
            return False
        return came_narrow

    def convert(self, model: nn.Module) -> nn.Module:
        """Make ``fp32_modules`` compute in fp32, and convert Linear layers to their formats."""
        in_fp32 = apply_fp32_modules(model, self.options.fp32_modules)
        self.formats.require([model])
        self.formats.convert(model, in_fp32)
        return model

    def add(
        self, models: Iterable[nn.Module], optimizers: Sequence[Optimizer], named: Sequence[nn.Module] = ()
    ) -> None:
        """Register optimizers with the scaler, and set the storage dtype of their states.

        This method may be called several times.

        Args:
            models: the models. If a model is wrapped in DistributedDataParallel, its gradients are reduced in
                float32.
            optimizers: torch optimizers, or the framework's wrappers around them.
            named: the models whose parameter names are used.
        """
        for model in models:
            reduce_in_fp32(model)
        if self._max_skips:
            self.growth.add(named)
        own = [torch_optimizer(optimizer) for optimizer in optimizers]
        for optimizer in own:
            add_optimizer(optimizer, self.options.state)
        register(self.scaler, own, named)

    # -- models that are sharded -----------

    def check_sharded(self) -> None:
        """Raise OptionError if evaluation has its own precision, which FSDP cannot provide."""
        in_eval, precision = self.eval_precision, self.precision
        if in_eval != precision != "fp32":
            msg = (
                f"eval_precision={in_eval!r} does not work under FSDP, which gathers weights in "
                f"{precision!r} in evaluation too; leave eval_precision out"
            )
            with naming(self.sources):
                raise OptionError(option="eval_precision", value=in_eval, allowed=repr(precision), text=msg)

    def check_shards(self, model: nn.Module, *, warn: Callable[[str], Any] = warn_user) -> None:
        """Check that a sharded model has the planned dtypes. Warn if the option ``reduce`` has no effect."""
        reduce = self.options.reduce
        if check_against_plan(model, self.dtype_plan):
            self.check_sharded()
            add_up_in_fp32(model)
        elif reduce != "fp32":
            warn(
                f"reduce={reduce!r} has an effect under FSDP only, and this model is not sharded: its "
                f"gradients are reduced in the dtype of the weights; for DDP use {self.words.reduce}"
            )

    # -- the scaler ------------------------

    @property
    def scaler(self) -> GradScaler:
        """The scaler in use. If no loss is scaled, the scaler is disabled and only counts steps.

        The scaler is created at first use, because creating it loads the native core.
        """
        if self._scaler is None:
            self.take_scaler(self.new_scaler(enabled=self.scales_loss))
        return cast("GradScaler", self._scaler)

    @property
    def shown_scaler(self) -> Any:
        """The scaler that is exposed to the program as ``plugin.scaler``, or None if no loss is scaled.

        A program may switch the scaler off for some batches with ``scaler._enabled = False``. A scaler that
        is switched off remains visible, so that the program can switch it on again.
        """
        scaler = self.scaler
        return scaler if self._came_enabled or scaler.is_enabled() else None

    def new_scaler(self, *, enabled: bool, device: str = "") -> GradScaler:
        """Return a new scaler with the session's options. A disabled scaler only logs steps."""
        options = loss_scale_options(self.options)
        return GradScaler(device or self.device or "cpu", enabled=enabled and self._enabled, **options)

    def replace_scaler(self, given: Any, name: str) -> None:
        """Use the scaler that the user has assigned to the attribute called ``name``.

        Args:
            given: a ``torch.amp.GradScaler``, an object with all methods of ``amp_plugin.GradScaler``, or
                None. The options and state of torch's scaler are copied to a new ``amp_plugin.GradScaler``.
                With None, no loss is scaled.
            name: the name of the attribute, for the error message.

        Raises:
            TypeError: ``given`` is something else.
        """
        if given is None:
            given = self.new_scaler(enabled=False)
        elif _is_torchs(given):
            theirs, given = given, self.new_scaler(enabled=given.is_enabled())
            if given.is_enabled():
                given.load_state_dict(theirs.state_dict())
        else:
            _refuse_stranger(given, name)
        self.take_scaler(given)

    def take_scaler(self, scaler: Any) -> None:
        """Switch to another scaler, and subscribe to the log of its steps."""
        if self._scaler is not None:
            self._scaler.core.log.unsubscribe(self._look)
        self._scaler, self._came_enabled = scaler, scaler.is_enabled()
        self._follow_log()

    def _follow_log(self) -> None:
        if isinstance(self._scaler, GradScaler):
            self._scaler.core.shared.speak(self.words)
        log: StepLog = self._scaler.core.log
        if self.options.exact_schedulers:
            log.wait_for()
        if self._max_skips:
            log.subscribe(self._look)

    @property
    def _max_skips(self) -> int:
        """The number of consecutive skipped steps that ends the run.

        With 0, skipped steps never end the run.
        """
        return getattr(self.options, "max_skips_in_a_row", 0)

    def _look(self, step: StepResult) -> None:
        """Raise an error if too many consecutive optimizer steps were skipped."""
        if step.in_a_row == self._max_skips:
            raise endless_skips(step, self.words, self.growth)

    # -- one step --------------------------

    def region(self, precision: str | None = None, *, cache_enabled: bool | None = None) -> torch.autocast:
        """Return a new autocast region, by default for the training precision.

        If all weights are stored in 16 bits, the region is disabled, because the models need no autocast.
        """
        dtype = TRAINING_DTYPES[precision or self.precision]
        if dtype is torch.float32 or self.replaces_autocast:
            return self.no_region()
        return autocast(self.device, dtype=dtype, cache_enabled=cache_enabled, rules=self.rules)

    def no_region(self) -> torch.autocast:
        """Return a block without autocast."""
        return autocast(self.device, enabled=False)

    def watching(self, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """During backward passes, watch the parameters that belong to no registered optimizer."""
        return self.origins.watching(list(models), self.scaler, self.words)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale gradients, step or skip, and update the loss scale. Return the step's result."""
        if self.is_aside:
            return optimizer.step(*args, **kwargs)
        output = self.scaler.step(optimizer, *args, **kwargs)
        self.scaler.update()
        self.count_step()
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        self._stepped.add(id(optimizer))
        return output

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's step was skipped in the current iteration.

        An iteration ends when an optimizer steps a second time.
        """
        return id(optimizer) in self._stepped and self.scaler.core.log.holds_schedulers(optimizer)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let optimizers step without the scaler while the ``with`` block runs.

        When a framework saves or loads a checkpoint, it may step with zero gradients to create optimizer
        state.
        """
        before, self.is_aside = self.is_aside, True
        try:
            yield
        finally:
            self.is_aside = before

    def count_step(self) -> None:
        """Count an optimizer step. Skipped steps are counted too."""
        self.attempted_steps += 1

    def measure_norms(self, *, wanted: bool) -> None:
        """Turn the measurement of gradient norms on or off, for steps that do not clip."""
        self.measures_norms = wanted

    def step_scheduler(self, scheduler: Any, *args: Any) -> bool:
        """Step a scheduler unless its optimizer's step was skipped. Return True if it was stepped.

        Raises:
            RuntimeError: the scheduler's optimizer has not stepped yet.
        """
        optimizer = torch_optimizer(scheduler.optimizer)
        self.scaler.last_step(optimizer)  # raises if there is none
        if self.scaler.core.log.holds_schedulers(optimizer):
            return False
        scheduler.step(*args)
        return True

    def new_norms(self, optimizers: Iterable[Any]) -> dict[str, Tensor] | None:
        """Return the gradient norms (unscaled, before clipping) of the steps since the last call.

        Returns:
            A dict from ``grad_norm`` to the norm (float32, 0-dim). If there are several optimizers, the keys
            are ``grad_norm/0``, ``grad_norm/1`` and so on. If no optimizer has stepped since the last call,
            the result is None.
        """
        last = [self.scaler.core.result_of(torch_optimizer(optimizer)) for optimizer in optimizers]
        before = [seen() for seen in self._seen]
        self._seen = [weakref.ref(result) for result in last if result is not None]
        new = {place: result for place, result in enumerate(last) if result and result not in before}
        name = "grad_norm" if len(last) == 1 else "grad_norm/{}"
        norms = {name.format(place): result.norm for place, result in new.items() if result.norm is not None}
        return norms if new else None

    # -- state and run page ----------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale, with the keys of torch's GradScaler.

        If no loss is scaled, the state is empty, except for the statistics of ``on_spike``.
        """
        if not self.scaler.is_enabled():
            return self.scaler.state_dict()
        taken = self.attempted_steps - self.scaler.skipped_steps()
        return {**self.scaler.state_dict(), "optimizer_steps": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Load the saved state of a loss scale.

        The state may have been saved by amp_plugin, by torch or by a framework's own precision plugin.

        Returns:
            A warning if the state was saved in another precision and cannot be used, else "".
        """
        # A state with only amp_plugin's key was saved by a run that did not scale the loss.
        if state.keys() == {OUR_KEY}:
            self.scaler.core.shared.load_spikes(dict(state))
            return ""
        if self.scales_loss and state:
            self.scaler.load_state_dict(dict(state))
            self.attempted_steps = state.get("optimizer_steps", 0) + self.scaler.skipped_steps()
            return ""
        if not self.scales_loss and not state:
            return ""
        kept = (
            f"the scale stays at {self.scaler.get_scale():.10g}"
            if self.scales_loss
            else "its scale is ignored"
        )
        return f"the checkpoint was written in another precision; {kept}"

    def watch(self, models: Sequence[nn.Module], path: str | Path | None) -> Path | None:
        """Watch modules, so that reports can name the module in which inf or nan first arises.

        If ``path`` is given, write a run page.

        The run page is an HTML report. Watching ends when :meth:`end_watch` is called or the process ends. If
        ``watch`` is called again, only the models that are passed to the new call are watched. If an error
        occurs in the watching code, watching stops with one warning, and the run continues.

        Returns:
            The path of the run page, or None if no run page is written.

        Raises:
            ImportError: the packages of the pip extra ``report`` are not installed.
        """
        watch = self._watch
        if watch is None:
            watch = _opened_watch(self.scaler, models, path, self.options)
            self._ends_watch = weakref.finalize(self, _end_watch, watch)
        else:
            watch.follow(models)
        return watch.path

    @property
    def _watch(self) -> RunReport | ModuleWatch | None:
        """The run page or module watch that has not ended, or None."""
        running = None if self._ends_watch is None else self._ends_watch.peek()
        return None if running is None else cast("RunReport | ModuleWatch", running[2][0])

    def end_watch(self, error: BaseException | None = None) -> None:
        """End the module watch, if one is running."""
        watch = self._watch
        if watch is not None:
            self._ends_watch.detach()
            _end_watch(watch, error)


def _opened_watch(
    scaler: Any, models: Sequence[nn.Module], path: str | Path | None, options: object
) -> RunReport | ModuleWatch:
    """Return an open RunReport, or a ModuleWatch if no report is wanted or possible."""
    from amp_plugin.numerics.first_module import ModuleWatch  # noqa: PLC0415 - only needed for watches

    if path is not None:
        with random_numbers_kept():
            from amp_plugin.run_page.libraries import require_libraries  # noqa: PLC0415
            from amp_plugin.run_page.report import RunReport  # noqa: PLC0415

            require_libraries()
            with only_warning(f"the report {path}", lambda: None):
                return RunReport(scaler.core.log, models, path, options=options).__enter__()
    return ModuleWatch(scaler.core.log, models).__enter__()


def _end_watch(watch: RunReport | ModuleWatch, error: BaseException | None = None) -> None:
    error = error or getattr(sys, "last_value", None)
    watch.__exit__(None if error is None else type(error), error, None)


class EntryPoint:
    """The base class of all entry points, with the methods that they share.

    Attributes:
        words: how error messages write the user's calls, such as ``optimizer.step()``.
        session: the Session that holds the options, the scaler and the models.
    """

    words = PLAIN
    session: Session

    def _open_session(self, options: PrecisionOptions, precision: str = "fp32", **given: Any) -> None:
        """Create the session. For the arguments see :class:`Session`."""
        self.session = Session(options, precision, words=self.words, **given)

    @property
    def _scaler(self) -> GradScaler:
        """The scaler in use. If no loss is scaled, the scaler is disabled."""
        return self.session.scaler

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes to pass to ``amp_plugin.fully_shard`` as its plan."""
        return self.session.dtype_plan

    @property
    def step_log(self) -> StepLog:
        """The log of the scaler's steps."""
        return self._scaler.core.log

    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return the result of an optimizer's last step, with its norm, loss scales and overflows.

        If no loss is scaled, both scales are 1. ``norm`` is the norm of the unscaled gradients before
        clipping. The norm is None if there were no gradients. With ``on_nonfinite="ignore"`` the norm is also
        None, unless AmpMonitor or clipping has measured it.

        Args:
            optimizer: a torch optimizer, or the framework's wrapper around one.

        Raises:
            RuntimeError: the optimizer has not stepped yet, or another engine such as DeepSpeed steps it.
        """
        return self._scaler.last_step(torch_optimizer(optimizer))

    def result_of(self, optimizer: Optimizer) -> StepResult | None:
        """Return the result of :meth:`last_step`, or None if the optimizer has not stepped yet."""
        return self._scaler.core.result_of(torch_optimizer(optimizer))

    def landed(self, optimizer: Optimizer, *, wait: bool = True) -> bool:
        """Return True if an optimizer's last step was not skipped. See ``GradScaler.landed()``."""
        return self._scaler.landed(torch_optimizer(optimizer), wait=wait)

    def grad(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], **options: Any
    ) -> tuple[Tensor | None, ...]:
        """Multiply outputs by the loss scale, call ``torch.autograd.grad``, and return unscaled gradients.

        See :func:`amp_plugin.scaling.grad`.
        """
        return penalty.grad(outputs, inputs, scaler=self._scaler, **options)

    def gradient_penalty(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], **options: Any
    ) -> Tensor:
        """Return a gradient penalty to add to the loss; see :func:`amp_plugin.scaling.gradient_penalty`.

        Args:
            outputs: the tensors whose gradients are penalized, such as a critic's scores.
            inputs: the tensors with respect to which gradients are taken.
            **options: the keyword arguments ``kind`` (``"l2"`` or ``"wgan-gp"``) and ``target``.

        Returns:
            The unscaled penalty (float32, 0-dim), which can be added to a loss, as in ``loss + 10 *
            penalty``.
        """
        return penalty.gradient_penalty(outputs, inputs, scaler=self._scaler, **options)


def endless_skips(step: StepResult, words: Words, growth: WeightGrowth) -> RuntimeError:
    """Return the error that ends a run in which all steps are skipped.

    The error names parameters, a remedy and a command.

    If the weights have grown, the remedy is a lower learning rate. A wider dtype would only delay an overflow
    that growing weights cause.
    """
    if advice := growth.advice():
        return RuntimeError(f"{run_of_skips(step)} {advice}")
    bf16 = f"{words.bf16}, or " * step.is_scaled
    return RuntimeError(
        f"{run_of_skips(step)} Look for nan in the loss or the data, {bf16}raise {words.endless}"
    )


def _is_torchs(given: Any) -> bool:
    """Return whether an object is a scaler of torch's own class, and not amp_plugin's stand-in for it."""
    theirs = isinstance(given, torch.amp.GradScaler) and type(given).__module__.startswith("torch.")
    return theirs and not isinstance(given, GradScaler)


def _refuse_stranger(given: Any, name: str) -> None:
    methods = [name for name, _ in inspect.getmembers(GradScaler, callable) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(given, name, None))]
    if missing:
        msg = (
            f"{name} = {given!r}: this object cannot replace an amp_plugin.GradScaler, because it has no "
            f"{', '.join(missing[:3])}...; give an amp_plugin.GradScaler, an object with all of its "
            "methods, a torch.amp.GradScaler (its options and state are copied), or None for no loss "
            "scale"
        )
        raise TypeError(msg)


def _has_fp32_buffers(module: nn.Module) -> bool:
    """Return True if a module has float32 buffers that may promote 16-bit activations to float32.

    A product of a 16-bit activation and a float32 buffer is float32. The running statistics of normalization
    layers are ignored, because these layers accept 16-bit activations without promoting them to float32.
    """
    dtypes = {buffer.dtype for buffer in module.buffers(recurse=False)}
    return torch.float32 in dtypes and not isinstance(module, _NormBase)
