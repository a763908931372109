"""Show a class that takes its docstring from its first base class with that docstring."""

from __future__ import annotations

from typing import Any

import griffe


class InheritedDocstrings(griffe.Extension):
    """Resolve ``__doc__ = Base.__doc__``, which Griffe does not run, once all modules are read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Give the classes of a package and of its modules what they take."""
        for member in pkg.members.values():
            if member.is_alias:
                continue
            if member.is_module:
                self.on_package(pkg=member)
            elif member.is_class and "__doc__" in member.members and member.docstring is None:
                member.docstring = member.resolved_bases[0].docstring
