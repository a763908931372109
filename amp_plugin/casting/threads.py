"""The autocast state of a thread, carried into other threads, processes and recomputations."""

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
    """What a region of one device is opened with; can be pickled and sent to another process.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"``, ...
        dtype: the lower precision.
        enabled: False for a region in which autocast is off.
        cache_enabled: keep the casts of weights inside the region; None: as around it.
        rules: None for the default rules.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool = True
    cache_enabled: bool | None = True
    rules: OpRules | None = None

    def region(self) -> torch.autocast:
        """Make a region with this state."""
        return autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled, rules=self.rules)


def current_state() -> tuple[RegionState, ...]:
    """Return the autocast state of this thread, one entry per device where it is on or in a region."""
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
    """Return whether this thread has a region of ours open."""
    return bool(open_regions())


Module = TypeVar("Module", bound=nn.Module)

_CARRIED = "_amp_plugin_carried"


def autocast_module(module: Module, *states: RegionState) -> Module:
    """Autocast a module in every thread that runs it, with the full state.

    The state is that of the thread which calls this function (inside a region), or the one given.
    A thread that has an autocast block of its own keeps what it has; any other runs the module in
    the state. Replicas made by ``nn.DataParallel`` run in the state of the thread that calls it,
    whatever that is at each call: dtype, cache flag and rules too, where torch hands over no more
    than the enabled flag.

    Inside compiled code the state is opened where autocast is off on its devices.

    Args:
        module: changed in place; hand over the ``nn.DataParallel``, or the module inside.
        states: one ``RegionState`` per device; default: the state of this thread, if autocast is on.

    Returns:
        The module.

    Raises:
        TypeError: the module is TorchScript, or (when it is scripted later) would be without its state.

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
    """Raise where TorchScript begins to compile a module: it takes ``forward`` alone."""
    msg = (
        f"autocast_module: TorchScript would compile {type(module).__name__} without its autocast state; "
        "script the module before, and open autocast around its calls"
    )
    raise TypeError(msg)


def _missing_states(module: nn.Module, states: tuple[RegionState, ...]) -> tuple[RegionState, ...]:
    """Return what this thread still has to open to run the module."""
    if is_compiling():
        on = any(torch.is_autocast_enabled(state.device_type) for state in states)
        return () if on else states
    maker, carried = vars(module).get(_CARRIED, (None, ()))
    if carried:  # a replica: the block around it is DataParallel's, not the user's
        return () if maker == threading.get_ident() or has_region() else carried
    torch.autocast_increment_nesting()
    return states if torch.autocast_decrement_nesting() == 0 else ()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[object]]:
    """Make the contexts that ``torch.utils.checkpoint`` enters in forward and recomputation.

    Checkpoint restores torch's autocast state by itself: enabled, dtype. A region opened with
    ``rules=`` needs this besides, in the non-reentrant form; default rules
    (``set_default_rules``) need nothing. The reentrant form takes no contexts and recomputes by
    the default rules: open a region with your rules inside the checkpointed function instead.

    Returns:
        A context for the forward pass, which does nothing, and one for the recomputation,
        which opens the innermost region of each device again.

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
