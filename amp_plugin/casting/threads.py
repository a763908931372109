"""Passes the autocast state of a thread on to other threads, processes and recomputations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_compiling

from amp_plugin.casting.installed_kernels import KERNELS
from amp_plugin.casting.region import autocast, call_in, open_regions
from amp_plugin.casting.rules import TABLES, OpRules
from amp_plugin.casting.run_in import change_class


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionState:
    """The autocast state of one device type, which can be pickled and sent to other processes.

    Attributes:
        device_type: the device type, such as ``"cpu"``.
        dtype: the dtype to which autocast casts.
        enabled: False if autocast is off.
        cache_enabled: True reuses the casts of weights inside the region. None keeps the cache setting of the
            enclosing autocast block.
        rules: the op rules, or None for the default rules.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool = True
    cache_enabled: bool | None = True
    rules: OpRules | None = None

    def region(self) -> torch.autocast:
        """Return an autocast region with this state."""
        return autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled, rules=self.rules)


def current_state() -> tuple[RegionState, ...]:
    """Return this thread's autocast state, with one entry per device type that uses autocast."""
    if KERNELS.native is None:
        KERNELS.install()
    opened = {region.device: region for region in open_regions()}
    on = [device for device in TABLES if torch.is_autocast_enabled(device) or device in opened]
    return tuple(_state_on(device, opened.get(device)) for device in on)


def _state_on(device_type: str, region: autocast | None) -> RegionState:
    keeps_casts, rules = torch.is_autocast_cache_enabled(), None
    if region is not None:
        *_, keeps_casts, rules = region.made_with()
    return RegionState(
        device_type=device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=keeps_casts,
        rules=rules,
    )


def has_region() -> bool:
    """Return whether an ``amp_plugin.autocast`` region is open in this thread."""
    return bool(open_regions())


Module = TypeVar("Module", bound=nn.Module)

_CARRIED = "_amp_plugin_carried"


def autocast_module(module: Module, *states: RegionState) -> Module:
    """Make a module run under autocast in every thread that calls it.

    The module runs in the autocast state ``states``, which defaults to the state in which this function is
    called. A thread that has opened its own autocast block keeps the state of that block.

    Replicas of ``nn.DataParallel`` run in the autocast state of the thread that calls DataParallel, with the
    same dtype, cache flag and rules. (Torch passes only the enabled flag to replicas.)

    In compiled code, the module changes the autocast state only if autocast is off on the devices of
    ``states``.

    Args:
        module: the module or its ``nn.DataParallel`` wrapper. The module is changed in place.
        states: a ``RegionState`` for each device type. The default is the autocast state of this thread.

    Returns:
        The module.

    Raises:
        TypeError: the module is TorchScript. Scripting the module later raises TypeError too, because the
            script would run without the autocast state.

    Example:
        >>> net = torch.nn.Linear(2, 2)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     net = autocast_module(net)
        >>> results = []
        >>> thread = threading.Thread(target=lambda: results.append(net(torch.ones(1, 2)).dtype))
        >>> thread.start(), thread.join()
        (None, None)
        >>> results
        [torch.bfloat16]
    """
    target = module.module if isinstance(module, nn.DataParallel) else module
    change_class(target, _methods_of_threads, states or current_state())
    return module


def _methods_of_threads(original: type[nn.Module], states: tuple[RegionState, ...]) -> dict[str, Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened = [state.region() for state in _missing_states(self, states)]
        return call_in(opened, original.__call__, (self, *args), kwargs)

    def _replicate_for_data_parallel(self: Any) -> Any:
        replica = original._replicate_for_data_parallel(self)  # type: ignore[no-untyped-call]
        vars(replica)[_CARRIED] = (threading.get_ident(), current_state())
        return replica

    return {
        "__call__": run,
        "_replicate_for_data_parallel": _replicate_for_data_parallel,
        "__prepare_scriptable__": _refuse_script,
    }


def _refuse_script(module: nn.Module) -> nn.Module:
    """Raise TypeError if the module is scripted, because TorchScript would compile only ``forward``."""
    msg = (
        f"autocast_module: TorchScript would compile {type(module).__name__} without its autocast state; "
        "script the module before, and open autocast around its calls"
    )
    raise TypeError(msg)


def _missing_states(module: nn.Module, states: tuple[RegionState, ...]) -> tuple[RegionState, ...]:
    """Return the autocast states to enter before the module runs, or () if the thread keeps its own state."""
    if is_compiling():
        on = any(torch.is_autocast_enabled(state.device_type) for state in states)
        return () if on else states
    maker, carried = vars(module).get(_CARRIED, (None, ()))
    # The autocast block around a replica was opened by DataParallel, not by the user.
    if carried:
        return () if maker == threading.get_ident() or has_region() else carried
    torch.autocast_increment_nesting()
    return states if torch.autocast_decrement_nesting() == 0 else ()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[object]]:
    """Return the contexts that ``torch.utils.checkpoint`` enters in forward and in recomputation.

    Torch's checkpoint restores only the dtype and the enabled flag of autocast. Pass this function as
    ``context_fn`` if a region has ``rules=`` and the checkpoint is non-reentrant. Rules from
    ``set_default_rules`` need no ``context_fn``. A reentrant checkpoint accepts no contexts, and recomputes
    with the default rules. For a reentrant checkpoint, open the region with ``rules=`` inside the
    checkpointed function.

    Returns:
        A pair of contexts. The context for the forward pass does nothing. The context for the recomputation
        reopens the innermost region of each device type.

    Example:
        >>> import torch
        >>> from amp_plugin import autocast
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     y = checkpoint(torch.matmul, x, x, use_reentrant=False, context_fn=checkpoint_contexts)
    """
    return nullcontext(), _opened_again(current_state() if has_region() else ())


@contextmanager
def _opened_again(states: tuple[RegionState, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(state.region())
        yield
