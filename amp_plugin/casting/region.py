"""``amp_plugin.autocast`` is a context manager and decorator that sets torch's autocast state."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import compiler, is_autocast_cache_enabled
from torch._guards import TracingContext

# This import keeps torch's own class, even if a program later replaces torch.autocast with amp_plugin's.
from torch.amp.autocast_mode import autocast as torchs_autocast
from torch.amp.autocast_mode import is_autocast_available as torchs_is_autocast_available
from typing_extensions import Self

from amp_plugin.casting.compiled import TracedRegion, are_rules_in_force, content_of, teach_dynamo
from amp_plugin.casting.installed_kernels import DEVICE_NUMBERS, KERNELS, Opening, check_rules, number_of
from amp_plugin.casting.rules_in_force import number_for_region
from amp_plugin.kernels.tracers import untraced
from amp_plugin.messages import warned_at_user
from amp_plugin.precision import DTYPES, known_precision

if TYPE_CHECKING:
    from amp_plugin.casting.rules import OpRules


Function = TypeVar("Function", bound=Callable[..., Any])

new_object = object.__new__


_OPEN = threading.local()
# ``_OPEN.regions`` lists the open regions of this thread, innermost last.
# A region that uses torch.autocast instead of amp_plugin's kernels is listed as a pair (region, block).


def _entries() -> list[Any]:
    try:
        entries: list[Any] = _OPEN.regions
    except AttributeError:  # a new thread
        entries = _OPEN.regions = []
    return entries


def open_regions() -> list[autocast]:
    """Return the regions that are open in this thread, with the innermost region last."""
    return [entry[0] if isinstance(entry, tuple) else entry for entry in _entries()]


def _leave(region: autocast) -> None:
    """Close a region that uses a ``torch.autocast`` block, or that contains other open regions."""
    entries = _entries()
    place = max((place for place, open_ in enumerate(open_regions()) if open_ is region), default=None)
    if place is None:
        msg = "autocast: exit without enter; this region is not open in this thread"
        raise RuntimeError(msg)
    entry = entries.pop(place)
    if isinstance(entry, tuple):
        entry[1].__exit__(None, None, None)
    else:
        KERNELS.leave(sum(not isinstance(other, tuple) for other in entries[place:]))


def enter_block(region: autocast) -> None:
    """Open a region in this thread with a ``torch.autocast`` block instead of amp_plugin's kernels."""
    device, dtype, enabled, cache_enabled, rules = region.made_with()
    block: Any = torchs_autocast(device, dtype, enabled, cache_enabled=False)
    if rules is not None or (are_rules_in_force() and KERNELS.native is not None):
        block = TracedRegion(device, dtype, enabled, cache_enabled, content_of(rules))
    found = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), is_autocast_cache_enabled()
    region.note_found(*found)
    block.__enter__()
    _entries().append((region, block))


def blocks_are_recorded() -> bool:
    """Return whether torch.export or ``make_fx(pre_dispatch=True)`` is recording autocast blocks now."""
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and any(
        isinstance(mode, tracing.PreDispatchTorchFunctionMode)
        for mode in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )


# Maps each attribute of torch.autocast to the index at which an Opening tuple holds its value.
_POSITIONS = {"fast_dtype": 1, "_enabled": 2, "_cache_enabled": 3, "device": 5}

# Maps each attribute of torch.autocast that holds the previous state to its index in ``_found``.
_FOUND = {"prev": 1, "prev_fastdtype": 2, "prev_cache_enabled": 3}


def is_autocast_available(device_type: str) -> bool:
    """Return whether this build of torch has autocast for a device type.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ``"xpu"``, ...: the ``type`` of a ``torch.device``.
    """
    return bool(torchs_is_autocast_available(device_type))


class autocast(torchs_autocast):  # noqa: N801 - torch's name
    """Run a region of a program in mixed precision.

    The region sets torch's own autocast state. Therefore ``torch.is_autocast_enabled()``, nested
    ``torch.autocast`` blocks, checkpointing and ``torch.compile`` respect the region. Ops inside the region
    run on amp_plugin's autocast kernels, which follow ``rules``.

    An instance can be nested, entered again, and used by several threads. A region also works as a decorator
    for functions, generators and coroutines. TorchScript runs a decorated ``forward`` of the scripted module
    in Python, but fails on a decorated ``forward`` of its submodules.

    A region may contain a whole training loop, because autocast does not change the dtypes of backward
    passes.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ``"xpu"`` or ``"mps"``.
        dtype: ``torch.float16`` or ``torch.bfloat16``. The default is
            ``torch.get_autocast_dtype(device_type)``.
        enabled: False turns autocast off inside the region.
        cache_enabled: True caches the cast of an fp32 weight for later uses of the weight in the region. The
            default is the cache setting of the enclosing autocast block.
        rules: op rules for this region, which need the native core. By default, the region uses
            the current default rules, for example those from the file named by ``AMP_PLUGIN_RULES``.

    Raises:
        ValueError: ``device_type`` is not a string, or ``rules`` are for another device.
        TypeError: ``dtype`` is not a dtype, or ``rules`` are not OpRules.
        RuntimeError: the device has no autocast, or ``rules`` are given but the native core is missing.

    Example:
        >>> a = torch.ones(2, 2)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     (a @ a).dtype
        torch.bfloat16
    """

    _opening: Opening
    _found: tuple[bool, bool, torch.dtype, bool]

    @untraced
    def __new__(
        cls,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        rules: OpRules | None = None,
    ) -> Self:
        """Return a region, or a ``torch.autocast`` block while torch.compile or torch.export is tracing.

        Dynamo can trace only torch's class, and a subclass would cause a graph break.
        """
        # A faster equivalent of torch.compiler.is_compiling().
        if compiler.is_dynamo_compiling() or compiler._is_compiling_flag:
            if rules is None and not are_rules_in_force():
                return torchs_autocast(device_type, dtype, enabled, cache_enabled)  # type: ignore[return-value]
            if rules is not None:
                check_rules(rules, device_type)
            return TracedRegion(device_type, dtype, enabled, cache_enabled, content_of(rules))  # type: ignore[return-value]
        openings = KERNELS.checked.get((device_type, dtype, enabled))
        if openings is None:
            openings = _check(device_type, dtype, enabled)
        if cache_enabled is None:
            cache_enabled = is_autocast_cache_enabled() or _hides_flag(device_type)
        opening = openings[1 if cache_enabled else 0]
        if dtype is None or rules is not None:
            opening = _completed(opening, dtype, rules)
        self: Self = new_object(cls)
        self._opening = opening
        return self

    if not TYPE_CHECKING:
        __init__ = object.__init__  # __new__ has done everything

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reject subclasses with their own ``__init__``, because ``__new__`` would ignore it."""
        super().__init_subclass__(**kwargs)
        init: object = cls.__init__
        if init is not object.__init__:
            msg = (
                f"{cls.__name__} derives from amp_plugin.autocast and has an __init__ of its own; wrap a "
                "region instead: return one from a function, or keep one in an attribute"
            )
            raise TypeError(msg)

    def __getattr__(self, name: str) -> Any:
        position = _POSITIONS.get(name)
        opening = self.__dict__.get("_opening")
        if position is not None and opening is not None:
            if TracingContext.try_get() is not None and (opening[4] or are_rules_in_force()):
                teach_dynamo(type(self))
            return opening[position]
        if name in _FOUND and "_found" in self.__dict__:
            return self._found[_FOUND[name]]
        if name == "custom_backend_name":
            return torch._C._get_privateuse1_backend_name()
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the op rules themselves.

        The number that identifies a rule set is valid only within one process.
        """
        attributes = dict(vars(self))
        attributes.pop("_opening")
        attributes.pop("_found", None)
        *arguments, rules = self.made_with()
        return functools.partial(_remade, type(self), rules=rules), tuple(arguments), attributes

    def made_with(self) -> tuple[str, torch.dtype, bool, bool, OpRules | None]:
        """Return the region's device type, dtype, enabled flag, cache flag and rules."""
        _, dtype, enabled, cache_enabled, number, device_type = self._opening
        return device_type, dtype, enabled, cache_enabled, KERNELS.rules_numbered(number)

    def note_found(self, enabled: bool, dtype: torch.dtype, keeps_casts: bool) -> None:
        """Store the autocast state that was active before the region opened, as ``torch.autocast`` does."""
        self._found = False, enabled, dtype, keeps_casts

    def __repr__(self) -> str:
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled})"

    @untraced
    def __enter__(self) -> Self:
        opening, native = self._opening, KERNELS.native
        if native is None or opening[0] is None:
            enter_block(self)
        else:
            self._found = found = native.enter(opening)
            try:
                _OPEN.regions.append(self)
            except AttributeError:  # a new thread
                _OPEN.regions = [self]
            if found[0] and blocks_are_recorded():
                autocast.__exit__(self)
                enter_block(self)
        return self

    @untraced
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> Literal[False]:
        try:
            entries = _OPEN.regions
            is_innermost = entries[-1] is self
        except (AttributeError, IndexError):  # no region is open in this thread
            is_innermost = False
        if is_innermost:
            del entries[-1]
            KERNELS.leave(0)
        else:
            _leave(self)
        return False

    def __call__(self, func: Function) -> Function:
        """Decorate a function, generator or coroutine function."""
        # If func is not callable, torch's __call__ raises TypeError.
        covered: Any = covers_each_step(func, self) if callable(func) else super().__call__(func)
        return covered  # type: ignore[no-any-return]


def _remade(cls: type[autocast], *arguments: Any, rules: OpRules | None) -> autocast:
    region: Any = new_object(cls)
    vars(region).update(vars(autocast(*arguments, rules=rules)))
    return region  # type: ignore[no-any-return]


def _hides_flag(device_type: str) -> bool:
    """Return whether a new region should cache casts although torch's cache flag is off.

    ``torch.cuda.make_graphed_callables`` requires torch's autocast cache to be turned off.
    """
    regions = open_regions()
    if not regions:
        return device_type != "cpu"
    device, _, _, keeps_casts, _ = regions[-1].made_with()
    return device != "cpu" and keeps_casts


def call_in(regions: Sequence[torch.autocast], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function inside several regions.

    The regions are opened recursively, because torch's tracers do not support ExitStack.
    """
    if not regions:
        return function(*args, **kwargs)
    with regions[0]:
        return call_in(regions[1:], function, args, kwargs)


def _completed(opening: Opening, dtype: torch.dtype | None, rules: OpRules | None) -> Opening:
    """Return a copy of an Opening with the given dtype and rules.

    If ``dtype`` is None, the copy has torch's current autocast dtype for the device type. If ``rules`` is
    None, the copy keeps the rules of the Opening.
    """
    number, _, enabled, cache_enabled, rules_number, device_type = opening
    return (
        number,
        torch.get_autocast_dtype(device_type) if dtype is None else dtype,
        enabled,
        cache_enabled,
        rules_number if rules is None else number_of(rules, device_type),
        device_type,
    )


@untraced
def _check(device_type: str, dtype: torch.dtype | None, enabled: bool) -> tuple[Opening, Opening]:
    """Check a region's arguments with torch's constructor, and return two tuples of checked arguments.

    The first tuple disables the cast cache, and the second tuple enables it.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        name = known_precision(dtype)
        near = str(DTYPES[name]) if name in {"bf16", "fp16"} else "torch.float16 or torch.bfloat16"
        msg = f"autocast(dtype={dtype!r}): not a torch.dtype; give {near}"
        raise TypeError(msg)
    KERNELS.install()
    theirs = warned_at_user(torchs_autocast, device_type, dtype, enabled)
    number = DEVICE_NUMBERS.get(device_type) if KERNELS.native is not None else None
    rules_number = number_for_region(device_type)
    lower = theirs.fast_dtype if dtype is None else dtype
    openings = (
        (number, lower, bool(theirs._enabled), False, rules_number, device_type),
        (number, lower, bool(theirs._enabled), True, rules_number, device_type),
    )
    # If torch disables autocast with a warning, the result is not cached, so the next region warns again.
    if theirs._enabled == enabled:
        KERNELS.checked[device_type, dtype, enabled] = openings
    return openings


def covers_each_step(func: Callable[..., Any], context: AbstractContextManager[Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs inside a context.

    Generators enter the context each time they resume.
    """
    covered: Any
    if inspect.isasyncgenfunction(func):
        msg = f"autocast: {func.__name__} is an asynchronous generator; open the region between its yields"
        raise TypeError(msg)
    if inspect.iscoroutinefunction(func):

        async def covered(*args: Any, **kwargs: Any) -> Any:
            stepped: Any = _each_step(func(*args, **kwargs), context)
            return await stepped
    elif inspect.isgeneratorfunction(func):

        def covered(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _each_step(func(*args, **kwargs), context))
    else:

        def covered(*args: Any, **kwargs: Any) -> Any:
            with context:
                return func(*args, **kwargs)

    functools.update_wrapper(covered, func)
    covered.__script_unsupported = "@autocast() decorator is not supported in script mode"
    # Without ``ignore``, torch.jit.script would compile the forward without its autocast region.
    torch.jit.ignore(covered)  # type: ignore[no-untyped-call]
    return covered  # type: ignore[no-any-return]


@types.coroutine
def _each_step(inner: Any, context: AbstractContextManager[Any]) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine, and open the context each time it is resumed."""
    resume = functools.partial(inner.send, None)
    while True:
        try:
            with context:
                value = resume()
        except StopIteration as done:
            return done.value
        try:
            resume = functools.partial(inner.send, (yield value))
        except BaseException as error:  # noqa: BLE001 - passed on to the generator
            resume = functools.partial(inner.throw, error)
