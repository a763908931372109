"""Explain errors about an op's dtypes or about calling a scaler's methods in the wrong order.

If an op raises an error, it runs again on copies of its arguments, first in the widest of their dtypes and
then in fp32. If one of these runs succeeds, the dtypes were the reason for the error. The reason is reported
only if the error ends the program. An error that the program catches is not reported.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction

from amp_plugin.mistakes import MISTAKES
from amp_plugin.module_paths import module_paths
from amp_plugin.numerics.advise import callers_of, cures_of
from amp_plugin.numerics.finding import Cure, Finding
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call
from amp_plugin.numerics.places import raised_from
from amp_plugin.numerics.values import summarise
from amp_plugin.precision import short_name
from amp_plugin.scaling.gradients import params_of

_ADVICE: Final = {
    "rule": "give {ops} the rule {rule} in the autocast block, or call .to(dtype) or float() on its inputs.",
    "in place": "an in-place op keeps the dtype of the tensor that it writes to: call .to(dtype) on the "
    "other inputs of {op}, or create that tensor in the dtype of the other inputs.",
    "cast": "call .to(dtype) on the inputs of {op} so that their dtypes agree, or open an autocast block "
    "around it.",
    "function": "{op} ran in the backward pass of {function}, an autograd function of the program, where no "
    "autocast block is open: decorate its forward with amp_plugin.custom_fwd and its backward with "
    "amp_plugin.custom_bwd; with custom_fwd(cast_inputs=torch.float32) it computes in fp32.",
    "line": "torch checked the dtypes in this line before it called an op: call .to(dtype) or float() on the "
    "inputs, or run the module in fp32.",
    "trace": "call .to(dtype) or float() on the tensors that this line reads so that their dtypes agree, or "
    "run the module in fp32. Run the script with `amp-plugin diagnose` instead of `amp-plugin run` to see "
    "the op, and a rule for it.",
    "numpy": "NumPy has no bfloat16: call .float() before .numpy(), or evaluate in fp32, with the option "
    'eval_precision="fp32".',
    "unscale": "{names} float16, and so are the gradients, which lose values below 6e-8: keep the parameters "
    "that are trained in float32. Autocast casts them where an op computes in 16 bits.",
}
_TO_FLOAT32: Final = """\
for param in {name}.parameters():
    if param.requires_grad:
        param.data = param.data.float()
"""
# Parts of the messages of dtype errors that torch raises before it calls an op.
_REFUSES: Final = re.compile(
    r"same (data ?)?type|same dtype|[Uu]nsupported dtype|[Ll]ow precision dtypes|does not match weight dtype|"
    r"[Tt]ype promoting not supported|expected scalar type|must be either float or double"
)

_UNSCALES: Final = "Attempting to unscale FP16 gradients"  # the error of a scaler, torch's or ours
_NUMPY: Final = "Got unsupported ScalarType"  # the error of Tensor.numpy(), which is not an op

# Words that occur in the dtype errors of ops. They are used if the op cannot run again in other dtypes.
_OF_DTYPES: Final = re.compile(
    rf"{_REFUSES.pattern}|\bdtypes?\b|scalar type|\b(Half|BFloat16|b?float16)\b|HalfTensor|BFloat16Type"
)

# Maps part of a scaler's error message to (method, when it was called, error code).
_ORDERS: Final = {
    "unscale_() is being called after step()": (
        "unscale_()",
        "after step(), without update() in between",
        "AMP004",
    ),
    "step() has already been called since the last update()": (
        "step()",
        "twice, without update() in between",
        "AMP004",
    ),
    "unscale_() has already been called on this optimizer": (
        "unscale_()",
        "twice, without step() and update() in between",
        "AMP007",
    ),
}

Refused = tuple[BaseException, Finding]
"""An error that an op raised because of dtypes, and the finding to report if this error ends the program."""


def refused(tracker: Tracker, call: Call, error: BaseException) -> Refused | None:
    """Rerun a failed op in other dtypes.

    Return None if the dtypes were not the reason for the error.
    """
    dtypes = {given.tensor.dtype for given in call.arguments}
    if not isinstance(error, (RuntimeError, TypeError)) or not dtypes:
        return None
    if any(dtype.is_complex for dtype in dtypes):
        return None
    widest = max(dtypes, key=lambda dtype: (dtype.itemsize, torch.finfo(dtype).max))
    candidates = {"promote": widest} if len(dtypes) > 1 else {}
    for rule, dtype in [*candidates.items(), ("fp32", torch.float32)]:
        if (dtypes != {dtype} or call.traits.calls_in_block) and call.runs_in(dtype):
            return error, _finding(tracker, call, rule)
    return None


def _finding(tracker: Tracker, call: Call, rule: str) -> Finding:
    """Describe an op that fails because of the dtypes of its inputs, but runs if an op rule casts them."""
    site, node = call.site, call.node
    inputs = tuple(summarise(a.tensor, tracker.weight(a.tensor) or a.label) for a in call.arguments)
    is_in_place = bool(call.traits.written)
    case = "cast"
    cures: tuple[Cure, ...] = ()
    names: tuple[str, ...] = ()
    function = node._forward_cls if isinstance(node, BackwardCFunction) else None
    if function is not None:
        case, cures = "function", _decorated(function)
    elif is_in_place:
        case = "in place"
    elif site.in_block and not any(given.dtype is torch.float64 for given in inputs):
        names = callers_of(call.forward_op if call.is_backward else call.traits.name)
        case = "rule" if names else "cast"
        address = tracker.address(site.module)
        cures = cures_of(*address, names, call.arguments[0].tensor.device.type, rule=rule)
    text = _ADVICE[case].format(
        op=call.traits.name,
        ops=" and ".join(names),
        rule=rule,
        function="" if function is None else function.__name__,
    )
    return Finding(
        kind="dtype",
        cause="dtype",
        op=call.traits.name,
        forward_op=call.forward_op if call.is_backward else "",
        module=site.module,
        place=site.place,
        caller=site.caller,
        dtype=inputs[0].dtype,
        inputs=inputs,
        numbers=tuple(call.numbers.items()),
        advice=text,
        cures=cures,
        when=tracker.now(),
        device_type=call.arguments[0].tensor.device.type,
        in_block=site.in_block,
        rule_names=names,
        lesson=" and ".join(dict.fromkeys(short_name(given.dtype) for given in inputs))
        + ", and its kernel calls other ops, which autocast casts" * call.traits.calls_in_block,
    )


def findings_at_end(tracker: Tracker, last: Refused | None, error: BaseException) -> Iterator[Finding]:
    """Yield a finding if the program ends with an error about dtypes or about the order of calls to a scaler.

    Args:
        tracker: The tracker, which knows the names of modules.
        last: The last op that raised an error because of its dtypes, and the finding that describes it.
        error: The error that ends the program.
    """
    if last is not None and _is_same(last[0], error):
        yield last[1]
    elif (finding := _out_of_order(error) or _float16_gradients(error)) is not None:
        yield replace(finding, when=tracker.now())
    elif _NUMPY in str(error) or (
        isinstance(error, (RuntimeError, ValueError)) and _REFUSES.search(str(error))
    ):
        place, caller = raised_from(error.__traceback__)
        module = _module_of(tracker, error.__traceback__)
        yield Finding(
            kind="dtype",
            cause="dtype",
            module=module,
            place=place,
            caller=caller,
            advice=_ADVICE["numpy" if _NUMPY in str(error) else "line"],
            cures=() if _NUMPY in str(error) else cures_of(*tracker.address(module), (), ""),
            when=tracker.now(),
            reached=str(error).partition("\n")[0],
        )


def _out_of_order(error: BaseException) -> Finding | None:
    """Return a finding if a scaler raised the error because its methods were called in the wrong order."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_scalers = any(isinstance(frame.f_locals.get("self"), torch.amp.GradScaler) for frame in frames)
    order = next((order for part, order in _ORDERS.items() if part in str(error)), None)
    if order is None or not is_scalers:
        return None
    method, lesson, mistake = order
    place, caller = raised_from(error.__traceback__)
    return Finding(
        kind="order",
        cause="order",
        op=method,
        place=place,
        caller=caller,
        advice=MISTAKES[mistake].instead,
        lesson=lesson,
    )


def _float16_gradients(error: BaseException) -> Finding | None:
    """Return a finding if a scaler refused to unscale float16 gradients; else None."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    held: list[Any] = [frame.f_locals.get("optimizer") for frame in frames]
    optimizers = [optimizer for optimizer in held if hasattr(optimizer, "param_groups")]
    if _UNSCALES not in str(error) or not optimizers:
        return None
    params = [p for p in params_of(optimizers[-1]) if p.grad is not None and p.grad.dtype is torch.float16]
    names = [*module_paths(params)]
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    place, caller = raised_from(error.__traceback__)
    return Finding(
        kind="dtype",
        cause="dtype",
        op="unscale_()",
        module=names[0].rpartition(".")[0] if names else "",
        place=place,
        caller=caller,
        advice=_ADVICE["unscale"].format(names=f"{names[0]}{more}" if names else "a parameter is"),
        cures=_in_float32(params, frames),
        lesson="fp16 gradients",
        reached=str(error).partition("\n")[0],
    )


def _in_float32(params: Sequence[Tensor], frames: Sequence[FrameType]) -> tuple[Cure, ...]:
    """Suggest code that converts parameters to float32.

    The result is empty if no variable in ``frames`` refers to a module with one of the parameters.
    """
    left, code = {*map(id, params)}, ""
    for frame in frames:
        for name, held in {**frame.f_globals, **frame.f_locals}.items():
            own = {*map(id, held.parameters())} if issubclass(type(held), nn.Module) else set()
            if own & left:
                code += _TO_FLOAT32.format(name=name)
                left -= own
    return (Cure(place="before the optimizer is made", code=code.rstrip()),) if code else ()


def finding_in_trace(error: BaseException) -> Finding | None:
    """Return a finding for an error about dtypes, based on its traceback alone.

    Return None if the error is not about dtypes.

    The traceback is used if no op was watched while the program ran. A traceback shows the line and the
    module, but not the op.
    """
    if (finding := _float16_gradients(error)) is not None:
        return finding
    if not isinstance(error, (RuntimeError, TypeError, ValueError)) or not _OF_DTYPES.search(str(error)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [held for frame in frames if isinstance(held := frame.f_locals.get("self"), nn.Module)]
    place, caller = raised_from(error.__traceback__)
    names = {module: name for name, module in modules[0].named_modules()} if modules else {}
    path = next((names[module] for module in reversed(modules) if module in names), "")
    model = type(modules[0]).__name__ if modules else ""
    inner = frames[-1].f_locals.values() if frames else ()
    seen = {held.dtype: None for held in inner if isinstance(held, torch.Tensor) and held.is_floating_point()}
    return Finding(
        kind="dtype",
        cause="dtype",
        module=f"{model}.{path}".rstrip("."),
        place=place,
        caller=caller,
        advice=_ADVICE["numpy" if _NUMPY in str(error) else "trace"],
        cures=() if _NUMPY in str(error) else cures_of(model, path, (), ""),
        lesson=" and ".join(map(short_name, seen)) if len(seen) > 1 else "",
        reached=str(error).partition("\n")[0],
    )


def _module_of(tracker: Tracker, trace: TracebackType | None) -> str:
    """Return the path of the innermost module in a traceback, or ``""`` if there is none."""
    held = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    modules = [module for module in held if isinstance(module, nn.Module)]
    return tracker.name_of(modules[-1]) if modules else ""


def _is_same(known: BaseException, error: BaseException) -> bool:
    """Return whether ``error`` is ``known``, or has ``known`` among its causes."""
    cause: BaseException | None = error
    while cause is not None:
        if cause is known or (type(cause) is type(known) and str(cause) == str(known)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _decorated(function: Any) -> tuple[Cure, ...]:
    """Return lines of code that make an autograd function use the dtype of autocast.

    Return no lines if the function has a ``setup_context``.
    """
    name = function.__qualname__
    if function.setup_context is not _SingleLevelFunction.setup_context or "<locals>" in name:
        return ()
    code = (
        f"import amp_plugin\n{name}.forward = staticmethod(amp_plugin.custom_fwd({name}.forward))\n"
        f"{name}.backward = staticmethod(amp_plugin.custom_bwd({name}.backward))"
    )
    return (Cure(place=f"after the class {name}, once", code=code),)
