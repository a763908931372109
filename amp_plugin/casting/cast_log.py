"""Records the argument, the op, the module and the bytes of each cast that autocast makes."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

import torch
from rich import filesize
from rich.box import SIMPLE
from rich.table import Table
from torch import nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Self

from amp_plugin.casting.installed_kernels import KERNELS
from amp_plugin.casting.op_names import argument_names
from amp_plugin.kernels.build import require_native
from amp_plugin.patches import replaced
from amp_plugin.precision import short_name

Kind = Literal["weight", "input", "activation"]
Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """A cast of a tensor that autocast made.

    Attributes:
        module: the path of the module that ran the op. The path begins with the outermost module's class
            name, as in ``Net.layers.0``. It is empty for ops outside of modules.
        op: the full name of the op for which the cast was made, such as ``"aten::linear.default"``.
        argument: the name of the argument that was cast.
        kind: ``"weight"`` for a parameter or buffer, ``"input"`` for an argument of the outermost module, and
            ``"activation"`` for any other tensor.
        parameter: the path of the parameter or buffer in the outermost module. It is empty for other tensors.
        device: the device type, such as ``"cpu"``.
        before, after: the dtypes of the tensor before and after the cast.
        elements: the number of elements of the tensor.
        bytes: the number of bytes that the cast reads and writes. It is 0 for a cached cast.
        cached: True if the result of an earlier cast was reused.
    """

    module: str
    op: str
    argument: str
    kind: Kind
    parameter: str
    device: str
    before: torch.dtype
    after: torch.dtype
    elements: int
    bytes: int
    cached: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CastTotals:
    """Totals over several casts.

    Attributes:
        casts: the number of casts made.
        cached: how many times the result of an earlier cast was reused.
        elements: the number of elements that were cast. Cached casts are not counted.
        bytes: the bytes that the casts read and wrote.
    """

    casts: int = 0
    cached: int = 0
    elements: int = 0
    bytes: int = 0

    @staticmethod
    def of(casts: Iterable[Cast]) -> CastTotals:
        """Return the totals over the given casts."""
        listed = list(casts)
        made = [cast for cast in listed if not cast.cached]
        elements, size = sum(cast.elements for cast in made), sum(cast.bytes for cast in made)
        return CastTotals(casts=len(made), cached=len(listed) - len(made), elements=elements, bytes=size)


def grouped(casts: Iterable[Cast], key: Callable[[Cast], Key]) -> dict[Key, CastTotals]:
    """Group casts by a key. Return a dict from each key to the totals of its casts, most bytes first."""
    groups: dict[Key, list[Cast]] = defaultdict(list)
    for cast in casts:
        groups[key(cast)].append(cast)
    totals = {name: CastTotals.of(alike) for name, alike in groups.items()}
    return dict(sorted(totals.items(), key=lambda item: -item[1].bytes))


_COLUMNS = {"cast": ("module", "op", "argument", "dtypes"), "module": ("module",), "op": ("op",)}


def cast_table(casts: list[Cast], by: Literal["cast", "module", "op"]) -> Table:
    """Return a rich table with one row per cast, module or op. Rows with the most bytes come first."""
    if by not in _COLUMNS:
        msg = f"table(by={by!r}): allowed are {', '.join(_COLUMNS)}"
        raise ValueError(msg)
    columns = _COLUMNS[by]
    table = Table(title="Casts", box=SIMPLE, show_edge=False, pad_edge=False, show_footer=True)
    for column in columns:
        footer = "total" if column == columns[0] else ""
        table.add_column(column, overflow="fold", no_wrap=column == "dtypes", footer=footer)
    for column, footer in zip(("casts", "cached", "moved"), _counts(CastTotals.of(casts)), strict=True):
        table.add_column(column, justify="right", no_wrap=True, footer=footer)
    for row, totals in grouped(casts, lambda cast: tuple(map(_shown(cast).__getitem__, columns))).items():
        table.add_row(*row, *_counts(totals))
    return table


def _shown(cast: Cast) -> dict[str, str]:
    return {
        "module": cast.module or "(no module)",
        "op": cast.op.removeprefix("aten::").removesuffix(".default"),
        "argument": cast.argument if cast.argument == cast.kind else f"{cast.argument} ({cast.kind})",
        "dtypes": f"{short_name(cast.before)} → {short_name(cast.after)}",
    }


def _counts(totals: CastTotals) -> tuple[str, ...]:
    return f"{totals.casts:,}", f"{totals.cached:,}", filesize.decimal(totals.bytes)


# This path index marks ops that run outside of all modules.
_OUTSIDE = -1


class CastLog:
    """The casts that autocast made while the log was open. ``log_casts`` returns this object."""

    def __init__(self, model: nn.Module | None = None) -> None:
        require_native("log_casts")
        KERNELS.install()
        self._model = model
        self._collected: list[Cast] = []
        self._is_open = False
        self._watching = ExitStack()
        self._lock = threading.RLock()
        # The paths of modules. The native log refers to a path by its index.
        self._paths: list[str] = []
        # Maps each module to the index of its path.
        # Modules are compared by identity, because the hashes of some modules change.
        self._numbers = WeakIdKeyDictionary()
        # Maps the address of a parameter's TensorImpl to the parameter's path.
        self._parameters: dict[int, str] = {}
        # Maps the address of a TensorImpl to the number of active calls with this tensor as an argument.
        self._inputs: Counter[int] = Counter()

    def __enter__(self) -> Self:
        """Start logging. Only one log can be open in a process at a time.

        Raises:
            RuntimeError: another log is open.
        """
        if KERNELS.native.log_casts(True):
            msg = "log_casts: another log is open in this process; close it first"
            raise RuntimeError(msg)
        if self._model is not None:
            self._name(self._model)
        self._watching.enter_context(replaced(nn.Module, "__call__", self._following(nn.Module.__call__)))
        self._is_open = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watching.close()
        KERNELS.native.log_casts(False)
        self._collect()
        self._is_open = False

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # Dynamo would trace the logging
                return original(module, *args, **kwargs)
            with self._running(module, (args, kwargs)):
                return original(module, *args, **kwargs)

        return call

    @contextmanager
    def _running(self, module: nn.Module, arguments: Any) -> Iterator[None]:
        with self._lock:
            if module not in self._numbers:
                self._name(module)
            previous = KERNELS.native.set_log_scope(self._numbers[module])
            is_outermost = previous == _OUTSIDE
            leaves = tree_leaves(arguments) if is_outermost else ()
            inputs = Counter(leaf._cdata for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._inputs += inputs
            if is_outermost:
                root = module if self._model is None else self._model
                # Parameter names are looked up on every call, because a module may replace its parameters.
                weights = [*root.named_parameters(), *root.named_buffers()]
                self._parameters.update((tensor._cdata, name) for name, tensor in weights)
        try:
            yield
        finally:
            KERNELS.native.set_log_scope(previous)
            if is_outermost:
                with self._lock:
                    self._collect()
                    self._inputs -= inputs

    def _name(self, root: nn.Module) -> None:
        """Assign an index to a module and to each of its submodules, unless they have one."""
        for name, module in root.named_modules():
            if module not in self._numbers:
                self._numbers[module] = len(self._paths)
                self._paths.append(f"{type(root).__name__}.{name}".rstrip("."))

    def _collect(self) -> None:
        """Move recorded casts from the native log to this log, before the tensors of the casts are freed."""
        self._collected.extend(map(self._cast, KERNELS.native.take_cast_log()))

    def _cast(self, logged: tuple[Any, ...]) -> Cast:
        op, device, before, after, argument, elements, moved, cached, is_weight, scope, tensor = logged
        parameter = self._parameters.get(tensor, "")
        kind: Kind = "weight" if parameter or is_weight else "activation"
        if not parameter and tensor in self._inputs:
            kind = "input"
        return Cast(
            module=self._paths[scope] if scope != _OUTSIDE else "",
            op=op,
            argument=argument_names(op)[argument],
            kind=kind,
            parameter=parameter,
            device=device,
            before=before,
            after=after,
            elements=elements,
            bytes=moved,
            cached=cached,
        )

    def records(self) -> list[Cast]:
        """Return the casts in the order in which autocast made them."""
        if self._is_open:
            self._collect()
        return list(self._collected)

    def __len__(self) -> int:
        """Return the number of recorded casts, including cached casts."""
        return len(self.records())

    def totals(self) -> CastTotals:
        """Return the totals over all casts."""
        return CastTotals.of(self.records())

    def by_module(self) -> dict[str, CastTotals]:
        """Return a dict from each module to the totals of its casts, sorted by bytes, largest first."""
        return grouped(self.records(), lambda cast: cast.module)

    def by_op(self) -> dict[str, CastTotals]:
        """Return a dict from each op to the totals of its casts, sorted by bytes, largest first."""
        return grouped(self.records(), lambda cast: cast.op)

    def table(self, by: Literal["cast", "module", "op"] = "cast") -> Table:
        """Return a rich table of the casts. Equal casts share a row. Rows with the most bytes come first.

        Args:
            by: ``"cast"`` gives one row for each combination of module, op, argument and dtypes. ``"module"``
                gives one row for each module, and ``"op"`` gives one row for each op.

        Raises:
            ValueError: ``by`` has any other value.
        """
        return cast_table(self.records(), by)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a column for each field of ``Cast``. Dtypes are strings."""
        import pandas as pd  # noqa: PLC0415 - optional

        frame = pd.DataFrame(map(asdict, self.records()), columns=[field.name for field in fields(Cast)])
        return frame.assign(**{when: frame[when].map(short_name) for when in ("before", "after")})

    def __repr__(self) -> str:
        total = self.totals()
        return f"CastLog({total.casts} casts, {total.cached} cached, {filesize.decimal(total.bytes)} moved)"


def log_casts(model: nn.Module | None = None) -> CastLog:
    """Record each cast of inputs, weights and activations that autocast makes.

    The log covers ``amp_plugin.autocast`` regions. Casts in ``torch.autocast`` blocks are logged only while
    rules from ``set_default_rules`` are in force, because these blocks otherwise run on torch's kernels.

    The log does not include casts in compiled code, because these casts are part of the compiled graph. The
    log also omits conversions inside a kernel, such as the conversion that ``softmax`` makes if it is given
    ``dtype=``. An open log wraps the calls to modules. If no log is open, there is no cost.

    Args:
        model: the model whose module and parameter names are recorded. By default, every module that is
            called outside another module counts as a model.

    Returns:
        A context manager that records casts. The methods ``records()``, ``table()``, ``to_pandas()``,
        ``by_module()`` and ``by_op()`` return the casts.

    Raises:
        RuntimeError: the native core is missing, or another log is already open when this log is entered.
        TypeError: ``model`` is not a module.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> with log_casts(model) as log, autocast("cpu", dtype=torch.bfloat16):
        ...     y = model(torch.ones(3, 4))
        >>> [(cast.argument, cast.kind, cast.elements) for cast in log.records()]
        [('input', 'input', 12), ('weight', 'weight', 8), ('bias', 'weight', 2)]
    """
    if model is not None and not isinstance(model, nn.Module):
        msg = f"log_casts({model!r}): give a torch.nn.Module, or no argument"
        raise TypeError(msg)
    return CastLog(model)
