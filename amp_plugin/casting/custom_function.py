"""custom_fwd and custom_bwd make custom autograd Functions respect the autocast state."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_leaves

from amp_plugin.casting.region import autocast, is_autocast_available
from amp_plugin.casting.run_in import cast_tensors

_CARRIER = "_amp_plugin_setup_context"
# Holds the autocast state that ``forward`` hands over to ``setup_context``.
_forward_state = threading.local()


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Any:
    """Make the ``forward`` of an autograd Function respect the autocast state.

    The decorator supports both forms of Function: ``forward(ctx, ...)``, and ``forward(...)`` with
    ``setup_context(ctx, inputs, output)``. Torch's own decorator fails for Functions with ``setup_context``,
    because it sets its attributes on the first input instead of the context (pytorch issue 132388).

    Args:
        fwd: the ``forward`` method. Leave ``fwd`` out if you pass options to the decorator.
        device_type: the device type whose autocast state is used, such as ``"cuda"``. The default is the
            device type of the tensor arguments. CPU tensors are ignored if there are tensors on another
            device. Torch's decorator has no default.
        cast_inputs: a dtype. If ``cast_inputs`` is given and autocast is on, ``forward`` runs with autocast
            off, and floating-point inputs on the device are cast to this dtype, except those in fp64. Tensors
            inside mappings, lists, tuples and other containers registered with torch.utils._pytree are cast
            too. Elements of iterators are cast when they are consumed.

    Returns:
        The decorated method.

    Raises:
        ValueError: ``device_type`` is not a string. The decorated method raises ValueError if ``device_type``
            is not given and no argument is a tensor.

    Example:
        >>> class Twice(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(cast_inputs=torch.float32)
        ...     def forward(ctx, x):
        ...         return x * 2
        ...
        ...     @staticmethod
        ...     @custom_bwd
        ...     def backward(ctx, grad):
        ...         return grad * 2
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     Twice.apply(torch.ones(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    _check_device_type(device_type)
    scope = sys._getframe(1)
    if "__qualname__" in scope.f_locals and scope.f_locals is not scope.f_globals:  # in a class body
        scope.f_locals[_CARRIER] = _SetupContextCarrier()  # With setup_context, forward has no ctx.
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    method = fwd

    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        device = device_type or _device_type_of(method, (args, kwargs))
        enabled = torch.is_autocast_enabled(device)
        state = (enabled and cast_inputs is None, torch.get_autocast_dtype(device), device)
        first = args[0] if args else None
        # Functorch has its own class of context.
        given_ctx = isinstance(first, FunctionCtx) or hasattr(first, "save_for_backward")
        if given_ctx:
            _write(state, first)
        if cast_inputs is not None and enabled:
            given = [_cast(value, cast_inputs, device) for value in args[given_ctx:]]
            args, kwargs = (*args[:given_ctx], *given), _cast(kwargs, cast_inputs, device)
            with autocast(device, enabled=False):
                output = method(*args, **kwargs)
        else:
            output = method(*args, **kwargs)
        if not given_ctx:
            _forward_state.last = state  # setup_context runs next in this thread
        return output

    return forward


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Any:
    """Make the ``backward`` of an autograd Function run in the autocast state of its ``forward``.

    Args:
        bwd: the ``backward`` method. Leave ``bwd`` out if you pass options to the decorator.
        device_type: the device type whose autocast state is restored, such as ``"cuda"``. The default is the
            device type that ``custom_fwd`` used.

    Returns:
        The decorated method.

    Raises:
        ValueError: ``device_type`` is not a string.
        RuntimeError: the decorated method raises this error if ``forward`` was not decorated with
            ``custom_fwd``.
    """
    _check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    method = bwd

    @functools.wraps(method)
    def backward(*args: Any, **kwargs: Any) -> Any:
        ctx = args[0]
        if not hasattr(ctx, "_fwd_used_autocast"):
            msg = (
                f"custom_bwd: the forward of {type(ctx).__name__} recorded no autocast state; decorate it, "
                "inside the class body, with @custom_fwd"
            )
            raise RuntimeError(msg)
        device = device_type or ctx._device_type
        with autocast(device, enabled=ctx._fwd_used_autocast, dtype=ctx._dtype):
            return method(*args, **kwargs)

    return backward


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """Cast tensors on ``device_type``, also inside nested containers. Iterators are cast lazily."""
    if isinstance(value, Mapping):  # pytree knows few kinds of mappings
        return {name: _cast(item, dtype, device_type) for name, item in value.items()}
    if isinstance(value, Iterator):
        return (_cast(item, dtype, device_type) for item in value)
    return cast_tensors(value, dtype, device_type)


class _SetupContextCarrier:
    """Wraps a Function's ``setup_context``, so that ``ctx`` gets the autocast state of ``forward``.

    When ``custom_fwd`` decorates ``forward``, it adds a carrier to the body of the Function's class, under a
    private name. When Python creates the class, it calls the carrier's ``__set_name__``. The carrier then
    removes itself from the class and wraps ``setup_context``.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        delattr(owner, name)
        defined = owner.__dict__.get("setup_context")
        if defined is None:
            return
        setup_context = defined.__func__ if isinstance(defined, staticmethod) else defined

        @functools.wraps(setup_context)
        def with_state(ctx: Any, inputs: Any, output: Any) -> Any:
            _write(_forward_state.last, ctx)
            return setup_context(ctx, inputs, output)

        owner.setup_context = staticmethod(with_state)  # type: ignore[attr-defined]


def _write(state: tuple[bool, torch.dtype, str], ctx: Any) -> None:
    ctx._fwd_used_autocast, ctx._dtype, ctx._device_type = state  # first two: torch's names


def _device_type_of(method: Callable[..., Any], given: Any) -> str:
    kinds = [leaf.device.type for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if not kinds:
        msg = (
            f"custom_fwd: {method.__qualname__} was given no tensor, so its device is unknown; "
            "name it, as in @custom_fwd(device_type='cuda')"
        )
        raise ValueError(msg)
    others = (kind for kind in kinds if kind != "cpu" and is_autocast_available(kind))
    return next(others, "cpu")  # nothing is cast for meta tensors


def _check_device_type(device_type: object) -> None:
    if device_type is not None and not isinstance(device_type, str):
        msg = f"Expected `device_type` of type `str`, got: `{type(device_type)}`"
        raise ValueError(msg)
