"""The autocast region: a context manager and decorator over torch's autocast state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._C import _is_torch_function_mode_enabled
from torch._guards import TracingContext
from torch.compiler import is_compiling
from typing_extensions import Self

from amp_plugin.casting import active
from amp_plugin.casting.dynamo_frames import skip_frames_of
from amp_plugin.casting.stepping import covers_each_step

if TYPE_CHECKING:
    from amp_plugin.casting.cast_cache import CastCache
    from amp_plugin.casting.rules import OpRules


_RULES_IN_COMPILED_CODE = (
    "autocast(rules=...) was opened inside compiled code; open the region around the call "
    "of the compiled function, or use set_default_rules()"
)

# Arguments that torch has checked and found nothing to warn of -> (enabled, custom backend).
_checked: dict[tuple[str, torch.dtype | None, bool], tuple[bool, str]] = {}


def is_autocast_available(device_type: str) -> bool:
    """Say whether this build of torch has autocast for a device type.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ``"xpu"``, ...: the ``type`` of a ``torch.device``.
    """
    return bool(torch.amp.is_autocast_available(device_type))


class autocast(torch.autocast):  # noqa: N801 - torch's name
    """Run a region of a program in mixed precision.

    The state is torch's own, so ``torch.is_autocast_enabled()``, nested
    ``torch.autocast`` blocks, checkpointing and ``torch.compile`` see it; the ops in
    the region follow ``rules`` through amp_plugin's kernels. One instance may be
    nested, entered again and used by several threads. As a decorator it covers
    functions, generators, coroutines and asynchronous generators, each step of them.

    Operations of a backward pass are not autocast by a region opened outside that
    backward pass: the region may stand around a whole training loop.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ``"xpu"`` or ``"mps"``.
        dtype: ``torch.float16`` or ``torch.bfloat16``; default: what
            ``torch.get_autocast_dtype(device_type)`` says.
        enabled: False runs the region as if autocast were off.
        cache_enabled: keep the cast of an fp32 weight for its next use in the region.
        rules: op rules other than the default ones; needs the native core.
        cache: a CastCache that keeps cast weights from region to region; needs the native core.

    Raises:
        ValueError: ``device_type`` is not a string, or ``rules`` are for another device.
        RuntimeError: the device has no autocast, or ``rules`` or ``cache`` were given where
            they cannot work (no native core, or inside compiled code).

    Example:
        >>> a = torch.ones(2, 2)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     (a @ a).dtype
        torch.bfloat16
    """

    def __new__(  # type: ignore[misc] # not a region under compilation
        cls,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        rules: OpRules | None = None,
        cache: CastCache | None = None,
    ) -> torch.autocast:
        """Return a region, or torch's own while torch.compile or torch.export trace.

        Dynamo knows exactly torch's class: a subclass would stop at a graph break.
        """
        if is_compiling():
            if rules is not None:
                raise RuntimeError(_RULES_IN_COMPILED_CODE)
            return torch.autocast(device_type, dtype, enabled, cache_enabled)
        return object.__new__(cls)

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        rules: OpRules | None = None,
        cache: CastCache | None = None,
    ) -> None:
        known = _checked.get((device_type, dtype, enabled))
        if known is None or not active.is_installed:
            active.install()
            known = self._check(device_type, dtype, enabled)
        if rules is None:
            self.device = device_type
        else:  # see __getattr__
            self._ruled_device = device_type
            vars(self).pop("device", None)
        self.fast_dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        self._enabled, self.custom_backend_name = known
        # torch's own cache is off in our regions, so its flag is no default for ours.
        self._cache_enabled = cache_enabled is not False
        self._rules_number = 0 if rules is None else active.number_of(rules, device_type)
        self._cast_cache = None if cache is None else cache._kept

    def __getattr__(self, name: str) -> Any:
        # Dynamo takes any torch.autocast for torch's own and would drop its rules; it asks for `device`.
        if name == "device" and "_ruled_device" in vars(self):
            if TracingContext.try_get() is not None:
                raise RuntimeError(_RULES_IN_COMPILED_CODE)
            return self._ruled_device
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    def _check(self, device_type: str, dtype: torch.dtype | None, enabled: bool) -> tuple[bool, str]:
        """Let torch check the arguments, with its own errors and warnings."""
        super().__init__(device_type, dtype, enabled)
        known = (self._enabled, self.custom_backend_name)
        if self._enabled == enabled:  # else it warned, and will again
            _checked[device_type, dtype, enabled] = known
        return known

    def __enter__(self) -> Self:
        enter = active.native_enter
        number = active.DEVICE_NUMBERS.get(self.device)
        if enter is None or number is None or _is_torch_function_mode_enabled():
            active.enter_torch(self)
        else:
            enter(
                self,
                number,
                self.fast_dtype,
                self._enabled,
                self._cache_enabled,
                self._rules_number,
                self._cast_cache,
            )
        return self

    def __exit__(self, *exc_info: object) -> Literal[False]:
        leave = active.native_exit
        if leave is None or not leave(self):
            active.exit_torch(self)
        return False

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function, generator or coroutine function."""
        if not callable(func):
            msg = (
                f"autocast()(func) requires a callable, but got {type(func).__name__}. Did you mean to use "
                "autocast as a context manager? For example:\n    with autocast(device_type=...):\n"
                "        output = model(input)"
            )
            raise TypeError(msg)
        return covers_each_step(func, self)


skip_frames_of(autocast.__new__, autocast.__init__, autocast._check, autocast.__enter__, autocast.__exit__)
