"""The scaler of an adapter: what may replace it, what it names, whose gradients it scaled, endless skips."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of
from amp_plugin.scaling.step_log import StepResult

_ANOMALY: Final = "returned nan values in its"  # of torch's error
_WRAPPERS: Final = {"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"}


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer that a framework has wrapped, or the one given."""
    while any(kind.__name__ in _WRAPPERS for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def register(scaler: GradScaler, optimizers: Iterable[Optimizer], models: Sequence[nn.Module]) -> None:
    """Register optimizers, with the names of their parameters in these models: ``Critic[1].layer.weight``."""
    named: dict[str, Tensor] = {}
    for place, model in enumerate(models):
        prefix = f"{type(model).__name__}[{place}]." if len(models) > 1 else ""
        named |= {prefix + name: param for name, param in model.named_parameters()}
    for optimizer in optimizers:
        own = {id(param) for param in params_of(optimizer)}
        names = {name: param for name, param in named.items() if id(param) in own}
        scaler.register(optimizer, names=names)


def scaler_groups(*models: nn.Module) -> dict[str, Any]:
    """Return the groups of ranks that step together under FSDP1, and whether each holds whole gradients."""
    root = next((model for model in models if isinstance(model, FullyShardedDataParallel)), None)
    if root is None or root.process_group is None:
        return {}
    group, whole = (root.process_group,), root.sharding_strategy.name == "NO_SHARD"
    return {"process_groups": group if whole else (), "sharded_groups": () if whole else group}


@contextmanager
def anomalies_explained(scaler: Any) -> Iterator[None]:
    """Say of an error of torch's anomaly detection that the loss scale may be all there is to it.

    A dynamic loss scale is found by gradients that overflow. Anomaly detection takes the first of them for a
    fault of the program, and ends a run that is sound.
    """
    try:
        yield
    except RuntimeError as error:
        if not (torch.is_anomaly_enabled() and _ANOMALY in str(error) and scaler.is_enabled()):
            raise
        msg = (
            f"{error} The loss scale is {scaler.get_scale():g}, and it may be the only reason: the scale is "
            "found by gradients that overflow, which are skipped. Run without anomaly detection; "
            "`amp-plugin diagnose train.py` finds a nan that has another reason. Or lower init_scale."
        )
        raise RuntimeError(msg) from error


class StepNorms:
    """The norms of unscaled gradients, before clipping, of steps taken since they were last asked for."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[StepResult]] = []  # weakly: a result holds parameters

    def among(self, results: Iterable[StepResult | None]) -> dict[str, Tensor] | None:
        """Return ``grad_norm``, of several optimizers ``grad_norm/0``, ..., 0-dim; None if none stepped."""
        before, last = [seen() for seen in self._seen], list(results)
        self._seen = [weakref.ref(result) for result in last if result is not None]
        new = {place: result for place, result in enumerate(last) if result and result not in before}
        name = "grad_norm" if len(last) == 1 else "grad_norm/{}"
        norms = {name.format(place): result.norm for place, result in new.items() if result.norm is not None}
        return norms if new else None

    def __reduce__(self) -> tuple[type[StepNorms], tuple[()]]:
        """Copy and pickle without the results: they hold on to their optimizers."""
        return StepNorms, ()


class GradientOrigins:
    """Knows by hooks whether a backward pass within :meth:`inside` has made the gradients of parameters."""

    def __init__(self) -> None:
        self._is_inside = False
        self._reached: list[Tensor] = []  # parameters, by the present pass inside
        self._inside: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # gradients with their versions
        self._outside: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watch these parameters, and no others any more."""
        self.unwatch()
        distinct: dict[int, Any] = {id(param): param for param in params if param.requires_grad}
        with torch._C.DisableTorchFunctionSubclass():  # which refuses hooks on lazy parameters
            hook = self._note
            self._handles = [param.register_post_accumulate_grad_hook(hook) for param in distinct.values()]

    def unwatch(self) -> None:
        """Watch no parameter any more."""
        while self._handles:
            self._handles.pop().remove()
        self._inside.clear()
        self._outside.clear()

    def _note(self, param: Tensor) -> None:
        if self._is_inside:
            self._reached.append(param)
        elif param.grad is not None:
            self._outside[id(param)] = weakref.ref(param.grad)

    _note.keeps_gradients = True  # type: ignore[attr-defined] # else the scaler watches for gradients it takes

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Take what is made within for gradients of a scaled loss."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before
            while self._reached:  # DDP writes to gradients after the hook
                param = self._reached.pop()
                if param.grad is not None:
                    self._inside[id(param)] = weakref.ref(param.grad), param.grad._version

    def is_scaled(self, param: Tensor) -> bool:
        """Whether a pass inside has made its gradient, and nobody has written to it since."""
        made, version = self._inside.get(id(param), (None, 0))
        grad = param.grad
        return made is not None and grad is not None and made() is grad and version == grad._version

    def is_from_outside(self, param: Tensor) -> bool:
        """Whether a pass outside has made or added to its gradient."""
        made = self._outside.get(id(param))
        return made is not None and param.grad is not None and made() is param.grad

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without what is watched: it belongs to this process."""
        return type(self), ()


class Unprepared(GradientOrigins):
    """Refuses scaled gradients to optimizers that were not prepared; in most programs there are none."""

    leaves_gradients = leaves_steps = True  # else no prepared optimizer steps in one pass

    def __init__(self) -> None:
        super().__init__()
        self._looked_at: tuple[int, int] = (0, 0)  # models, optimizers
        self._step_hook = ExitStack()
        self._scaler: Callable[[], GradScaler | None] = lambda: None

    @contextmanager
    def watching(self, models: Sequence[nn.Module], scaler: GradScaler) -> Iterator[None]:
        """Learn which parameters of no optimizer of the scaler a backward brings gradients to."""
        if self._looked_at != (len(models), len(scaler.optimizers)):
            known = {id(param) for optimizer in scaler.optimizers for param in params_of(optimizer)}
            params = [param for model in models for param in model.parameters() if id(param) not in known]
            self.release()
            self._looked_at = len(models), len(scaler.optimizers)
            self._scaler = weakref.ref(scaler, lambda _: self.release())
            self.watch(params)
            if params:
                self._step_hook.callback(register_optimizer_step_pre_hook(self).remove)
        with self.inside():
            yield

    def release(self) -> None:
        """Look at no optimizer any more."""
        self.unwatch()
        self._looked_at = (0, 0)
        self._step_hook.close()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Run before the step of any optimizer."""
        scaler = self._scaler()
        if scaler is None or any(known is optimizer for known in scaler.optimizers):
            return
        if scaled := sum(map(self.is_scaled, params_of(optimizer))):
            msg = (
                f"{type(optimizer).__name__}.step(): {scaled} gradients are multiplied by "
                "the loss scale, and this optimizer was not prepared: step the one that "
                "accelerator.prepare(optimizer) or fabric.setup_optimizers(optimizer) returns, or keep its "
                "parameters out of prepared models"
            )
            raise RuntimeError(msg)
