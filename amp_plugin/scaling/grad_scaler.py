"""GradScaler: keep gradients representable, step safely."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from typing_extensions import Self

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.tracers import outside_graphs
from amp_plugin.messages import warn_user
from amp_plugin.mistakes import MISTAKES
from amp_plugin.options import GradScalerOptions, LossScaleOptions, lists_options, option_names, takes
from amp_plugin.removed import removed_attribute
from amp_plugin.scaling import closures
from amp_plugin.scaling.clipping import NormClip, clip_norm, number
from amp_plugin.scaling.clipping import clip_value as clip_gradient_values
from amp_plugin.scaling.loss_scale import LossScales, is_state, moved, scale_outputs, widened
from amp_plugin.scaling.overflows import checked_names
from amp_plugin.scaling.per_optimizer import PerOptimizerState, Shared
from amp_plugin.scaling.ranks import Groups, Ranks
from amp_plugin.scaling.registry import Registry
from amp_plugin.scaling.step_log import StepLog, StepResult, raise_for_nonfinite
from amp_plugin.scaling.steps import Steps
from amp_plugin.scaling.torch_names import TorchNames
from amp_plugin.scaling.units import Units

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@lists_options(GradScalerOptions)
class GradScaler(TorchNames):
    """Scale losses, unscale gradients, skip steps that overflow.

    A drop-in for :class:`torch.amp.GradScaler`: same methods, same numbers. Beyond it, a gradient
    is divided by exactly the scale it was made with, once, whatever the number of optimizers,
    losses and calls::

        scale(loss):      apply a requested update; return loss * scale
        backward begins:  convert gradients in other units to this scale
        step(optimizer):  unscale what is not unscaled; step if all gradients are finite, on all ranks
        update():         ask for an update. It is applied once no registered optimizer holds unused scaled
                          gradients; end_iteration() and the next scale() apply it and rescale them

    Args:
        {options}

    Raises:
        TypeError: An option is unknown, or of another type.
        ValueError: A number is out of range, or a word unknown.

    Example:
        >>> import torch
        >>> from amp_plugin import GradScaler
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu")
        >>> scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        >>> norm = scaler.clip_grad_norm_(optimizer, 1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step(optimizer).skipped
        False
    """

    if not TYPE_CHECKING:
        __getattr__ = removed_attribute

    _one_pass = True  # of scalers pickled without it
    _collaborators = frozenset({"step_log", "_registry", "_units", "_steps"})

    @takes(GradScalerOptions)
    def __init__(self, **given: Any) -> None:
        options = GradScalerOptions(**given)
        self._device = str(options.device)
        self._enabled = options.enabled and _usable(self._device)
        rule = LossScaleOptions(**{name: getattr(options, name) for name in option_names(LossScaleOptions)})
        self._scales = LossScales(rule, options.losses, enabled=self._enabled)
        self._groups = Groups(tuple(options.process_groups), tuple(options.sharded_groups))
        self._fp16_gradients = options.fp16_gradients
        self._on_nonfinite = options.on_nonfinite
        self._one_pass = options.one_pass
        self._start(self._new_log())

    def _new_log(self, skipped_before: int = 0) -> StepLog:
        log = StepLog(skipped_before)
        if self._on_nonfinite == "raise":
            options = self._scales.default.options
            log.subscribe(raise_for_nonfinite(max(1.0, options.floor) if options.dynamic else math.inf))
        return log

    def _start(self, log: StepLog) -> None:
        """Make the collaborators, which are neither copied nor pickled."""
        shared = Shared(
            scales=self._scales,
            ranks=Ranks(self._groups),
            fp16_gradients=self._fp16_gradients,
            one_pass=self._one_pass,
            checks=self._on_nonfinite != "ignore",
        )
        self.step_log = log
        self._registry = Registry(shared)
        self._units = Units(self._registry, log)
        self._steps = Steps(self._registry, log)
        if self._enabled:
            native_core()

    def place(
        self,
        device: str,
        *,
        process_groups: Sequence[ProcessGroup] = (),
        sharded_groups: Sequence[ProcessGroup] = (),
    ) -> None:
        """Tell the scaler where it trains, once that is known: for adapters that make it earlier.

        The arguments are the constructor's. Other groups than before make it forget its optimizers; scale and
        counts stay.
        """
        self._device = str(device)
        groups = Groups(tuple(process_groups), tuple(sharded_groups))
        if groups != self._groups:
            self._groups = groups
            self.step_log.start_over(self.skipped_steps())
            self._start(self.step_log)

    def scale(self, outputs: T, *, name: str | None = None) -> T:
        """Multiply a loss, or every tensor of a container of losses, by the loss scale.

        Applies an update that is still requested. No host sync.

        Args:
            outputs: A tensor, or a list, tuple, named tuple, dict or other iterable of such.
            name: One of the constructor's ``losses``: scale by its own scale.

        Returns:
            The same structure, scaled; float16 becomes float32, so that it cannot overflow here.

        Raises:
            FloatingPointError: As :meth:`update`.
            ValueError: ``outputs`` is something else, or ``name`` unknown.
        """
        if not torch.compiler.is_compiling():
            self.step_log.note_loss(outputs)
        if not self._enabled:
            return outputs
        watched = bool(name or self._scales.named or self._units.requested)
        if torch.compiler.is_compiling() and not watched:
            return self._scale_in_graph(outputs)
        return self._scale_watched(outputs, name)

    def _scale_in_graph(self, outputs: T) -> T:
        """Multiply by the scale that is live when the graph runs; no backward is watched, as in torch."""
        loss_scale = self._scales.default

        def apply(tensor: Tensor) -> Tensor:
            scale = moved(loss_scale.materialize(tensor.device).clone(), tensor.device)
            return widened(tensor) * scale

        return cast("T", scale_outputs(outputs, apply))

    @outside_graphs
    def _scale_watched(self, outputs: T, name: str | None) -> T:
        loss_scale = self._scales.of(name)
        self._units.settle(force=True)

        def apply(tensor: Tensor) -> Tensor:
            scaled = loss_scale.multiply(tensor)
            self._units.watch(scaled, loss_scale.read())
            return scaled

        return cast("T", scale_outputs(outputs, apply))

    @outside_graphs
    def register(self, *optimizers: Optimizer, names: Any = None) -> None:
        """Make optimizers known before their first step.

        A plain loop with one optimizer need not; with several, ``update()`` can only wait for the
        gradients of those it knows.

        Args:
            *optimizers: The optimizers.
            names: Their parameters' names for :meth:`last_step`'s ``overflow_report()``: a module, the
                pairs of ``module.named_parameters()``, or a mapping of names to parameters.

        Raises:
            TypeError: Something is not an optimizer, or ``names`` none of these.
            ValueError: ``names`` names parameters, but none of an optimizer's.
        """
        named = checked_names(names)
        own = {id(param) for param in named.values()}
        for state in self._registry.add(optimizers):
            if named and state.params and own.isdisjoint(map(id, state.params)):
                msg = (
                    f"register(names=...): none of the {len(named)} names is of a parameter of this "
                    f"{type(state.optimizer).__name__}; give the module that it optimizes"
                )
                raise ValueError(msg)
            state.names.add(named)

    @outside_graphs
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by their scale, in place.

        One pass: also measures their norm and finds overflows. No host sync. Gradients that a
        later backward adds are unscaled as well. :meth:`ensure_unscaled` may be called again.

        Raises:
            RuntimeError: Called twice, or after ``step()``, without new gradients; or before ``scale()``.
            ValueError: A gradient is float16.
        """
        if not self._enabled:
            return
        state = self._state_for("unscale_", optimizer)
        if state.stage is OptState.UNSCALED and not state.is_awaited():
            msg = (
                "unscale_() has already been called on this optimizer since the last update(). "
                "Call it once, or use ensure_unscaled(), which may be repeated."
            )
            raise RuntimeError(msg)
        if self._registry.is_step_refused(state):
            msg = "unscale_() is being called after step(). Call it between backward() and step()."
            raise RuntimeError(msg)
        state.unscale_(on_request=True)

    @outside_graphs
    def ensure_unscaled(self, optimizer: Optimizer) -> None:
        """Unscale the optimizer's gradients if they are not; may be called any number of times.

        A clip that was left to the step is written too.

        Raises:
            RuntimeError: Called before ``scale()``.
            ValueError: A gradient is float16.
        """
        if self._enabled:
            self._state_for("ensure_unscaled", optimizer).unscale_(on_request=True)
        else:
            self._registry.state(optimizer).write_clip()

    def _state_for(self, call: str, optimizer: Optimizer) -> PerOptimizerState:
        self._scales.require(call)
        return self._registry.state(optimizer)

    @outside_graphs
    def clip_grad_norm_(
        self,
        optimizer_or_params: Optimizer | Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        fold: bool = False,
    ) -> Tensor:
        """Clip the norm of unscaled gradients, as ``torch.nn.utils.clip_grad_norm_`` does.

        Unscales them first if need be, and may be called any number of times::

            norm = || unscaled gradients ||_p          (over all ranks, float32, one pass)
            gradients *= min(1, max_norm / (norm + 1e-6))          (nothing is written if that is 1)

        Overflowed gradients are left as they are: the step will be skipped.

        Args:
            optimizer_or_params: An optimizer, or parameters of optimizers the scaler knows.
            max_norm: Largest norm.
            norm_type: The p of the norm; ``inf``, ``-inf`` and 0 included.
            error_if_nonfinite: Raise if the norm is not finite: a host sync.
            fold: With a fused optimizer, or a step in one pass, leave the factor to the step instead of
                writing gradients twice. For callers that do not look at ``.grad`` between this call and
                ``step()``: it is still scaled and not clipped there. Ignored where the optimizer cannot.

        Returns:
            The norm before clipping, float32, 0-dim, no host sync.

        Raises:
            RuntimeError: ``error_if_nonfinite`` and the norm is not; or the parameters' optimizer is unknown;
                or gradients have changed since a clip was folded.
            TypeError: An argument is something else.
            ValueError: ``max_norm`` is negative or nan.
        """
        limit = number("max_norm", max_norm, least=0)
        clip = NormClip(limit, number("norm_type", norm_type), error_if_nonfinite, fold)
        return clip_norm(self._registry, optimizer_or_params, clip)

    @outside_graphs
    def clip_grad_value_(
        self, optimizer_or_params: Optimizer | Tensor | Iterable[Tensor], clip_value: float
    ) -> None:
        """Clip every element of unscaled gradients, as ``torch.nn.utils.clip_grad_value_`` does.

        Args:
            optimizer_or_params: An optimizer, or parameters of optimizers the scaler knows.
            clip_value: Largest absolute value; infinities are clipped too, the step is skipped all the same.

        Raises:
            TypeError: An argument is something else.
            ValueError: ``clip_value`` is negative or nan.
        """
        limit = number("clip_value", clip_value, least=0)
        clip_gradient_values(self._registry, optimizer_or_params, limit)

    @outside_graphs
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, and call ``optimizer.step`` unless a gradient is not finite, also if nothing is scaled.

        Afterwards ``.grad`` is unscaled, and clipped if it was clipped, also after a skipped step.
        Steps in one pass and those of fused optimizers do not wait for the device, except the first of fused
        SGD with momentum; all others do. An optimizer without gradients steps as it would without a scaler.

        Args:
            optimizer: The optimizer.
            *args: For ``optimizer.step``; a callable first one is a closure.
            **kwargs: For ``optimizer.step``; ``closure`` may scale and run backward itself.

        Returns:
            What ``optimizer.step`` returns. A skipped step returns None or, where nothing is scaled, its
            closure's loss. :meth:`last_step` has the details.

        Raises:
            RuntimeError: Called twice without new gradients, or before ``scale()``; or hooks of the
                parameters took scaled gradients away.
            FloatingPointError: With ``on_nonfinite="raise"``: the step was skipped, and no lower loss scale
                would help; of a fused optimizer on CUDA as soon as the host knows.
        """
        if not (self._enabled or _is_optimizer(optimizer)):
            return optimizer.step(*args, **kwargs)  # as torch's: whatever has a step() passes
        return self._steps.step(optimizer, args, kwargs)

    @outside_graphs
    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return the result of the optimizer's last step.

        Raises:
            RuntimeError: It has not stepped yet.
        """
        result = self.result_of(optimizer)
        if result is None:
            msg = "last_step(): this optimizer has not stepped under this scaler; call step(optimizer) first"
            raise RuntimeError(msg)
        return result

    def result_of(self, optimizer: Optimizer) -> StepResult | None:
        """As :meth:`last_step`, but None if the optimizer has not stepped yet."""
        state = self._registry.find(optimizer)
        return None if state is None else state.result

    @outside_graphs
    def skipped_steps(self, optimizer: Optimizer | None = None) -> int:
        """Return how many steps were skipped, of one optimizer or (None) of all: a host sync."""
        if optimizer is None:
            return self.step_log.skipped_steps()
        state = self._registry.find(optimizer)
        return 0 if state is None else self.step_log.skipped_steps(state.optimizer)

    @outside_graphs
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Request the scale's update; see the class for when it is applied.

        Args:
            new_scale: Set this scale instead, at once; pending gradients are converted.

        Raises:
            RuntimeError: Called before ``scale()``.
            FloatingPointError: With ``on_min_scale="raise"``: an overflow at the floor; on CUDA
                one update later. With ``on_nonfinite="raise"``: as :meth:`step`.
        """
        self.step_log.read()
        if self._enabled:
            self._scales.require("update")
            if new_scale is None:
                self._units.request()
            else:
                self._units.set_scale(new_scale)

    @outside_graphs
    def end_iteration(self) -> None:
        """Apply a requested update now.

        For callers that know where an iteration ends (adapters). Gradients that are still pending are
        multiplied by new/old; float16 ones are not, the update waits for their step.

        Raises:
            FloatingPointError: As :meth:`update`.
        """
        if self._enabled:
            self._units.settle(force=True)

    @property
    def has_scaled(self) -> bool:
        """Whether a loss has been scaled yet."""
        return self._enabled and bool(self._scales.materialized())

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers it knows."""
        return [state.optimizer for state in self._registry]

    def optimizers_of(self, params: Iterable[Tensor]) -> list[Optimizer]:
        """Return the optimizers among them that step these parameters and no others."""
        params = list(params)
        owners = self._registry.owners(params)
        return [state.optimizer for state in owners if state.has_exactly(params)]

    def parameter_names(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters, in the order of its groups."""
        return self._registry.state(optimizer).parameter_names()

    def has_new_gradients(self, optimizer: Optimizer) -> bool:
        """Whether there are other gradients than those last unscaled or stepped with."""
        state = self._registry.state(optimizer)
        return any(gradients.is_renewed(state.number) for gradients in state.groups)

    def overflowed_before_closure(self, optimizer: Optimizer) -> bool:
        """Unscale what earlier micro-batches have left, and say whether it is not finite: a host sync."""
        return closures.overflowed_before(self._registry.state(optimizer), optimizer)

    def assume_unchanged(self, optimizer: Optimizer) -> None:
        """Promise that nothing has touched the optimizer's gradients since the last call for it.

        The next call then does not read them again. For callers that know that no user code has run since.
        """
        self._registry.state(optimizer).is_unchanged = True

    @outside_graphs
    def measure(self, optimizer: Optimizer, norm: Tensor | None = None) -> Tensor | None:
        """Measure gradients that carry no scale, for the optimizer's next result: one read, no host sync.

        Args:
            optimizer: DTensors' gradients are added up over their mesh, others over ``sharded_groups``.
            norm: Their norm (0-dim), where it is known already: nothing is read then.

        Returns:
            Their norm, float32, 0-dim; None if there are no gradients.
        """
        state = self._registry.state(optimizer)
        state.norm = norm
        if norm is None:
            state.begin_call()
            state.measure(unscale=False)
        return state.norm

    @outside_graphs
    def note_step(self, optimizer: Optimizer) -> StepResult:
        """Record a step taken without :meth:`step`, and return its result."""
        if not _is_optimizer(optimizer):
            return StepResult.unscaled()
        return self._steps.note(self._registry.state(optimizer), "it was taken without the scaler")

    @outside_graphs
    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers: a host sync.

        Applies a requested update first. torch.amp's scaler loads it too.

        Returns:
            ``{}`` if disabled; else ``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``,
            ``_growth_tracker`` as torch's, and ``amp_plugin`` with ``hysteresis_tracker``,
            ``skipped_steps`` and the states of named ``losses``.

        Raises:
            FloatingPointError: As :meth:`update`.
        """
        if not self._enabled:
            return {}
        self.end_iteration()
        return self._scales.state_dict(self.skipped_steps())

    @outside_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, ours or torch.amp's.

        A foreign state leaves the scaler as it is, with a warning. Gradients that wait for a step are
        converted to the loaded scale.

        Raises:
            KeyError: The state lacks some of torch's keys.
            RuntimeError: The state is empty, where torch's raises too; or a scaled float16 gradient waits.
        """
        if not (self._enabled and is_state(state_dict)):
            return
        with self._units.set_by_hand("load_state_dict()"):
            self.step_log.start_over(self._scales.load_state_dict(state_dict))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy between iterations: the same process groups; optimizers and gradients stay behind."""
        twin = type(self).__new__(type(self))
        twin.__setstate__({**copy.deepcopy(self._between_iterations(), memo), "_groups": self._groups})
        return twin

    def __copy__(self) -> Self:
        """As deepcopy: a scale cannot be shared."""
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle between iterations: optimizers and gradients stay behind."""
        if self._groups:
            msg = (
                "a GradScaler with process_groups or sharded_groups cannot be pickled, they belong to this "
                "process: save its state_dict() and load it into a scaler made with the new groups."
            )
            raise RuntimeError(msg)
        return self._between_iterations()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with the pickled numbers and no optimizers and no process groups."""
        self.__dict__.update({"_groups": Groups(), **state})
        self._start(self._new_log(self.__dict__.pop("_skipped_before", 0)))

    def _between_iterations(self) -> dict[str, Any]:
        """Return what is copied and pickled: all but process groups and what :meth:`_start` makes."""
        states = self._registry if self._enabled else ()
        if any(state.is_pending() or state.stage is not OptState.READY for state in states):
            msg = (
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at the "
                "end after scaler.update(): the units of gradients that wait for a step cannot be saved."
            )
            raise RuntimeError(msg)
        self.end_iteration()
        left = {*self._collaborators, "_groups"}
        kept = {name: value for name, value in vars(self).items() if name not in left}
        return {**kept, "_skipped_before": self.skipped_steps()}


def _is_optimizer(given: Any) -> bool:
    """Whether something has parameters that can be looked at: a mock or another engine has none."""
    return isinstance(getattr(given, "param_groups", None), list | tuple)


def _usable(device: str) -> bool:
    torch.device(device)  # raises for a device that there is not
    if device.startswith("cuda") and not torch.cuda.is_available():
        warn_user(
            "GradScaler(device='cuda') is disabled: CUDA is not available. "
            f"To scale on the CPU, {MISTAKES['AMP019'].instead}."
        )
        return False
    return True
