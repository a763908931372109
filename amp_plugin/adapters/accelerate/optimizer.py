"""Prepared optimizers: they step through the scaler, are clipped unscaled, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import OPTIMIZER_NAME, SCALER_NAME, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from amp_plugin.adapters.gradient_origins import GradientOrigins
from amp_plugin.kernels.tracers import outside_graphs
from amp_plugin.messages import warn_user
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of

Parameters = Optimizer | Tensor | Iterable[Tensor]


class Stepping:
    """How the optimizers of one accelerator step.

    ``stepped`` are those of the present iteration, which is over when one of them steps again: a skip counts
    until then, and never for an optimizer that did not step.
    """

    def __init__(self) -> None:
        self.scaler = GradScaler("cpu", enabled=False)  # steps them; disabled where nothing is scaled
        self.shown: Any = None  # the public attribute scaler; None unless fp16
        self.stepped: set[int] = set()
        self.is_plain = False  # they step without the scaler

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Step without the scaler, while checkpoints are saved and loaded.

        FSDP makes an optimizer's state by a step with zero gradients then (huggingface/accelerate#4289).
        """
        self.is_plain = True
        try:
            yield
        finally:
            self.is_plain = False


class AmpOptimizer(AcceleratedOptimizer):
    """What ``AmpAccelerator.prepare`` makes of an optimizer.

    ``step`` does nothing within an accumulation window; at its end it unscales, and steps or skips.
    """

    stepping: Stepping

    @classmethod
    def adopt(cls, prepared: AcceleratedOptimizer, stepping: Stepping) -> AmpOptimizer:
        """Turn an optimizer that Accelerate has prepared into one of ours."""
        vars(prepared).pop("scaler")  # Accelerate's own, in place of which there is a property
        prepared.__class__ = cls
        ours: AmpOptimizer = prepared
        ours.stepping = stepping
        return ours

    @property
    def scaler(self) -> Any:
        """The accelerator's ``scaler``; None unless fp16."""
        return self.stepping.shown

    @scaler.setter
    def scaler(self, given: Any) -> None:
        """Change nothing: what steps is the accelerator's, for which programs assign both."""

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step or skip at the end of an accumulation window.

        Args:
            closure: runs forward and ``accelerator.backward``, returns the loss; may be called more
                than once (LBFGS). Its gradients are unscaled before the optimizer sees them.

        Returns:
            What the optimizer's ``step`` returns; None within a window or if the step was skipped.
        """
        stepping, arguments = self.stepping, [] if closure is None else [closure]
        if stepping.is_plain:
            return self.optimizer.step(*arguments)
        if not self.gradient_state.sync_gradients:
            return None
        if closure is None:
            refuse_before_backward(stepping.scaler, "optimizer.step()")
        value = stepping.scaler.step(self.optimizer, *arguments)
        stepping.scaler.update()
        self._is_overflow = False
        if id(self) in stepping.stepped:
            stepping.stepped.clear()
        stepping.stepped.add(id(self))
        return value

    @property
    def step_was_skipped(self) -> bool:
        """Whether this optimizer's step was skipped in the present iteration.

        Of a fused optimizer on a GPU the host learns it one step later, unless ``exact_schedulers``. As in
        Accelerate, code that steps elsewhere sets ``_is_overflow`` to say that its step was skipped.
        """
        stepped = id(self) in self.stepping.stepped
        held = stepped and self.stepping.scaler.step_log.holds_schedulers(self.optimizer)
        return held or bool(self._is_overflow)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no steps taken, the optimizer known to the scaler."""
        self.__dict__.update(state)
        self.stepping.scaler.register(self.optimizer)


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is LOMO, which steps in ``backward``: its ``step`` does nothing."""
    return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__)


class Unprepared(GradientOrigins):
    """Refuses scaled gradients to optimizers that were not prepared.

    Parameters that no prepared optimizer has are watched; in most programs there are none.
    """

    leaves_gradients = leaves_steps = True  # else no prepared optimizer steps in one pass

    def __init__(self) -> None:
        super().__init__()
        self._looked_at: tuple[int, int] = (0, 0)  # models, optimizers
        self._step_hook: RemovableHandle | None = None

    @contextmanager
    def watching(self, models: Sequence[nn.Module], scaler: GradScaler) -> Iterator[None]:
        """Learn which parameters of no optimizer of the scaler a backward brings gradients to."""
        if self._looked_at != (len(models), len(scaler.optimizers)):
            known = {id(param) for optimizer in scaler.optimizers for param in params_of(optimizer)}
            params = [param for model in models for param in model.parameters() if id(param) not in known]
            self.release()
            self._looked_at = len(models), len(scaler.optimizers)
            self.watch(params)
            if params:
                self._step_hook = register_optimizer_step_pre_hook(self)
        with self.inside():
            yield

    def release(self) -> None:
        """Look at no optimizer any more."""
        self.unwatch()
        self._looked_at = (0, 0)
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Run before the step of any optimizer."""
        scaled = sum(map(self.is_scaled, params_of(optimizer)))
        if scaled:
            msg = (
                f"{type(optimizer).__name__}.step(): {scaled} gradients are multiplied by "
                "the loss scale, and this optimizer was not prepared: call optimizer = "
                "accelerator.prepare(optimizer), or keep its parameters out of prepared models"
            )
            raise RuntimeError(msg)


# -- gradients -----------------------------------------------------------------------------------


def parameters_of(given: Parameters) -> list[Tensor]:
    """Return the parameters of an optimizer, or those given as such."""
    if isinstance(given, Optimizer):
        return list(params_of(given))
    return [given] if isinstance(given, Tensor) else list(given)


def clip_norm(
    scaler: GradScaler, params: list[Tensor], max_norm: float, norm_type: float, *, fold: bool
) -> Tensor:
    """Clip the norm of unscaled gradients, and return it as it was before (0-dim, fp32).

    With ``fold`` the clip is left to the step if these are one optimizer's parameters.
    """
    owners = scaler.optimizers_of(params) if fold else []
    target = owners[0] if len(owners) == 1 else params
    with _in_words_of_accelerate(scaler, params, "clip_grad_norm_()"):
        return scaler.clip_grad_norm_(target, max_norm, norm_type, fold=fold)


def clip_value(scaler: GradScaler, params: list[Tensor], largest: float) -> None:
    """Clip each element of unscaled gradients to [-largest, largest]."""
    with _in_words_of_accelerate(scaler, params, "clip_grad_value_()"):
        scaler.clip_grad_value_(params, largest)


def norm_so_far(scaler: GradScaler, params: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of the gradients within an accumulation window, unscaled (0-dim)."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
    scale = scaler.loss_scale.value
    return norm if scale is None else norm / scale


def refuse_before_backward(scaler: GradScaler, call: str) -> None:
    """Raise RuntimeError if no loss has been scaled yet: gradients, if any, came from a loss that was not."""
    if scaler.is_enabled() and not scaler.has_scaled:
        msg = (
            f"{call} before any accelerator.backward(loss): fp16 needs its scaled loss; "
            "write accelerator.backward(loss) instead of loss.backward()"
        )
        raise RuntimeError(msg)


@contextmanager
def _in_words_of_accelerate(scaler: GradScaler, params: list[Tensor], call: str) -> Iterator[None]:
    """Let the scaler's errors say what to do in Accelerate: no loss scaled yet, an optimizer not prepared."""
    refuse_before_backward(scaler, call)
    try:
        yield
    except RuntimeError:
        known = {id(param) for optimizer in scaler.optimizers for param in params_of(optimizer)}
        foreign = sum(param.grad is not None and id(param) not in known for param in params)
        if not foreign:
            raise
        msg = (
            f"{call}: {foreign} of the {len(params)} parameters belong to no prepared optimizer, so that in "
            "fp16 the scale of their gradients is unknown; call optimizer = accelerator.prepare(optimizer) "
            "for the one that steps them, or clip the parameters of prepared optimizers only"
        )
        raise RuntimeError(msg) from None


# -- checkpoints ---------------------------------------------------------------------------------


def load_loss_scale(scaler: GradScaler, folder: Path) -> None:
    """Load the loss scale of a checkpoint; warn if it has none and keep the present one."""
    if not scaler.is_enabled():
        return
    file = folder / SCALER_NAME
    if file.is_file():
        scaler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return
    warn_user(
        f"the checkpoint {folder} has no {SCALER_NAME}, it was not saved in fp16; "
        f"the loss scale stays at {scaler.get_scale():g}"
    )


def warn_of_lost_states(
    plugin: FullyShardedDataParallelPlugin, optimizers: Iterable[Optimizer], folder: Path
) -> None:
    """Warn where a checkpoint of FSDP1 in shards has left a new optimizer without its state.

    torch reads from such a checkpoint what is there to be filled, and Accelerate asks the optimizer.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 -- loads torch.distributed
    from torch.distributed.fsdp import StateDictType  # noqa: PLC0415

    if plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT:
        return
    for index, optimizer in enumerate(optimizers):
        saved = FileSystemReader(folder / f"{OPTIMIZER_NAME}_{index}").read_metadata().state_dict_metadata
        if not optimizer.state and any(key.startswith("optimizer.state.") for key in saved):
            warn_user(
                f"the optimizer's state in {folder} is not loaded, and the optimizer starts without one: "
                "a checkpoint of FSDP1 in shards cannot fill a new optimizer; use fsdp_version=2, which can"
            )
