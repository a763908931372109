"""Passes parameter names and process groups to scalers, and records which gradients are scaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_plugin.module_paths import module_paths
from amp_plugin.quiet_hooks import register_quiet_hook
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of
from amp_plugin.scaling.words import Words

_ANOMALY: Final = "returned nan values in its"  # a part of torch's error text
_WRAPPERS: Final = {"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"}


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside a framework's wrapper.

    An optimizer without a wrapper is returned as it is.
    """
    while any(kind.__name__ in _WRAPPERS for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def register(scaler: GradScaler, optimizers: Iterable[Optimizer], models: Sequence[nn.Module]) -> None:
    """Register optimizers with a scaler, with parameter names taken from the models.

    If there are several models, each name begins with its model, as in ``Critic[1].layer.weight``. A
    parameter that belongs to none of the models is named after its own module. For example, a temperature
    parameter in a loss module is named ``Contrastive.temperature``.
    """
    named: dict[str, Tensor] = {}
    for place, model in enumerate(models):
        prefix = f"{type(model).__name__}[{place}]." if len(models) > 1 else ""
        named |= {prefix + name: param for name, param in model.named_parameters()}
    for optimizer in optimizers:
        own = {id(param) for param in params_of(optimizer)}
        names = {name: param for name, param in named.items() if id(param) in own}
        if named:  # if not, models may be prepared later
            names = module_paths(_unnamed(optimizer, {*map(id, named.values())})) | names
        scaler.register(optimizer, names=names)


def _unnamed(optimizer: Optimizer, named: set[int]) -> list[Tensor]:
    """Return the parameters of an optimizer that belong to no model and have no name in ``param_names``."""
    groups = [group for group in optimizer.param_groups if not group.get("param_names")]
    return [param for group in groups for param in group["params"] if id(param) not in named]


def scaler_groups(*models: nn.Module) -> dict[str, Any]:
    """Return the process group of an FSDP1 model, as arguments for ``GradScaler``.

    The group is passed as ``process_groups`` if each rank holds whole gradients, and as ``sharded_groups`` if
    the gradients are sharded. The dict is empty if no model uses FSDP1.
    """
    root = next((model for model in models if isinstance(model, FullyShardedDataParallel)), None)
    if root is None or root.process_group is None:
        return {}
    group, whole = (root.process_group,), root.sharding_strategy.name == "NO_SHARD"
    return {"process_groups": group if whole else (), "sharded_groups": () if whole else group}


@contextmanager
def anomalies_explained(scaler: Any) -> Iterator[None]:
    """If torch's anomaly detection raises an error, add a note that the loss scale may be the only cause.

    Dynamic loss scaling finds the scale by letting some gradients overflow. Anomaly detection mistakes the
    first overflow for a bug, and ends a run in which nothing is wrong.
    """
    try:
        yield
    except RuntimeError as error:
        if not (torch.is_anomaly_enabled() and _ANOMALY in str(error) and scaler.is_enabled()):
            raise
        msg = (
            f"{error} The loss scale is {scaler.get_scale():.10g}, and it may be the only reason: while the "
            "scaler finds the scale, some gradients overflow and their steps are skipped. Run without "
            "anomaly detection, or lower init_scale. `amp-plugin diagnose train.py` finds a nan that "
            "has another reason."
        )
        raise RuntimeError(msg) from error


class GradientOrigins:
    """Uses hooks to record which gradients were computed by backward passes in blocks of :meth:`inside`."""

    def __init__(self) -> None:
        # The parameters that backward has reached in the current ``inside`` block, or None outside a block.
        self._reached: list[Tensor] | None = None
        # The gradients that were computed in ``inside`` blocks, with their version counters.
        self._inside: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._outside: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        self._looked_at: tuple[int, int] = (0, 0)  # number of models and of optimizers

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watch these parameters and no others."""
        self.unwatch()
        distinct: dict[int, Any] = {id(param): param for param in params if param.requires_grad}
        # Lazy parameters use ``__torch_function__`` to reject hooks, so it is disabled here.
        with torch._C.DisableTorchFunctionSubclass():
            hook = self._note
            self._handles = [param.register_post_accumulate_grad_hook(hook) for param in distinct.values()]

    @contextmanager
    def watching(self, models: Sequence[nn.Module], scaler: GradScaler, words: Words) -> Iterator[None]:
        """Watch the parameters that belong to no optimizer registered with the scaler.

        Gradients of these parameters are recorded as scaled if they are computed inside the block. If an
        unregistered optimizer is about to step with a scaled gradient, an error is raised. Most programs
        register all optimizers.
        """
        optimizers = scaler.core.optimizers
        if self._looked_at != (len(models), len(optimizers)):
            known = {id(param) for optimizer in optimizers for param in params_of(optimizer)}
            params = [param for model in models for param in model.parameters() if id(param) not in known]
            self.watch(params)
            self._looked_at = len(models), len(optimizers)
            if params:
                hook = partial(_refuse_unknown, weakref.ref(self), weakref.ref(scaler), words)
                self._handles.append(register_quiet_hook(None, hook))
        with self.inside():
            yield

    def unwatch(self) -> None:
        """Stop watching parameters and optimizers."""
        while self._handles:
            self._handles.pop().remove()
        self._inside.clear()
        self._outside.clear()
        self._looked_at = (0, 0)

    def _note(self, param: Tensor) -> None:
        if self._reached is not None:
            self._reached.append(param)
        elif param.grad is not None:
            self._outside[id(param)] = weakref.ref(param.grad)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Record that the gradients computed inside the block are multiplied by the loss scale."""
        before, self._reached = self._reached, []
        try:
            yield
        finally:
            reached, self._reached = self._reached, before
            # Version counters are read after the block, because DDP writes to gradients after the hook.
            for param in reached:
                if param.grad is not None:
                    self._inside[id(param)] = weakref.ref(param.grad), param.grad._version

    def is_scaled(self, param: Tensor) -> bool:
        """Return whether ``param.grad`` was computed inside an :meth:`inside` block and not changed since."""
        made, version = self._inside.get(id(param), (None, 0))
        grad = param.grad
        return made is not None and grad is not None and made() is grad and version == grad._version

    def is_from_outside(self, param: Tensor) -> bool:
        """Return whether a backward pass outside all :meth:`inside` blocks has written to ``param.grad``."""
        made = self._outside.get(id(param))
        return made is not None and param.grad is not None and made() is param.grad

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the watched parameters out of copies and pickles, because they belong to this process."""
        return type(self), ()


def _refuse_unknown(
    origins: Callable[[], GradientOrigins | None],
    scaler: Callable[[], GradScaler | None],
    words: Words,
    optimizer: Optimizer,
    *_: Any,
) -> None:
    """Raise RuntimeError if an optimizer unknown to the scaler is about to step with scaled gradients."""
    made, known = origins(), scaler()
    if made is None or known is None or any(other is optimizer for other in known.core.optimizers):
        return
    if scaled := sum(map(made.is_scaled, params_of(optimizer))):
        msg = (
            f"{type(optimizer).__name__}.step(): {scaled} gradients are multiplied by the loss scale, "
            f"but this optimizer was not prepared. Step the optimizer that {words.prepare} returns, or "
            "keep its parameters out of prepared models"
        )
        raise RuntimeError(msg)
