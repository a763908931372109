"""Session: one run in one precision, the same for every entry point.

An entry point translates the calls of its framework into calls of its session, and nothing else::

    Session(options, words=...)        what the user has asked for, and how the user spells it
    set_up_weights(model)              before the model is wrapped or moved
    begin(device, groups)              once the device is known: op rules, the scaler's device, warnings
    add(models, optimizers)            the names of parameters, the dtypes of optimizer states
    region(), backward(), step()       one optimizer step
    end()                              float32 weights and the earlier op rules; the page ends
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
from amp_plugin.hardware import auto_precision, choose_precision, warn_of_slow_fp16
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
from amp_plugin.scaling.gradients import params_of
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
    """One run in one precision, which an entry point holds.

    A copy or pickle keeps the options, the scaler and the counts. Models, op rules in force and the page
    belong to the run of the original.

    Args:
        options: the options of the entry point, checked.
        precision: ``"fp16"``, ``"bf16"``, ``"fp32"``, ``"auto"``, or a format below 16 bits. ``"fp32"``
            where another engine computes.
        words: how the user of the entry point spells its calls.
        sources: maps an option to where it was set. Options with their default are absent.
        enabled: False scales no loss, not even in fp16.

    Attributes:
        options: as given.
        precision: as given; if that was ``"auto"``, the precision that was chosen.
        words: as given.
        sources: as given.
        device: the type of the device; empty until the run begins.
        models: the models whose weights were set up, in order.
        growth: the growth of the weights, for the error of a run that skips all steps.
        origins: tells which gradients were made by scaled backward passes.
        at_end: what :meth:`end` has to undo.
        measures_norms: True if gradient norms are measured even without clipping.
        attempted_steps: the number of optimizer steps so far, skipped ones included.
        is_aside: True while optimizers step without the scaler.
    """

    _in_force = ExitStack()  # restores the op rules from before the run that began last

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
        self._auto = ""  # the device that "auto" was chosen for
        if precision == "auto":
            choice = auto_precision(self._asked_device)
            self._auto = choice.device
            self.compute_in(choice.precision, named="precision")
        self.device = ""
        self.models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.origins = GradientOrigins()
        self.at_end = ExitStack()
        self.measures_norms = False
        self.attempted_steps = 0
        self.is_aside = False
        self._seen: list[
            weakref.ref[StepResult]
        ] = []  # by new_norms; weakly, since a result holds parameters
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped in this iteration
        self.growth = WeightGrowth()  # read if the run ends because all steps are skipped
        self._enabled = enabled
        self.formats = LayerFormats()
        if isinstance(options, PluginOptions):
            self._read_formats(self.precision)
        self._scaler: Any = None
        self._meets_fp32 = False  # whether a module has float32 buffers, or is one of fp32_modules
        self._watch: RunReport | ModuleWatch | None = None
        self._ends_watch: Any = None  # at the end of the process

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this run."""
        own = {**vars(self), "at_end": ExitStack(), "_stepped": set(), "_seen": []}
        own |= {"_watch": None, "_ends_watch": None}
        del own["models"]
        return own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Subscribe to the log of the copied scaler, which is empty."""
        self.__dict__.update(state)
        self.models = weakref.WeakKeyDictionary()
        if self._scaler is not None:
            self._follow_log()

    # -- what follows from the options -----------------------------------------------------------

    @property
    def eval_precision(self) -> PrecisionName:
        """The precision of evaluation."""
        return cast("PrecisionName", self.options.eval_precision or self.precision)

    @property
    def rules(self) -> OpRules | None:
        """The op rules of the run; None for the default ones."""
        return cast("OpRules | None", self.options.rules)

    @property
    def scales_loss(self) -> bool:
        """Whether training needs a loss scale: fp16 only."""
        return self.precision == "fp16"

    @property
    def changes_forward(self) -> bool:
        """Whether models compute in 16 bits, in training or in ``eval()`` mode."""
        return self.precision != "fp32" or self.eval_precision in {"fp16", "bf16"}

    @property
    def training_dtype(self) -> torch.dtype:
        """The dtype that training computes in; bfloat16 below 16 bits."""
        return TRAINING_DTYPES[self.precision]

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes of a model, for the engine that shards it."""
        return DtypePlan(
            compute=self.training_dtype,  # type: ignore[arg-type] # a name is made of it
            fp32_modules=self.options.fp32_modules,
            reduce=self.options.reduce,
            weights=self.options.weights,
        )

    def compute_in(self, precision: str, *, named: str, converts: bool = True) -> None:
        """Set the precision, if the framework decides it after the options are known.

        Args:
            precision: the precision, as for the constructor.
            named: the framework's name for it.
            converts: True if amp_plugin, and not the framework, converts Linear layers to a format below 16
                bits.

        Raises:
            OptionError: weights would be stored in another dtype than the one that models compute in.
        """
        with naming(self.sources):
            refuse_other_precision(self.options.weights, precision, named=named)
        self.precision = precision
        self._read_formats(precision if converts else "bf16")

    def _read_formats(self, precision: str) -> None:
        """Read which Linear layers are converted to which format."""
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

    # -- beginning and end -----------------------------------------------------------------------

    def begin(
        self,
        device: str,
        groups: Mapping[str, Any] = _NOTHING,
        *,
        follows_default: bool = False,
        is_first_rank: bool = True,
    ) -> None:
        """Begin a run on a device. Its op rules apply to the whole process, and replace an earlier run's.

        Args:
            device: the device type.
            groups: the ranks that step together, as ``scaler_groups`` returns them.
            follows_default: True if ``torch.autocast`` blocks run on our kernels even if no rules were given.
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
        """The device that the options name."""
        return self.options.device if isinstance(self.options, PluginOptions) else None

    def _refuse_other_choice(self, device: str) -> None:
        """Raise OptionError if "auto" was chosen for another device than the one that the model runs on."""
        if self._auto in {"", device} or choose_precision(device).precision == self.precision:
            return
        choice = choose_precision(device)
        msg = (
            f"precision='auto' chose {self.precision!r} for this machine's {self._auto}, but the model runs "
            f"on {device!r}, where it chooses {choice.precision!r}; give device={device!r} next to 'auto'"
        )
        raise OptionError(option="device", value=None, allowed=repr(device), text=msg)

    def place(self, groups: Mapping[str, Any]) -> None:
        """Tell the scaler its device, and which ranks step together."""
        self.scaler.core.place(self.device, **groups)
        if self.options.exact_schedulers:
            self.scaler.core.log.wait_for()

    def follow(self, rules: OpRules | None) -> None:
        """Put op rules in force until this run ends or another begins. Remove the rules of an earlier run."""
        Session.forget_rules()
        Session._in_force = own = ExitStack()
        if rules is not None:
            own.callback(pop, push(rules))
            self.at_end.callback(own.close)

    @staticmethod
    def forget_rules() -> None:
        """Remove the op rules of the run that began last, if it has not ended."""
        Session._in_force.close()

    def end(self, *, warn: Callable[[str], object] | None, error: BaseException | None = None) -> None:
        """End the run. Weights become float32 and earlier op rules apply again; scale and counts stay.

        Args:
            warn: a function that is called with a text if all steps of the run were skipped; None warns not.
            error: the error that ended the run, if one did.
        """
        self.end_watch(error)
        self.origins.unwatch()
        self.at_end.close()
        if self._scaler is not None:
            self._scaler.core.log.end_run(warn)
        while self.models:
            restore_weights(self.models.popitem()[0])

    # -- weights ---------------------------------------------------------------------------------

    @property
    def are_all_stored(self) -> bool:
        """Whether all weights are stored in 16 bits, so that activations are in 16 bits too."""
        return stores_all(self.options.weights)

    @property
    def replaces_autocast(self) -> bool:
        """Whether models need no autocast, because all their weights and buffers are in 16 bits."""
        return self.are_all_stored and not self._meets_fp32

    def set_up_weights(self, model: nn.Module, fp32_modules: Sequence[str] = ()) -> bool:
        """Store a model's weights as the options say, before the model is wrapped or moved.

        It may be called again after a run has made the weights float32.

        Returns:
            True if plain 16-bit weights became stored ones. Then a checkpoint that was loaded earlier was
            rounded to 16 bits.
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
        # In fp32, and for sharded models, weights are not converted to float32 unasked.
        elif self.precision != "fp32" and not is_sharded_model(model):
            if line := convert_to_fp32(model):
                warn_user(line)
        else:
            return False
        return came_narrow

    def convert(self, model: nn.Module) -> nn.Module:
        """Make the modules in ``fp32_modules`` compute in fp32; convert Linear layers to their formats."""
        in_fp32 = apply_fp32_modules(model, self.options.fp32_modules)
        self.formats.require([model])
        self.formats.convert(model, in_fp32)
        return model

    def add(
        self, models: Iterable[nn.Module], optimizers: Sequence[Optimizer], named: Sequence[nn.Module] = ()
    ) -> None:
        """Register optimizers: the dtype of their states, and the names of their parameters.

        It may be called several times.

        Args:
            models: the models. If DistributedDataParallel reduces their gradients, it does so in float32.
            optimizers: the framework's optimizers or torch's.
            named: the models from which parameters take their names.
        """
        for model in models:
            reduce_in_fp32(model)
        if self._max_skips:
            self.growth.add(named)
        own = [torch_optimizer(optimizer) for optimizer in optimizers]
        for optimizer in own:
            add_optimizer(optimizer, self.options.state)
        register(self.scaler, own, named)

    # -- models that are sharded -----------------------------------------------------------------

    def check_sharded(self) -> None:
        """Raise OptionError if a model that FSDP shards would be evaluated in another precision."""
        in_eval, precision = self.eval_precision, self.precision
        if in_eval != precision != "fp32":
            msg = (
                f"eval_precision={in_eval!r} does not work under FSDP, which gathers weights in "
                f"{precision!r} in evaluation too; leave eval_precision out"
            )
            with naming(self.sources):
                raise OptionError(option="eval_precision", value=in_eval, allowed=repr(precision), text=msg)

    def check_shards(self, model: nn.Module, *, warn: Callable[[str], Any] = warn_user) -> None:
        """Compare the dtypes of a sharded model with the plan; warn if ``reduce`` has no effect."""
        reduce = self.options.reduce
        if check_against_plan(model, self.dtype_plan):
            self.check_sharded()
            add_up_in_fp32(model)
        elif reduce != "fp32":
            warn(
                f"reduce={reduce!r} has an effect under FSDP only, and this model is not sharded: its "
                f"gradients are reduced in the dtype of the weights; for DDP use {self.words.reduce}"
            )

    # -- the scaler ------------------------------------------------------------------------------

    @property
    def scaler(self) -> GradScaler:
        """The scaler in use. If no loss is scaled, it is a disabled one that only counts steps.

        It is made at its first use, because making it loads the native core.
        """
        if self._scaler is None:
            self._scaler = self.new_scaler(enabled=self.scales_loss)
            self._follow_log()
        return cast("GradScaler", self._scaler)

    def new_scaler(self, *, enabled: bool, device: str = "") -> GradScaler:
        """Return a new scaler with the session's options. A disabled one scales no loss, but logs steps."""
        options = loss_scale_options(self.options)
        return GradScaler(device or self.device or "cpu", enabled=enabled and self._enabled, **options)

    def replace_scaler(self, given: Any, name: str) -> None:
        """Use another scaler, which the user has assigned to the attribute ``name``.

        Args:
            given: a ``torch.amp.GradScaler``, whose options and state a scaler of ours takes over; or None,
                which scales no loss; or an object with our scaler's methods, which is used itself.
            name: the name of the attribute, for the error.

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
        """Use another scaler, and subscribe to its steps."""
        if self._scaler is not None:
            self._scaler.core.log.unsubscribe(self._look)
        self._scaler = scaler
        self._follow_log()

    def _follow_log(self) -> None:
        if isinstance(self._scaler, GradScaler):
            self._scaler.core.shared.speak(self.words, scales_all=True)
        log: StepLog = self._scaler.core.log
        if self.options.exact_schedulers:
            log.wait_for()
        if self._max_skips:
            log.subscribe(self._look)

    @property
    def _max_skips(self) -> int:
        """The number of skipped steps in a row that ends the run; 0 if skipped steps never end it."""
        return getattr(self.options, "max_skips_in_a_row", 0)

    def _look(self, step: StepResult) -> None:
        """Raise if too many steps in a row were skipped."""
        if step.in_a_row == self._max_skips:
            raise endless_skips(step, self.words, self.growth)

    # -- one step --------------------------------------------------------------------------------

    def region(self, precision: str | None = None, *, cache_enabled: bool | None = None) -> torch.autocast:
        """Return a new autocast region, of the training precision by default.

        Where all weights are stored in 16 bits, models need none.
        """
        dtype = TRAINING_DTYPES[precision or self.precision]
        if dtype is torch.float32 or self.replaces_autocast:
            return self.no_region()
        return autocast(self.device, dtype=dtype, cache_enabled=cache_enabled, rules=self.rules)

    def no_region(self) -> torch.autocast:
        """Return a block without autocast."""
        return autocast(self.device, enabled=False)

    def watching(self, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Watch which backward passes reach parameters that no known optimizer steps."""
        return self.origins.watching(list(models), self.scaler, self.words)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, then step or skip, then update the loss scale; return the result of the step."""
        if self.is_aside:
            return optimizer.step(*args, **kwargs)
        core, scales = self.scaler.core, self.scaler.is_enabled()
        has_closure = bool(args or kwargs.get("closure"))
        if scales and not has_closure and core.awaits_first_loss(params_of(optimizer)):
            output = optimizer.step(**kwargs)  # no batch has had a loss so far
            core.note_step(optimizer)
        else:
            output = self.scaler.step(optimizer, *args, **kwargs)
        if core.has_scaled or not scales:
            self.scaler.update()
        self.count_step()
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        self._stepped.add(id(optimizer))
        return output

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's step was skipped in this iteration.

        An iteration ends when an optimizer steps a second time.
        """
        return id(optimizer) in self._stepped and self.scaler.core.log.holds_schedulers(optimizer)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave steps inside the block to the optimizers.

        A framework that saves or loads may make an optimizer's state by a step with zero gradients.
        """
        before, self.is_aside = self.is_aside, True
        try:
            yield
        finally:
            self.is_aside = before

    def count_step(self) -> None:
        """Count an optimizer step that the entry point has taken."""
        self.attempted_steps += 1

    def measure_norms(self, *, wanted: bool) -> None:
        """Switch the measuring of gradient norms that no clip measures on or off."""
        self.measures_norms = wanted

    def step_scheduler(self, scheduler: Any, *args: Any) -> bool:
        """Step a scheduler, unless its optimizer's step was skipped; return whether it was stepped.

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
        """Return the gradient norms of the steps since the last call: unscaled, before clipping.

        Returns:
            A dict from ``grad_norm`` to the norm (float32, 0-dim). With several optimizers the keys are
            ``grad_norm/0``, ``grad_norm/1`` and so on. None if no optimizer has stepped.
        """
        last = [self.scaler.core.result_of(torch_optimizer(optimizer)) for optimizer in optimizers]
        before = [seen() for seen in self._seen]
        self._seen = [weakref.ref(result) for result in last if result is not None]
        new = {place: result for place, result in enumerate(last) if result and result not in before}
        name = "grad_norm" if len(last) == 1 else "grad_norm/{}"
        norms = {name.format(place): result.norm for place, result in new.items() if result.norm is not None}
        return norms if new else None

    # -- what a framework shows or saves ---------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale, with torch's keys.

        If no loss is scaled, it is empty; with ``on_spike`` it is the statistics of ordinary steps.
        """
        if not self.scaler.is_enabled():
            return self.scaler.state_dict()
        taken = self.attempted_steps - self.scaler.skipped_steps()
        return {**self.scaler.state_dict(), "optimizer_steps": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Load the state of a loss scale: ours, torch's or a stock plugin's.

        Returns:
            A warning if no loss is scaled in this precision, so that the state is not used; else an empty
            text.
        """
        if state.keys() == {OUR_KEY}:  # the state comes from a run without a loss scale
            self.scaler.core.shared.load_spikes(dict(state))
            return ""
        if self.scales_loss and state:
            self.scaler.load_state_dict(dict(state))
            self.attempted_steps = state.get("optimizer_steps", 0) + self.scaler.skipped_steps()
            return ""
        if not self.scales_loss and not state:
            return ""
        kept = (
            f"the scale stays at {self.scaler.get_scale():g}" if self.scales_loss else "its scale is ignored"
        )
        return f"the checkpoint was written in another precision; {kept}"

    def watch(self, models: Sequence[nn.Module], path: str | Path | None) -> Path | None:
        """Watch the modules, to name the one at which a step goes wrong. With ``path``, write a page too.

        The watch ends with :meth:`end_watch` or with the process. A second call makes it follow these models.
        If the watch fails, it gives one warning and ends.

        Returns:
            The path of the page; None if there is none.

        Raises:
            ImportError: The packages of the extra ``report`` are missing.
        """
        if self._watch is None:
            self._watch = _opened_watch(self.scaler, models, path, self.options)
            self._ends_watch = weakref.finalize(self, _end_watch, self._watch)
        else:
            self._watch.follow(models)
        return self._watch.path

    def end_watch(self, error: BaseException | None = None) -> None:
        """End the watch, if there is one."""
        watch, self._watch = self._watch, None
        if watch is not None and self._ends_watch.detach() is not None:
            _end_watch(watch, error)


def _opened_watch(
    scaler: Any, models: Sequence[nn.Module], path: str | Path | None, options: object
) -> RunReport | ModuleWatch:
    """Return an open page. If none is wanted, or none can be opened, return a watch of modules."""
    from amp_plugin.numerics.first_module import ModuleWatch  # noqa: PLC0415 - only where somebody watches

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
    """The methods that all entry points share. Plugins and accelerators inherit from it.

    Attributes:
        words: how the user of this entry point spells its calls.
        session: the session, which the parts of the entry point use.
    """

    words = PLAIN
    session: Session

    def _open_session(self, options: PrecisionOptions, precision: str = "fp32", **given: Any) -> None:
        """Make the session, with the words of this entry point. Session explains the arguments."""
        self.session = Session(options, precision, words=self.words, **given)

    @property
    def _scaler(self) -> GradScaler:
        """The scaler in use; a disabled one if no loss is scaled."""
        return self.session.scaler

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes of the model, for ``amp_plugin.fully_shard``."""
        return self.session.dtype_plan

    @property
    def step_log(self) -> StepLog:
        """The log of the scaler's steps."""
        return self._scaler.core.log

    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return the result of an optimizer's last step: skipped, norm, scale, parameters that overflowed.

        Without a loss scale both scales are 1. ``norm`` is the norm of unscaled gradients before clipping. It
        is None if there were no gradients. With ``on_nonfinite="ignore"`` it is also None unless AmpMonitor
        or a clip has measured it.

        Args:
            optimizer: the framework's optimizer or torch's.

        Raises:
            RuntimeError: the optimizer has not stepped yet; or another engine steps (DeepSpeed, ...).
        """
        return self._scaler.last_step(torch_optimizer(optimizer))

    def result_of(self, optimizer: Optimizer) -> StepResult | None:
        """As :meth:`last_step`, but None if the optimizer has not stepped yet."""
        return self._scaler.core.result_of(torch_optimizer(optimizer))

    def landed(self, optimizer: Optimizer, *, wait: bool = True) -> bool:
        """Return True if an optimizer's last step was taken: :meth:`amp_plugin.GradScaler.landed`."""
        return self._scaler.landed(torch_optimizer(optimizer), wait=wait)

    def grad(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], **options: Any
    ) -> tuple[Tensor | None, ...]:
        """Return unscaled gradients, as ``torch.autograd.grad``: :func:`amp_plugin.scaling.grad`."""
        return penalty.grad(outputs, inputs, scaler=self._scaler, **options)

    def gradient_penalty(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], **options: Any
    ) -> Tensor:
        """Return a penalty to add to the loss; see :func:`amp_plugin.scaling.gradient_penalty`.

        Args:
            outputs: the tensors to differentiate, such as a critic's scores.
            inputs: the tensors to differentiate with respect to.
            **options: ``kind="l2"`` or ``"wgan-gp"``, and ``target``.

        Returns:
            The penalty, unscaled (float32, 0-dim). Call backward on ``loss + 10 * penalty``, for example.
        """
        return penalty.gradient_penalty(outputs, inputs, scaler=self._scaler, **options)


def endless_skips(step: StepResult, words: Words, growth: WeightGrowth) -> RuntimeError:
    """Return the error for a run that skips all steps. It names parameters, a cure, and a command.

    If the weights have grown, the cure is a lower learning rate: a wider dtype would only delay the end.
    """
    if advice := growth.advice():
        return RuntimeError(f"{run_of_skips(step)} {advice}")
    bf16 = f"{words.bf16}, or " * step.is_scaled
    return RuntimeError(
        f"{run_of_skips(step)} Look for nan in the loss or the data, {bf16}raise {words.endless}"
    )


def _is_torchs(given: Any) -> bool:
    """Return whether an object is a scaler of torch's own class, and not one of ours by that name."""
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
    """Return True if a module has float32 buffers with which it may compute.

    A 16-bit activation times such a buffer is float32. Running statistics of normalization layers do not
    count: those layers accept 16-bit activations.
    """
    dtypes = {buffer.dtype for buffer in module.buffers(recurse=False)}
    return torch.float32 in dtypes and not isinstance(module, _NormBase)
