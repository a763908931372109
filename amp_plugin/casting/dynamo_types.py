"""Tell torch 2.11's Dynamo the type of a region that it traces.

``amp_plugin.autocast(...)`` is ``torch.autocast(...)`` while Dynamo traces. Python then asks whether
the object is of the class that was called; torch 2.11 cannot say and stops at a graph break.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch

from amp_plugin.casting.torch_version import torch_older_than

Kind = TypeVar("Kind", bound=type)

_MODULE = "torch._dynamo.variables.ctx_manager"


def named_for_dynamo(kind: Kind) -> Kind:
    """Let Dynamo, now or once it is imported, know what calling the class gives; nothing from torch 2.12 on.

    Args:
        kind: the class of our regions.
    """
    if torch_older_than("2.12"):
        if _MODULE in sys.modules:
            _name(sys.modules[_MODULE])
        else:
            sys.meta_path.insert(0, _OnImport())
    return kind


def _name(ctx_manager: ModuleType) -> None:
    variable = ctx_manager.AutocastModeVariable
    if "python_type" not in vars(variable):
        variable.python_type = lambda _: torch.autocast


class _OnImport(MetaPathFinder):
    """Run ``_name`` once, after the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with a loader that names the type afterwards."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._theirs.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._theirs.exec_module(module)
        _name(module)
