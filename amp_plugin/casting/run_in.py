"""Runs functions, modules and submodules in a chosen dtype, with autocast off."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from amp_plugin.casting.op_names import nearest
from amp_plugin.casting.region import autocast, call_in
from amp_plugin.casting.rules import is_older, torch_release
from amp_plugin.patterns import matched_modules, require_matches

# A function that takes a class and settings, and returns methods to override those of the class.
# The function must be importable, because pickles refer to it by name.
Methods = Callable[[type[nn.Module], Any], dict[str, Any]]
ClassChange = tuple[Methods, Any]


@functools.cache
def made_class(original: type[nn.Module], methods: Methods, settings: Any) -> type[nn.Module]:
    """Return a subclass that has the original's name and overrides some methods. The result is cached."""
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_made_from": original,
        "_made_by": staticmethod(methods),
        "_made_with": settings,
        "__reduce_ex__": _reduce,
        **methods(original, settings),
    }
    if hasattr(original, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy
    becomes = getattr(original, "cls_to_become", None)
    if becomes is not None:  # a lazy module later changes its class
        namespace["cls_to_become"] = made_class(becomes, methods, settings)
    return type(original.__name__, (original,), namespace)


def change_class(module: nn.Module, methods: Methods, settings: Any) -> nn.Module:
    """Change a module's class to a subclass that overrides methods. A second change replaces the first."""
    if isinstance(module, torch.jit.ScriptModule):
        msg = f"{type(module).__name__} is TorchScript and cannot be changed; apply this before scripting"
        raise TypeError(msg)
    original, changes = _changes_of(type(module))
    others = [change for change in changes if change[0] is not methods]
    _set_class(module, original, [*others, (methods, settings)])
    return module


def _set_class(module: nn.Module, kind: Any, changes: Iterable[ClassChange]) -> None:
    for methods, settings in changes:
        kind = made_class(kind, methods, settings)
    object.__setattr__(module, "__class__", kind)


def _changes_of(kind: Any) -> tuple[Any, list[ClassChange]]:
    """Return the original class, and the changes that ``change_class`` has made to it, oldest first."""
    changes: list[ClassChange] = []
    while "_made_from" in vars(kind):
        changes.insert(0, (kind._made_by, kind._made_with))
        kind = kind._made_from
    return kind, changes


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Pickle a module as its original class does, and also pickle the changes made to its class."""
    kind = type(self)
    original, changes = _changes_of(kind)
    build, arguments, *rest = original.__reduce_ex__(self, protocol)
    plain = tuple(original if argument is kind else argument for argument in arguments)
    return (_remake, (original if build is kind else build, plain, changes), *rest)


def _remake(build: Any, arguments: tuple[Any, ...], changes: list[ClassChange]) -> nn.Module:
    module: nn.Module = build(*arguments)
    _set_class(module, type(module), changes)
    return module


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    original, changes = _changes_of(type(self))
    copy: nn.Module = original.__deepcopy__(self, memo)
    _set_class(copy, _changes_of(type(copy))[0], changes)
    return copy


Target = TypeVar("Target")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

# The device types that support autocast. ``compiled.py`` stores op rules under further, unused types.
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla")


def run_in(dtype: torch.dtype, *, keep: Iterable[str] = (), cast_back: bool = False) -> RunIn:
    """Make a module or function run in one dtype with autocast off, even if it is called in a region.

    Floating-point tensor arguments are cast to ``dtype``, except those in fp64. Tensors in lists, tuples,
    dicts and other containers that are registered with ``torch.utils._pytree`` are cast too. Weights are not
    converted. The module's weights should already have ``dtype``, such as fp32 in a model that uses autocast.
    If the function writes to an argument that was cast, only the copy changes. TorchScript runs a changed
    module in Python, and cannot save a model that contains it.

    Args:
        dtype: a floating-point dtype, usually ``torch.float32``.
        keep: the names of arguments that are not cast.
        cast_back: True casts floating-point outputs to the original dtype of the first argument that can be
            cast. If no argument can be cast, outputs are not cast.

    Returns:
        A decorator for functions, module classes and module instances. Modules and classes are changed in
        place. See ``RunIn.__call__``.

    Raises:
        ValueError: ``dtype`` is not a floating-point dtype.

    Example:
        >>> @run_in(torch.float32, keep={"rois"}, cast_back=True)
        ... class Pool(torch.nn.Module):
        ...     def forward(self, x, rois):
        ...         return x * rois.shape[0]
        >>> Pool()(torch.ones(1, dtype=torch.float16), rois=torch.ones(2, 5)).dtype
        torch.float16
    """
    kept = frozenset({keep} if isinstance(keep, str) else keep)
    return RunIn(dtype=dtype, keep=kept, cast_back=cast_back)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIn:
    """The decorator that ``run_in`` returns, which is called on a module or function."""

    dtype: torch.dtype
    keep: frozenset[str] = frozenset()
    cast_back: bool = False

    def __post_init__(self) -> None:
        """Check the dtype."""
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            msg = f"run_in: {self.dtype!r} is not a floating-point dtype; write run_in(torch.float32)(target)"
            raise ValueError(msg)

    def __call__(self, target: Target) -> Target:
        """Make a module or function run in the chosen dtype.

        Args:
            target: a module instance or a function. A module class is allowed only if ``run_in`` decorates
                the class definition.

        Raises:
            TypeError: ``target`` is anything else, such as an existing class, a bound method, a generator or
                coroutine function, a module that is never called (``ModuleList``), or TorchScript.
            ValueError: a name in ``keep`` is not an argument of ``target``, or ``forward`` was replaced on
                the module instance.
        """
        return self._applied(target)  # type: ignore[no-any-return]

    def _applied(self, target: Any) -> Any:
        if isinstance(target, nn.Module):
            return _apply_to_instance(target, self)
        if isinstance(target, type) and issubclass(target, nn.Module):
            _check_is_called(target)
            if _is_bound(target):
                name = target.__name__
                msg = (
                    f"run_in: other code uses {name} too; derive a class, class Mine({name}), and decorate "
                    "that"
                )
                raise TypeError(msg)
            target.forward = _function_in(target.forward, self)
            return target
        if isinstance(target, MethodType):
            name = target.__func__.__qualname__
            msg = f"run_in: {name} is bound to an object, which has copies; decorate it in its class"
            raise TypeError(msg)
        if callable(target) and not isinstance(target, type):
            return _function_in(target, self)
        msg = f"run_in: {target!r} is not a module, module class or function"
        raise TypeError(msg)


def _is_bound(kind: type) -> bool:
    """Return whether looking up a class by its module and qualified name finds this class.

    While a decorator of the class runs, the lookup does not find the class yet.
    """
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind


def _apply_to_instance(module: nn.Module, settings: RunIn) -> nn.Module:
    compiled = vars(module).get("_modules", {}).get("_orig_mod")
    # The inner module gets a new class, so torch.compile recompiles it. The wrapper keeps its class.
    if compiled is not None:
        _apply_to_instance(compiled, settings)
        return module
    _check_is_called(type(module))
    if "forward" in vars(module):
        msg = (
            f"run_in: the forward of this {type(module).__name__} was replaced on the instance; apply "
            "run_in before it is replaced"
        )
        raise ValueError(msg)
    changed = change_class(module, _methods_in, settings)
    if "torch._dynamo" in sys.modules and is_older(torch_release(), "2.12"):
        torch.compiler.reset()  # Guards miss a change of the class.
    return changed


def _methods_in(original: type[nn.Module], settings: RunIn) -> dict[str, Any]:
    return {"forward": _function_in(original.forward, settings)}


def _function_in(function: Callable[..., Any], settings: RunIn) -> Callable[..., Any]:
    """Return a function that casts its arguments, then runs the original with autocast off."""
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        msg = f"run_in: {function.__name__} is a generator or coroutine function; decorate what it calls"
        raise TypeError(msg)
    dtype, keep, cast_back = settings.dtype, settings.keep, settings.cast_back
    names, rest = _names_by_position(function, keep)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        named = [*zip([*names, *[rest] * len(args)], args, strict=False), *kwargs.items()]
        castable = [value for name, value in named if cast_back and name not in keep]
        back = next((leaf.dtype for leaf in tree_leaves(castable) if _castable(leaf)), None)
        values = [value if name in keep else cast_tensors(value, dtype) for name, value in named]
        args, kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
        off = [autocast(device, enabled=False) for device in _DEVICES if torch.is_autocast_enabled(device)]
        output = call_in(off, function, args, kwargs)
        return output if back is None else cast_tensors(output, back)

    run.__script_unsupported = "run_in is not supported in script mode"  # type: ignore[attr-defined]
    # Without ``ignore``, torch.jit.script would compile the wrapped function.
    torch.jit.ignore(run)  # type: ignore[no-untyped-call]
    return run


def _castable(value: Any, device_type: str | None = None) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and device_type in {None, value.device.type}
    )


def cast_tensors(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
    """Cast the tensors in a nested value, or only those on one device type.

    If no tensor needs a cast, ``value`` itself is returned.
    """
    leaves = [leaf for leaf in tree_leaves(value) if _castable(leaf, device_type)]
    if all(leaf.dtype is dtype for leaf in leaves):
        return value
    return tree_map(lambda leaf: leaf.to(dtype) if _castable(leaf, device_type) else leaf, value)


def _names_by_position(function: Callable[..., Any], keep: frozenset[str]) -> tuple[list[str], str]:
    """Return the names of positional arguments, and the name of ``*args``. Skipped if ``keep`` is empty."""
    if not keep:
        return [], ""
    name = getattr(function, "__qualname__", repr(function))
    try:
        kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    except ValueError as error:
        msg = f"run_in(keep=...): the names of the arguments of {name} cannot be read; wrap it in a function"
        raise ValueError(msg) from error
    unknown = sorted(keep - kinds.keys())
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds.values():
        near = nearest(unknown[0], kinds)
        msg = f"run_in(keep=...): {name} has no argument {unknown[0]!r}{near}; it has {', '.join(kinds)}"
        raise ValueError(msg)
    rest = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL]
    return [name for name, kind in kinds.items() if kind in _POSITIONAL], rest[0] if rest else ""


def _check_is_called(kind: type[nn.Module]) -> None:
    if kind.forward is nn.Module.forward:
        msg = f"run_in: a {kind.__name__} has no forward and is never called; apply it to its children"
        raise TypeError(msg)


def apply_fp32_modules(
    model: nn.Module, patterns: Iterable[str], *, keep: Iterable[str] = (), cast_back: bool = False
) -> list[str]:
    """Make the submodules that match a pattern run in fp32.

    Args:
        model: the model, which is changed in place.
        patterns: shell patterns for names in ``model.named_modules()``, such as ``"*.roi_pool"``, or names of
            classes, such as ``"LayerNorm"``.
        keep: the names of arguments that are not cast, as in ``run_in``.
        cast_back: True casts outputs back to the dtype of the inputs, as in ``run_in``.

    Returns:
        The names of the matching modules, in the order of ``named_modules``.

    Raises:
        ValueError: a pattern matches no module. The error names the most similar name.
        TypeError: a matching module is a container without its own ``forward``, such as ``ModuleList``. Match
            the children of the container instead.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    require_matches([model], patterns)
    in_fp32 = run_in(torch.float32, keep=keep, cast_back=cast_back)
    modules = matched_modules(model, patterns)
    for module in modules.values():
        in_fp32(module)
    return list(modules)
