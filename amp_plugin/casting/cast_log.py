"""See every cast autocast makes: of which argument of which op, in which module, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Literal

import torch
from rich import filesize
from rich.table import Table
from torch import nn
from typing_extensions import Self

from amp_plugin.casting.autocast_kernels import KERNELS
from amp_plugin.casting.cast_table import cast_table
from amp_plugin.casting.casts import Cast, CastTotals, Kind
from amp_plugin.casting.module_scopes import ModuleScopes
from amp_plugin.casting.op_names import argument_names
from amp_plugin.kernels.build import require_native
from amp_plugin.precision import short_name

_TEXTS = 4  # op, device, dtype before, dtype after
_NUMBERS = 7  # argument, elements, bytes, cached, is a weight, scope, identity


class CastLog:
    """The casts made while the log was open; see ``log_casts``."""

    def __init__(self, model: nn.Module | None = None) -> None:
        require_native("log_casts")
        KERNELS.install()
        self._scopes = ModuleScopes(model, when_done=self._collect)
        self._collected: list[Cast] = []
        self._is_open = False

    def __enter__(self) -> Self:
        """Start logging; one log can be open in a process.

        Raises:
            RuntimeError: another log is open.
        """
        if torch.ops.amp_plugin._log_casts(True):
            msg = "log_casts: another log is open in this process; close it first"
            raise RuntimeError(msg)
        torch.ops.amp_plugin._take_cast_log()
        self._scopes.open()
        self._is_open = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._scopes.close()
        torch.ops.amp_plugin._log_casts(False)
        self._collect()
        self._is_open = False

    def _collect(self) -> None:
        """Take what the native log holds, while the tensors it names are still alive."""
        texts, numbers = torch.ops.amp_plugin._take_cast_log()
        for start in range(len(texts) // _TEXTS):
            text = texts[start * _TEXTS : (start + 1) * _TEXTS]
            self._collected.append(self._cast(text, numbers[start * _NUMBERS : (start + 1) * _NUMBERS]))

    def _cast(self, texts: list[str], numbers: list[int]) -> Cast:
        op, device, before, after = texts
        argument, elements, size, cached, is_weight, scope, identity = numbers
        parameter = self._scopes.parameter(identity)
        kind: Kind = "weight" if parameter or is_weight else "activation"
        if not parameter and self._scopes.is_input(identity):
            kind = "input"
        return Cast(
            module=self._scopes.path(scope),
            op=op,
            argument=argument_names(op)[argument],
            kind=kind,
            parameter=parameter,
            device=device,
            before=getattr(torch, before.lower()),
            after=getattr(torch, after.lower()),
            elements=elements,
            bytes=size,
            cached=bool(cached),
        )

    def records(self) -> list[Cast]:
        """Return the casts in the order they happened."""
        if self._is_open:
            self._collect()
        return list(self._collected)

    def __len__(self) -> int:
        """Return the number of records, cached ones included."""
        return len(self.records())

    def totals(self) -> CastTotals:
        """Add up all casts."""
        return CastTotals.of(self.records())

    def by_module(self) -> dict[str, CastTotals]:
        """Add up per module that ran the op, most bytes first."""
        return self._grouped(lambda cast: cast.module)

    def by_op(self) -> dict[str, CastTotals]:
        """Add up per op, most bytes first."""
        return self._grouped(lambda cast: cast.op)

    def _grouped(self, key: Callable[[Cast], Any]) -> dict[Any, CastTotals]:
        groups: dict[Any, list[Cast]] = {}
        for cast in self.records():
            groups.setdefault(key(cast), []).append(cast)
        totals = {name: CastTotals.of(casts) for name, casts in groups.items()}
        return dict(sorted(totals.items(), key=lambda item: -item[1].bytes))

    def table(self, by: Literal["cast", "module", "op"] = "cast") -> Table:
        """Return a rich table; equal casts share a row, the most bytes come first.

        Args:
            by: ``"cast"`` for a row per module, op, argument and dtypes; ``"module"``; ``"op"``.

        Raises:
            ValueError: ``by`` is something else.
        """
        return cast_table(self.records(), by)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a column per field of ``Cast``; dtypes are strings.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas  # noqa: PLC0415, ICN001 - optional
        except ImportError as error:
            msg = "to_pandas() needs pandas: pip install pandas; records() gives the same as dataclasses"
            raise ImportError(msg) from error
        rows = [asdict(cast) for cast in self.records()]
        frame = pandas.DataFrame(rows, columns=[field.name for field in fields(Cast)])
        return frame.assign(before=frame["before"].map(short_name), after=frame["after"].map(short_name))

    def __repr__(self) -> str:
        total = self.totals()
        return f"CastLog({total.casts} casts, {total.cached} cached, {filesize.decimal(total.bytes)} moved)"


def log_casts(model: nn.Module | None = None) -> CastLog:
    """Record every cast of inputs, weights and activations that autocast makes.

    Covers the regions of this package, and ``torch.autocast`` blocks (checkpoint opens one to recompute)
    where ``set_default_rules`` is in force: elsewhere those run on torch's own kernels.
    Casts of compiled code are part of its graph and are not seen; neither are conversions that an
    op makes inside its kernel (``softmax`` with ``dtype=``). Costs nothing while no log is open; an
    open one follows modules by hooks.

    Args:
        model: gives the module and parameter names; default: whatever module is called.

    Returns:
        A context manager; read it with ``records()``, ``table()``, ``to_pandas()``,
        ``by_module()`` and ``by_op()``.

    Raises:
        RuntimeError: there is no native core, or (on entry) another log is open.
        TypeError: ``model`` is no module.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> with log_casts(model) as log, autocast("cpu", dtype=torch.bfloat16):
        ...     y = model(torch.ones(3, 4))
        >>> [(cast.argument, cast.kind, cast.elements) for cast in log.records()]
        [('input', 'input', 12), ('weight', 'weight', 8), ('bias', 'weight', 2)]
    """
    if model is not None and not isinstance(model, nn.Module):
        msg = f"log_casts({model!r}): a torch.nn.Module is wanted, or nothing"
        raise TypeError(msg)
    return CastLog(model)
