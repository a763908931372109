"""Examine a model that a function makes: its dtypes, its bytes, what the collectives of a step carry."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from amp_plugin.casting.dtype_names import short_name
from amp_plugin.casting.fp32_modules import matched_names
from amp_plugin.did_you_mean import did_you_mean
from amp_plugin.sharding.dtype_plan import DtypePlan, PlannedDtypes
from amp_plugin.sharding.dtype_report import calls_by_kind, dtype_report
from amp_plugin.sharding.fully_shard import fully_shard
from amp_plugin.sharding.shard_units import is_sharded

Part = dict[str, Any]


def examine_model(target: str, plan: DtypePlan, *, ranks: int = 1, units: Sequence[str] = ()) -> Part:
    """Return what a plan makes of a model, on the first of several ranks that this process plays alone.

    Args:
        target: ``"package.module:function"``; called without arguments it returns the model. It may shard it
            itself: a process group of ``ranks`` is there, which sends nothing.
        plan: Its dtypes.
        ranks: Number of processes.
        units: Patterns of the modules that are gathered one at a time, ``"layers.*"`` for example.

    Returns:
        ``model``; ``parameters``; ``patterns``: pattern -> dtypes; ``modules_in_fp32``, ``units``: how many;
        ``bytes_per_parameter``: on one rank, by kind; ``collectives``: of a step, by dtype.

    Raises:
        ValueError: There is no such function, it returns no model, or a pattern matches nothing.
    """
    make = function_named(target)
    with _group_of(ranks):
        model = make()
        if not isinstance(model, nn.Module):
            msg = f"--model {target} returns {type(model).__name__}; it must return a torch.nn.Module"
            raise ValueError(msg)  # noqa: TRY004 -- a bad command line, as the others are
        kind, planned = type(model).__name__, plan.modules(model)
        if ranks > 1 and not is_sharded(model):
            fully_shard(model, plan, units=_modules(model, units), mesh=_mesh(ranks))
        report = dtype_report(model)
        held = report.bytes()
        return {
            "model": f"{kind} of {target}, on {ranks} rank{'s' if ranks > 1 else ''}",
            "parameters": held.parameters,
            "patterns": {pattern: _text(dtypes) for pattern, dtypes in plan.patterns().items()},
            "modules_in_fp32": sum(short_name(dtypes.compute) == "fp32" for dtypes in planned.values()),
            "units": len(report.units),
            "bytes_per_parameter": {kind: round(share, 3) for kind, share in held.per_parameter().items()},
            "collectives": calls_by_kind(report.collectives()),
        }


def function_named(target: str) -> Callable[[], Any]:
    """Return a function by ``"package.module:function"``; modules of the present folder are found too.

    Raises:
        ValueError: There is none; the text says what is wrong.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        msg = f"--model {target!r} is no function: write package.module:function"
        raise ValueError(msg)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        msg = f"--model {target}: cannot import {module_name}: {error}"
        raise ValueError(msg) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [known for known, value in vars(module).items() if callable(value)]
        msg = f"--model {target}: {module_name} has no function {name!r}{did_you_mean(name, known)}"
        raise ValueError(msg)  # noqa: TRY004 -- a bad command line, as the others are
    return function  # type: ignore[no-any-return]


def _modules(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    found = []
    for pattern in patterns:
        names = matched_names(model, [pattern])
        if not names:
            known = [name for name, _ in model.named_modules() if name]
            msg = f"--units {pattern!r} is no name or class of a module in {type(model).__name__}"
            raise ValueError(msg + did_you_mean(pattern, known))
        outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        found += [model.get_submodule(name) for name in outermost]
    return found


def _text(dtypes: PlannedDtypes) -> str:
    return (
        f"computes in {short_name(dtypes.compute)} (stored {short_name(dtypes.stored)}; gradients "
        f"{short_name(dtypes.gradient)}; reduced {short_name(dtypes.reduction)})"
    )


def _mesh(ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    return init_device_mesh("cpu", (ranks,))


@contextmanager
def _group_of(ranks: int) -> Iterator[None]:
    """Make this process the first of a group whose others do not exist."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 -- registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
