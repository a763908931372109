"""Which ops a program calls, by the names that rules are given to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent

from amp_plugin.casting.dispatcher import rules_on_trial
from amp_plugin.casting.op_names import overloads_of, schema_of, written_arguments
from amp_plugin.casting.rules import OpRules
from amp_plugin.tuning.workload import NoObserver, Workload

# Their results are no floating-point numbers, or are what the caller asked for by dtype.
_LEFT_OUT: Final = {
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "argmax", "argmin", "argsort"),
    *("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "all", "any"),
    *("_to_copy", "clone", "item", "is_nonzero", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_full", "bernoulli", "rand_like", "randn_like", "nonzero", "arange"),
}
_NOT_FORWARD: Final = ("autograd::engine", "Optimizer.")


def used_ops(workload: Workload, rules: OpRules) -> list[str]:
    """Run a workload's first batch and return the ops it calls in forward passes, most frequent first.

    An op that another op calls is not listed: autocast looks at the outermost.

    Args:
        workload: what runs.
        rules: which it runs by.

    Returns:
        Names without overload, ``"aten::layer_norm"``, of ops that make new floating-point tensors.
    """
    profiled = profile()
    with rules_on_trial(rules):
        with _without_standard_error():
            profiled.__enter__()  # type: ignore[no-untyped-call]
        try:
            workload.run(NoObserver(), batches=1)
        finally:
            with _without_standard_error():
                profiled.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    counts: dict[str, int] = {}
    for event in profiled.function_events or []:
        if _is_outermost(event):
            counts[event.name] = counts.get(event.name, 0) + 1
    return sorted((op for op in counts if _may_have_rule(op)), key=lambda op: -counts[op])


@contextmanager
def _without_standard_error() -> Iterator[None]:
    """Drop what C++ writes to standard error: the profiler of torch 2.13 tells of each start and stop."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _is_outermost(event: FunctionEvent) -> bool:
    """Whether an event is an op of a forward pass that no other op has called."""
    parent = event.cpu_parent
    while parent is not None:
        if "::" in parent.name or parent.name.startswith(_NOT_FORWARD):
            return False
        parent = parent.cpu_parent
    return "::" in event.name and not event.name.startswith(_NOT_FORWARD)


def _may_have_rule(op: str) -> bool:
    if op.partition("::")[2] in _LEFT_OUT:
        return False
    try:
        overloads = overloads_of(op)
    except ValueError:  # written in place, or no op of the dispatcher
        return False
    return any(_makes_new_tensors(full) for full in overloads)


def _makes_new_tensors(full: str) -> bool:
    schema = schema_of(full)
    tensor = torch._C.TensorType.get()
    returned = [returns for returns in schema.returns if returns.type.isSubtypeOf(tensor)]
    given = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    is_view = any(returns.alias_info is not None for returns in schema.returns)
    return (
        bool(returned and given)
        and not is_view
        and not written_arguments(full) - {"running_mean", "running_var"}
    )
