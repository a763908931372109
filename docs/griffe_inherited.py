"""Tell Griffe about docstrings and options that classes get only at runtime."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class InheritedDocstrings(griffe.Extension):
    """Resolve ``__doc__ = Base.__doc__``, ``{options}`` and ``@takes(...)``, which Griffe does not run."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete the docstrings and signatures of all classes in a package."""
        for member in pkg.members.values():
            if member.is_alias:
                continue
            if member.is_module:
                self.on_package(pkg=member)
            elif member.is_class:
                if "__doc__" in member.members and member.docstring is None:
                    member.docstring = member.resolved_bases[0].docstring
                _fill_in_options(member)


def _fill_in_options(member: griffe.Class) -> None:
    if member.docstring is not None and "{options}" in member.docstring.value:
        made = getattr(importlib.import_module(member.module.path), member.name)
        member.docstring.value = inspect.cleandoc(made.__doc__ or "")
    init = member.members.get("__init__")
    if init is None or not any("takes(" in str(each.value) for each in getattr(init, "decorators", [])):
        return
    made = getattr(importlib.import_module(member.module.path), member.name)
    init.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                parameter.name,
                kind=griffe.ParameterKind[parameter.kind.name.lower()],
                annotation=inspect.formatannotation(parameter.annotation),
                default=None if parameter.default is parameter.empty else repr(parameter.default),
            )
            for parameter in inspect.signature(made.__init__).parameters.values()
        )
    )
