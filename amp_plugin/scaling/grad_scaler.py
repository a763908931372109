"""GradScaler scales losses, unscales gradients, and skips optimizer steps whose gradients overflow."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from typing_extensions import Self

from amp_plugin.hardware import in_widest_float
from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.tracers import outside_graphs
from amp_plugin.messages import warn_user
from amp_plugin.mistakes import MISTAKES
from amp_plugin.options import GradScalerOptions, LossScaleOptions, lists_options, loss_scale_options, takes
from amp_plugin.removed import removed_attribute, without_removed_keywords
from amp_plugin.scaling import clipping, updates
from amp_plugin.scaling.core import ScalerCore, is_optimizer
from amp_plugin.scaling.loss_scale import is_state, scale_outputs
from amp_plugin.scaling.optimizer_state import OptimizerState
from amp_plugin.scaling.overflows import checked_names
from amp_plugin.scaling.plans import is_fused, takes_scaler
from amp_plugin.scaling.ranks import Ranks
from amp_plugin.scaling.shared import Shared
from amp_plugin.scaling.step_log import StepLog, StepResult, raise_for_nonfinite, tell_of_floor
from amp_plugin.scaling.step_records import StepRecorder
from amp_plugin.scaling.steps import refuse_nothing_checked, take_step, take_step_by
from amp_plugin.scaling.torch_names import TorchNames

T = TypeVar("T")

_MAY_BE_OVERRIDDEN: Final = ("step", "unscale_", "_unscale_grads_", "_maybe_opt_step")
"""Methods that a step calls if a subclass or the program has replaced them."""

_COLLABORATORS: Final = ("core", "_records")

_UNSCALED_TWICE: Final = (
    "unscale_() has already been called on this optimizer since the last update(): "
    f"{MISTAKES['AMP007'].instead}. Clips and steps unscale by themselves if need be."
)

_PASSED_ITSELF: Final = (
    "GradScaler passes itself to this optimizer's step(grad_scaler=). torch will drop that argument: let "
    "step() read the tensors grad_scale and found_inf, which the scaler sets on the optimizer."
)

_UNSCALED_LATE: Final = (
    "unscale_() is being called after step(), and update() has not been called since that step: "
    f"{MISTAKES['AMP004'].instead}; {MISTAKES['AMP007'].instead}."
)

_IN_AN_ITERATION: Final = (
    "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end after "
    "scaler.update(): scaled gradients wait for a step now, and their scale cannot be saved."
)


@lists_options(GradScalerOptions)
class GradScaler(TorchNames):
    """Scale losses, unscale gradients, and skip optimizer steps whose gradients overflow.

    This class replaces :class:`torch.amp.GradScaler`, has the same methods, and gives the same numbers. In
    addition, each gradient is divided exactly once by the loss scale of its loss, no matter how many
    optimizers, losses and calls there are::

        scale(loss)       Apply a requested update, and return the loss times the loss scale.
        backward()        First, rescale gradients of earlier backward passes to the loss scale of this pass.
        step(optimizer)   Unscale the gradients, and step if all gradients on all ranks are finite.
        update()          Request an update. The loss scale changes once all registered optimizers with new
                          gradients have stepped. end_iteration(), get_scale() and the next scale()
                          change the loss scale at once, and multiply unused scaled gradients by new/old.

    Args:
        {options}

    Raises:
        TypeError: An option is unknown, or its value has the wrong type.
        ValueError: A number is out of range, or a string is not an allowed value.

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

    @takes(GradScalerOptions)
    def __init__(self, **given: Any) -> None:
        options = GradScalerOptions(**given)
        device = str(options.device)
        rule = LossScaleOptions(**loss_scale_options(options))
        ranks = Ranks(options.process_groups, options.sharded_groups)
        enabled = options.enabled and _usable(device)
        self._start(Shared(rule, options.losses, ranks, device=device, enabled=enabled), skipped_before=0)

    def _start(self, shared: Shared, skipped_before: int) -> None:
        """Create the objects that are neither copied nor pickled with the scaler."""
        log, options = StepLog(skipped_before), shared.options
        if options.on_nonfinite == "raise":
            log.subscribe(raise_for_nonfinite(max(1.0, options.floor) if options.dynamic else math.inf))
        raises = options.on_min_scale == "raise"
        if options.dynamic and (raises or options.min_scale is not None):
            log.subscribe(tell_of_floor(options.floor, raises=raises))
        log.subscribe(partial(shared.spikes.raise_for_spike, shared.end_stages))
        StepRecorder(options.log).follow(log)
        self._take_core(ScalerCore(shared, log))
        if shared.enabled:
            native_core()

    def scale(self, outputs: T, *, name: str | None = None) -> T:
        """Multiply a loss, or every tensor of a container of losses, by the loss scale.

        A requested update is applied first. There is no host sync.

        Args:
            outputs: A tensor, or a list, tuple, named tuple, dict or other iterable of tensors.
            name: The name of the loss scale to multiply by. It must be a name in the option ``losses``.

        Returns:
            The same structure with scaled tensors. A float16 tensor becomes float32, so that the product does
            not overflow.

        Raises:
            FloatingPointError: As :meth:`update`.
            ValueError: ``outputs`` contains no tensors, or ``name`` is unknown.
        """
        if not torch.compiler.is_compiling():
            self.core.note_loss(outputs)
        if not self.is_enabled():
            return outputs
        watched = bool(name or len(self.core.shared.scales) > 1 or self.core.shared.awaits_update)
        # As in torch's scaler, no hook records the backward pass of a loss in compiled code.
        if torch.compiler.is_compiling() and not watched:
            return cast("T", scale_outputs(outputs, self.loss_scale.multiply_in_graph))
        return self._scale_watched(outputs, name)

    @outside_graphs
    def _scale_watched(self, outputs: T, name: str | None) -> T:
        loss_scale = self.core.shared.scale_of(name)
        updates.settle(self.core, force=True)

        def apply(tensor: Tensor) -> Tensor:
            scaled = loss_scale.multiply(tensor)
            updates.watch(self.core, scaled, loss_scale)
            return scaled

        return cast("T", scale_outputs(outputs, apply))

    @outside_graphs
    def register(self, *optimizers: Optimizer, names: Any = None) -> None:
        """Register optimizers before their first step.

        A plain loop with one optimizer does not need this method. With several optimizers, the loss scale
        changes only after every registered optimizer has used its scaled gradients.

        Args:
            *optimizers: The optimizers.
            names: A module, the pairs of ``module.named_parameters()``, or a mapping of names to parameters.
                Overflow reports use these names.

        Raises:
            TypeError: An argument is not an optimizer, or ``names`` has a type that is not allowed.
            ValueError: One of the optimizers has no parameter in ``names``.
        """
        named = checked_names(names)
        own = {id(param) for param in named.values()}
        for state in self.core.add(optimizers):
            if named and state.params and own.isdisjoint(map(id, state.params)):
                msg = (
                    f"register(names=...): none of the {len(named)} names is of a parameter of this "
                    f"{type(state.optimizer).__name__}; give the module that it optimizes"
                )
                raise ValueError(msg)
            state.add_names(named)

    @outside_graphs
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by their loss scale, in place.

        The pass that divides the gradients also measures their norm and finds overflows. There is no host
        sync. If a later backward pass adds to the gradients, they are unscaled again after that pass.

        Raises:
            RuntimeError: This method was called twice, or after ``step()``, without new gradients.
            AssertionError: No loss has been scaled yet. As in torch.
            ValueError: A gradient is float16.
        """
        if not self.is_enabled():
            return
        state = self._state_for("unscale_", optimizer)
        if state.stage is OptState.UNSCALED and not state.is_awaited:
            raise RuntimeError(_UNSCALED_TWICE)
        if self.core.is_step_refused(state):
            raise RuntimeError(_UNSCALED_LATE)
        if not self._is_overridden("_unscale_grads_"):
            state.unscale_()
            return

        def unscale(scale: Tensor) -> dict[Any, Tensor]:
            wide = in_widest_float(scale)
            inverse = wide.reciprocal().float()
            allowed = self.core.shared.options.fp16_gradients
            found = self._unscale_grads_(optimizer, inverse, torch.zeros_like(scale), allowed)
            return cast("dict[Any, Tensor]", found)

        state.unscale_by(unscale)

    def _is_overridden(self, name: str) -> bool:
        """Return whether a subclass or the program has replaced a method."""
        return name in vars(self) or getattr(type(self), name) is not getattr(GradScaler, name)

    def _step_as_overridden(
        self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, StepResult] | None:
        """Call the program's own methods at the points where ``torch.amp.GradScaler.step()`` calls them.

        Returns:
            The result of the program's ``_maybe_opt_step``; None if the step has not been taken yet.
        """
        unscales = self._is_overridden("unscale_") or self._is_overridden("_unscale_grads_")
        steps = self._is_overridden("_maybe_opt_step")
        has_closure = "closure" in kwargs or callable(next(iter(args), None))
        if not (unscales or steps) or not self.is_enabled() or is_fused(optimizer) or has_closure:
            return None
        state = self._state_for("step", optimizer)
        refuse_nothing_checked(self.core, state)
        if state.stage is OptState.READY:
            self.unscale_(optimizer)
        if not steps:
            return None
        record: Any = self._records[id(state.optimizer)]
        return take_step_by(
            self.core, state, partial(self._maybe_opt_step, optimizer, record, *args, **kwargs)
        )

    def _state_for(self, call: str, optimizer: Optimizer) -> OptimizerState:
        self.core.shared.require_scale(call, optimizer)
        self._records.meet(optimizer)
        return self.core.state(optimizer)

    @without_removed_keywords
    @outside_graphs
    def clip_grad_norm_(
        self,
        optimizer_or_params: Optimizer | Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the norm of unscaled gradients, as ``torch.nn.utils.clip_grad_norm_`` does.

        Scaled gradients are unscaled first. This method may be called any number of times::

            norm = || unscaled gradients ||_p          (over all ranks, float32, one pass)
            gradients *= min(1, max_norm / (norm + 1e-6))          (nothing is written if the factor is 1)

        If a gradient is not finite, no gradient is clipped, because the step will be skipped.

        Args:
            optimizer_or_params: An optimizer, or parameters that belong to optimizers known to the scaler.
            max_norm: Largest norm.
            norm_type: The p of the p-norm. ``inf``, ``-inf`` and 0 are allowed.
            error_if_nonfinite: True to raise if the norm is not finite. This is a host sync.

        Returns:
            The norm before clipping (float32, 0-dim). There is no host sync.

        Raises:
            RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set. Also raised if no known
                optimizer has these parameters.
            TypeError: An argument has the wrong type.
            ValueError: ``max_norm`` is negative or nan.
        """
        clip = clipping.NormClip.of(max_norm, norm_type, error_if_nonfinite)
        return clipping.clip_norm(self.core, optimizer_or_params, clip)

    @outside_graphs
    def clip_grad_value_(
        self, optimizer_or_params: Optimizer | Tensor | Iterable[Tensor], clip_value: float
    ) -> None:
        """Clip every element of unscaled gradients, as ``torch.nn.utils.clip_grad_value_`` does.

        Args:
            optimizer_or_params: An optimizer, or parameters that belong to optimizers known to the scaler.
            clip_value: Largest absolute value. Infinite elements are clipped too, but the step is still
                skipped.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: ``clip_value`` is negative or nan.
        """
        limit = clipping.number("clip_value", clip_value, least=0)
        clipping.clip_value(self.core, optimizer_or_params, limit)

    @outside_graphs
    def clip_and_step(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        closure: Callable[[], Any] | None = None,
    ) -> StepResult:
        """Clip the norm of the unscaled gradients and step, in one pass over the gradients where possible.

        Afterwards, weights and gradients are the same as after :meth:`clip_grad_norm_` and :meth:`step`::

            norm = || unscaled gradients ||_p         (over all ranks, float32, one read)
            step with gradients * min(1, max_norm / (norm + 1e-6))     (one pass, skipped on overflow)

        Any optimizer is allowed. If no kernel can step the optimizer in one pass, the gradients are clipped
        in place before the optimizer's own step. To clip the gradients of several optimizers by
        their common norm, call :meth:`clip_grad_norm_`, and then step each optimizer.

        Args:
            optimizer: The optimizer.
            max_norm: Largest norm.
            norm_type: The p of the p-norm. ``inf``, ``-inf`` and 0 are allowed.
            error_if_nonfinite: True to raise if the norm is not finite. This is a host sync. The error is
                raised before weights or gradients are changed. If there is a closure, ``.grad`` then holds
                the gradients from its last call.
            closure: As for the optimizer's ``step``. The gradients of each call are clipped.

        Returns:
            The result of the step. ``norm`` is the norm before clipping, and ``clipped_norm`` the norm after
            it (float32, 0-dim). No host sync.

        Raises:
            RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set. Also raised for the
                reasons listed in :meth:`step`.
            AssertionError: As :meth:`step`.
            TypeError: An argument has the wrong type.
            ValueError: ``max_norm`` is negative or nan.
            FloatingPointError: As :meth:`step`.

        Example:
            >>> import torch
            >>> from amp_plugin import GradScaler
            >>> weight = torch.nn.Parameter(torch.ones(4))
            >>> optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler("cpu")
            >>> scaler.scale((3.0 * weight).sum()).backward()
            >>> result = scaler.clip_and_step(optimizer, max_norm=1.0)
            >>> scaler.update()
            >>> [round(number.item(), 5) for number in (result.norm, result.clipped_norm, weight[0])]
            [6.0, 1.0, 0.5]
        """
        if closure is None and (takes_scaler(optimizer) or any(map(self._is_overridden, _MAY_BE_OVERRIDDEN))):
            if self.is_enabled() and self._state_for("clip_and_step", optimizer).stage is OptState.READY:
                self.unscale_(optimizer)
            self.clip_grad_norm_(optimizer, max_norm, norm_type, error_if_nonfinite)
            self.step(optimizer)
            return self.last_step(optimizer)
        clip = clipping.NormClip.of(max_norm, norm_type, error_if_nonfinite)
        kwargs = {} if closure is None else {"closure": closure}
        return take_step(self.core, optimizer, (), kwargs, clip)[1]

    @outside_graphs
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, and call ``optimizer.step`` if all gradients are finite.

        A disabled scaler checks gradients too. After this call, ``.grad`` contains the unscaled and clipped
        gradients, even if the step was skipped.

        One-pass steps and steps of fused optimizers do not wait for the device, except for the first step of
        fused SGD with momentum. All other steps wait for the device. An optimizer without gradients is
        allowed to step if another optimizer of this scaler has gradients.

        Args:
            optimizer: The optimizer.
            *args: Passed to ``optimizer.step``. If the first argument is callable, it is used as the closure.
            **kwargs: Passed to ``optimizer.step``. A ``closure`` scales its loss and runs backward itself.

        Returns:
            The result of ``optimizer.step``. A skipped step returns None. If no loss is scaled, a skipped
            step with a closure returns the loss. :meth:`last_step` returns the details.

        Raises:
            RuntimeError: This method was called twice without new gradients.
            AssertionError: No loss has been scaled yet, or no optimizer has a gradient. As in torch.
            FloatingPointError: With ``on_min_scale="raise"``, the step was skipped at the smallest scale.
                With ``on_nonfinite="raise"``, the step was skipped, and a lower loss scale would not help. On
                a GPU the error is raised by a later call, once the host knows that the step was skipped.
        """
        if not (self.is_enabled() or is_optimizer(optimizer)):
            # As in torch, any object with a ``step()`` method is accepted.
            return optimizer.step(*args, **kwargs)
        self._records.meet(optimizer)
        if self.is_enabled() and takes_scaler(optimizer):
            warnings.warn(_PASSED_ITSELF, FutureWarning, stacklevel=2)
            kwargs = {**kwargs, "grad_scaler": self}
        stepped = self._step_as_overridden(optimizer, args, kwargs)
        return (stepped or take_step(self.core, optimizer, args, kwargs))[0]

    @outside_graphs
    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return the result of the optimizer's last step.

        Raises:
            RuntimeError: The optimizer has not stepped yet.
        """
        result = self.core.result_of(optimizer)
        if result is None:
            msg = "last_step(): this optimizer has not stepped under this scaler; call step(optimizer) first"
            raise RuntimeError(msg)
        return result

    @outside_graphs
    def landed(self, optimizer: Optimizer, *, wait: bool = True) -> bool:
        """Return True if the optimizer's last step was taken, and False if it was skipped.

        Use this method for weight averaging, target networks and counters, as in the example.

        Args:
            optimizer: The optimizer, after its step.
            wait: If True, the host waits for the device after a one-pass or fused step on a GPU (a host
                sync). If False, the host never waits, and may find out about a skipped step one step late. In
                that case, ``landed`` returns True after the skipped step and False after a later step.
                ``landed`` still returns False exactly once for each skipped step.

        Raises:
            RuntimeError: The optimizer has not stepped yet.

        Example:
            >>> import torch
            >>> from amp_plugin import GradScaler
            >>> model, scaler = torch.nn.Linear(2, 1), GradScaler("cpu")
            >>> average = torch.optim.swa_utils.AveragedModel(model)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> for batch in (torch.ones(2), torch.full((2,), torch.inf)):
            ...     optimizer.zero_grad()
            ...     loss = model(batch).sum()
            ...     scaler.scale(loss).backward()
            ...     value = scaler.step(optimizer)
            ...     if scaler.landed(optimizer):
            ...         average.update_parameters(model)
            ...     scaler.update()
            >>> int(average.n_averaged)
            1
        """
        result = self.last_step(optimizer)
        if wait:
            return not result.skipped
        return not self.core.log.holds_schedulers(self.core.state(optimizer).optimizer)

    @outside_graphs
    def skipped_steps(self, optimizer: Optimizer | None = None) -> int:
        """Return the number of skipped steps of one optimizer; None means all optimizers. Host sync."""
        if optimizer is None:
            return self.core.log.skipped_steps()
        state = self.core.find(optimizer)
        return 0 if state is None else self.core.log.skipped_steps(state.optimizer)

    @outside_graphs
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Request an update of the loss scale. The class says when it is applied.

        Args:
            new_scale: Set this loss scale at once. Scaled gradients that no optimizer has used yet are
                multiplied by the ratio of the new to the old loss scale.

        Raises:
            AssertionError: No loss has been scaled yet. Also raised if ``new_scale`` is None and no gradient
                has been unscaled, clipped or used by a step since the last update. torch.amp raises the same
                error.
            FloatingPointError: An earlier step was skipped, and the host has only now learned of the skip.
                :meth:`step` lists the conditions for this error.
        """
        shared = self.core.shared
        self.core.log.read()
        if shared.enabled:
            shared.require_scale("update")
            self._records.settle(keep=shared.awaits_update)
            if new_scale is None:
                updates.request(self.core)
            else:
                updates.set_scale(self.core, new_scale)

    @outside_graphs
    def end_iteration(self) -> None:
        """Apply a requested update now.

        The adapters for Lightning and Accelerate call this method at the end of each iteration. Scaled
        gradients that no optimizer has used yet are multiplied by the ratio of the new to the old loss scale.
        If one of these gradients is float16, the loss scale changes only after the optimizer has stepped.

        Raises:
            FloatingPointError: As :meth:`update`.
        """
        if self.is_enabled():
            updates.settle(self.core, force=True)

    @outside_graphs
    def get_scale(self, name: str | None = None) -> float:
        """Return the loss scale as a Python float; 1.0 if disabled. This is a host sync.

        A requested update of the loss scale is applied first, as in :meth:`end_iteration`.

        Args:
            name: A name in the option ``losses``; None for the default loss scale.

        Raises:
            FloatingPointError: As :meth:`update`.
        """
        self.end_iteration()
        return self.core.shared.scale_of(name).item() if self.is_enabled() else 1.0

    @outside_graphs
    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers. This is a host sync.

        A requested update is applied first. ``torch.amp.GradScaler`` can load the returned state.

        Returns:
            ``{}`` if disabled; else ``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` and
            ``_growth_tracker``, as in torch. The key ``amp_plugin`` is added if a step was skipped, or if one
            of the options ``hysteresis``, ``losses`` and ``on_spike`` is set. The value of this key contains
            ``hysteresis_tracker``, ``skipped_steps``, the states of named ``losses`` and, with ``on_spike``,
            the statistics of each optimizer as ``spikes``. A disabled scaler with ``on_spike`` returns only
            the statistics of spikes.

        Raises:
            FloatingPointError: As :meth:`update`.
        """
        self.end_iteration()
        return self.core.shared.state_dict(self.skipped_steps())

    @outside_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, ours or torch.amp's.

        If the dict is not the state of a scaler, a warning is issued and nothing is loaded. Scaled gradients
        that no optimizer has used yet are converted to the loaded loss scale.

        Raises:
            KeyError: The state lacks some of torch's keys.
            RuntimeError: ``state_dict`` is empty, which is also an error in torch.amp. Also raised if a
                scaled float16 gradient has not been used by an optimizer yet.
        """
        if not self.is_enabled():
            self.core.shared.load_spikes(state_dict)
            return
        if not is_state(state_dict):
            return
        with updates.set_by_hand(self.core, "load_state_dict()"):
            self.core.log.start_over(self.core.shared.load_state_dict(state_dict))

    def __copy__(self) -> Self:
        """Return a deep copy, because two scalers cannot share a loss scale."""
        return copy.deepcopy(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled or deep-copied numbers. The new scaler knows no optimizer.

        A deep copy uses the same process groups.
        """
        state = dict(state)
        shared, skipped_before = state.pop("_shared"), state.pop("_skipped_before")
        self.__dict__.update(state)
        self._start(shared, skipped_before)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except those that :meth:`_start` creates.

        Raise RuntimeError if called in the middle of an iteration.
        """
        shared = self.core.shared
        states = self.core if shared.enabled else ()
        if any(state.ledger.waits() or state.stage is not OptState.READY for state in states):
            raise RuntimeError(_IN_AN_ITERATION)
        self.end_iteration()
        own = {name: value for name, value in vars(self).items() if name not in _COLLABORATORS}
        return {**own, "_shared": shared, "_skipped_before": self.skipped_steps()}


def _usable(device: str) -> bool:
    torch.device(device)  # raises if the device does not exist
    if device.startswith("cuda") and not torch.cuda.is_available():
        warn_user(
            "GradScaler(device='cuda') is disabled: CUDA is not available. "
            f"To scale on the CPU, {MISTAKES['AMP019'].instead}."
        )
        return False
    return True
