"""Hooks that observe each call to a model's modules without affecting the program.

The hooks are removed while torch.compile traces, so compiled code contains neither the hooks nor guards on
them. Copies and pickles of the model do not contain the hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_compiling

from amp_plugin.kernels.tracers import untraced
from amp_plugin.patches import replaced
from amp_plugin.patterns import clean_name

OnCall = Callable[[str, nn.Module, Any, Any], None]
"""A function that is called with a module's name, the module, the inputs (args, kwargs) and the output."""

_COMPILED: Final = "compiled"
_SCRIPTED: Final = "scripted"


def prefixes(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each model with a prefix for the names of its modules.

    The prefix is empty for a single model. For several models, a prefix looks like ``Critic[1].``.
    """
    for place, model in enumerate(models):
        yield (f"{type(model).__name__}[{place}]." if len(models) > 1 else ""), model


def _nothing(*_: object) -> None:
    """Do nothing. The hooks of a copied model call this function, so that the copy is not observed."""


class ModuleHooks:
    """Calls a function after each call to a module.

    Modules are observed only between ``open()`` and ``close()``.

    Each module's hook is this object, bound to the name of the module. A copy of the object does nothing.

    Attributes:
        models: The models to observe.
        unseen: The names of compiled or scripted modules, whose submodules cannot have hooks.
    """

    def __init__(self, models: Sequence[nn.Module], on_call: OnCall) -> None:
        self.models, self._on_call = models, on_call
        self.unseen: list[str] = []
        self._placed, self._open = ExitStack(), ExitStack()

    def open(self) -> None:
        """Place the hooks."""
        if "torch._dynamo" in sys.modules:  # if dynamo is not loaded, nothing has been compiled
            from torch._dynamo.callback import callback_handler  # noqa: PLC0415 - slow to load

            starts, ends = callback_handler.start_callbacks, callback_handler.end_callbacks
            for callbacks, callback in ((starts, self._take_off), (ends, self._place)):
                callbacks.append(callback)
                self._open.callback(_discard, callbacks, callback)
        self._place()

    def close(self) -> None:
        """Remove the hooks."""
        self._open.close()
        self._take_off()

    @untraced
    def __call__(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Call the function with the name, inputs and output of a module call."""
        if not is_compiling():
            self._on_call(name, module, (args, kwargs), output)

    def __deepcopy__(self, memo: object) -> ModuleHooks:
        return ModuleHooks((), _nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace the hook in a pickle with a built-in function that does nothing."""
        return getattr, (nullcontext(), "__exit__")

    @untraced
    def _take_off(self, *_: object) -> None:
        self._placed.close()

    @untraced
    def _place(self, *_: object) -> None:
        self._take_off()
        self.unseen = []
        known: set[int] = set()  # ids of modules with a hook; a module may be registered in several places
        for prefix, model in prefixes(self.models):
            for name, module in self._visible(prefix.rstrip("."), model):
                if id(module) in known:
                    continue
                known.add(id(module))
                hook = partial(self, name)
                if _compiled_call(module) is None:
                    handle = module.register_forward_hook(hook, with_kwargs=True)
                    self._placed.callback(handle.remove)
                else:  # after module.compile() a hook on the module would be part of the graph
                    seen = _then(_compiled_call(module), module, hook)
                    self._placed.enter_context(replaced(module, "_compiled_call_impl", seen))

    def _visible(self, name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules whose calls run in Python, with their names.

        Modules inside a compiled module are left out.
        """
        if isinstance(module, torch.jit.ScriptModule):
            self.unseen.append(f"{_shown(name)} ({_SCRIPTED})")
            return
        yield clean_name(name), module
        if _compiled_call(module) is not None or type(module).__name__ == "OptimizedModule":
            self.unseen.append(f"{_shown(name)} ({_COMPILED})")
            return
        for inner, child in module.named_children():
            yield from self._visible(f"{name}.{inner}".lstrip("."), child)


def _compiled_call(module: nn.Module) -> Any:
    """Return the compiled function that ``module.compile()`` has set on a module, or None."""
    return getattr(module, "_compiled_call_impl", None)


def _shown(name: str) -> str:
    return clean_name(name) or "(model)"


def _then(call: Callable[..., Any], module: nn.Module, hook: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that calls a module and then calls a hook with its inputs and output."""

    def seen(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        hook(module, args, kwargs, output)
        return output

    return seen


def _discard(callbacks: list[Any], callback: Any) -> None:
    with suppress(ValueError):
        callbacks.remove(callback)
