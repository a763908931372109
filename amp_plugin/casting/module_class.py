"""Change how one module runs, by giving it a subclass of its own class.

A forward patched on the instance is lost by deepcopy and DataParallel (both keep calling the
original) and cannot be pickled. A class is followed by all of them: the module stays an instance
of the class it was made from, its ``state_dict`` is untouched, and pickles name the original class.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

# (original class, settings) -> the methods that replace its own. An importable function: pickles name it.
Methods = Callable[[type[nn.Module], Any], dict[str, Any]]
Change = tuple[Methods, Any]


def made_class(original: type[nn.Module], methods: Methods, settings: Any) -> type[nn.Module]:
    """Return a subclass with other methods that shows the original's name; the same one each time.

    Args:
        original: the class to derive from.
        methods: gives name -> function, such as ``forward``.
        settings: what it is given, picklable and hashable.
    """
    key: Any = (original, methods, settings)
    kind: type[nn.Module] = _made_class(*key)
    return kind


@functools.cache
def _made_class(original: Any, methods: Any, settings: Any) -> Any:
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
    if getattr(original, "cls_to_become", None) is not None:  # a lazy module changes its class itself
        namespace["cls_to_become"] = made_class(original.cls_to_become, methods, settings)
    return type(original.__name__, (original,), namespace)


def change_class(module: nn.Module, methods: Methods, settings: Any) -> nn.Module:
    """Give a module the class made with these methods; they replace what they made of it before.

    Raises:
        TypeError: the module is TorchScript, whose class holds its code.
    """
    if isinstance(module, torch.jit.ScriptModule):
        msg = f"{type(module).__name__} is TorchScript and cannot be changed; apply this before scripting"
        raise TypeError(msg)
    original, changes = _changes_of(type(module))
    others = [change for change in changes if change[0] is not methods]
    _set_class(module, original, [*others, (methods, settings)])
    return module


def _set_class(module: nn.Module, kind: type[nn.Module], changes: Iterable[Change]) -> None:
    for methods, settings in changes:
        kind = made_class(kind, methods, settings)
    object.__setattr__(module, "__class__", kind)


def _changes_of(kind: type[nn.Module]) -> tuple[type[nn.Module], list[Change]]:
    """Return the class that is under the made ones, and what they change, innermost first."""
    changes: list[Change] = []
    while "_made_from" in vars(kind) and not _is_importable(kind):
        made: Any = kind
        changes.insert(0, (made._made_by, made._made_with))
        kind = made._made_from
    return kind, changes


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Reduce as the original class does, then say how to change the class again."""
    kind = type(self)
    original, changes = _changes_of(kind)
    build, arguments, *rest = super(_last_made(kind), self).__reduce_ex__(protocol)  # type: ignore[arg-type]
    if not changes:  # a class the user derived from a made one
        return (build, arguments, *rest)
    plain = tuple(original if argument is kind else argument for argument in arguments)
    return (_remake, (original if build is kind else build, plain, changes), *rest)


def _remake(build: Callable[..., nn.Module], arguments: tuple[Any, ...], changes: list[Change]) -> nn.Module:
    module = build(*arguments)
    _set_class(module, type(module), changes)
    return module


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    _, changes = _changes_of(type(self))
    below: Any = super(_last_made(type(self)), self)
    copy: nn.Module = below.__deepcopy__(memo)
    if changes:
        _set_class(copy, _changes_of(type(copy))[0], changes)
    return copy


def _last_made(kind: type) -> type:
    """Return the made class nearest to the original: its methods for copying are the original's."""
    return [base for base in kind.__mro__ if "_made_from" in vars(base)][-1]


def _is_importable(made: type) -> bool:
    """Say whether the class's name leads to the class itself, so that pickle can name it."""
    found: Any = sys.modules.get(made.__module__)
    for part in made.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is made
