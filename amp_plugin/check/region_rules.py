"""The ``amp-plugin check`` rules about code inside autocast regions, and about dtypes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from amp_plugin.check.flow import Event, facts
from amp_plugin.check.module import Hit, Module
from amp_plugin.check.names import FunctionNode

_OTHER_SCALERS = re.compile(r"scaler|apex|deepspeed|accelerat|fabric|loss_scale|lightning", re.IGNORECASE)
_OTHER_MASTERS = re.compile(r"apex|deepspeed|master|FP16_Optimizer|store_weights|float32_copy", re.IGNORECASE)
# Float16's largest number, and the threshold below which numbers round to 0 in float16.
_LARGEST, _SMALLEST = 65504.0, 2.0**-25
_PRODUCTS = {"matmul", "bmm", "mm", "linear", "conv1d", "conv2d", "conv3d", "einsum", "baddbmm", "addmm"}
_KEEP_DTYPE = {
    "transpose",
    "view",
    "reshape",
    "permute",
    "contiguous",
    "masked_fill",
    "unsqueeze",
    "squeeze",
    "clone",
}
_THREADS = {"threading.Thread", "concurrent.futures.ThreadPoolExecutor", "multiprocessing.pool.ThreadPool"}


def backward_in_autocast(module: Module) -> Iterator[Hit]:
    """AMP008: Find backward passes inside an autocast region."""
    for event in module.events():
        is_backward = event.kind in {"scaled backward", "backward", "framework backward"}
        region = event.context.region
        if is_backward and region is not None and region.is_sure:
            yield Hit(event.call)


def bce_in_autocast(module: Module) -> Iterator[Hit]:
    """AMP009: Find binary_cross_entropy inside an autocast region. CPU regions allow it, and are left out."""
    for event in module.events():
        region = module.region_around(event.context, event.scope)
        if region is None or region.device == "cpu" or not region.is_sure:
            continue
        is_function = module.names.dotted(event.call.func) == "torch.nn.functional.binary_cross_entropy"
        if is_function or module.roles(event.call.func, event.scope) == {"bce"}:
            yield Hit(event.call)


def half_weights_trained(module: Module) -> Iterator[Hit]:
    """AMP010: Find models that are converted to 16 bits before an optimizer trains their parameters."""
    if _OTHER_MASTERS.search(module.identifiers):
        return
    for flow in module.flows:
        converted: dict[object, Event] = {}
        for event in flow.events:
            function = event.call.func
            if isinstance(function, ast.Attribute) and _to_16_bits(module, event):
                key = module.names.key(function.value, event.scope)
                if key is not None:
                    converted[key] = event
            if "optimizer" not in module.names.made_by(event.call):
                continue
            for trained in _parameters_of(event.call):
                key = module.names.key(trained, event.scope)
                before = converted.get(key)
                if before is not None and before.context.goes_with(event.context):
                    yield Hit(before.call)


def _to_16_bits(module: Module, event: Event) -> bool:
    function = event.call.func
    method = function.attr if isinstance(function, ast.Attribute) else ""
    if method in {"half", "bfloat16"} and not event.call.args:
        return True
    given = [*event.call.args, *(word.value for word in event.call.keywords if word.arg == "dtype")]
    dtypes = {"torch.float16", "torch.half", "torch.bfloat16"}
    return method == "to" and any(module.names.dotted(value) in dtypes for value in given)


def _parameters_of(call: ast.Call) -> Iterator[ast.AST]:
    """Yield each model whose ``parameters()`` are passed to a call."""
    for value in call.args[:1] or [word.value for word in call.keywords if word.arg == "params"]:
        function = value.func if isinstance(value, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == "parameters":
            yield function.value


def fp16_without_scaler(module: Module) -> Iterator[Hit]:
    """AMP011: Find float16 training without a scaler: a region, a backward pass and a step."""
    unused = _scalers_never_used(module)
    others = " ".join(name for name in module.identifiers.split() if name not in unused)
    if _OTHER_SCALERS.search(others) or "set_autocast" in others:
        return
    for flow in module.flows:
        for backward in flow.of("backward"):
            earlier = flow.events[: backward.position]
            later = flow.events[backward.position :]
            regions = [e.context.region for e in earlier if e.context.region is not None]
            stepped = any(e.kind == "optimizer step" for e in later)
            if regions and stepped and regions[-1].dtype == "float16" and regions[-1].device != "cpu":
                yield Hit(backward.call)


def _scalers_never_used(module: Module) -> set[str]:
    """Return the names of scalers that are created but never used, or an empty set if any scaler is used."""
    made = {
        key
        for key, values in module.names.bound.items()
        if any(isinstance(value, ast.Call) and "scaler" in module.names.made_by(value) for value, _ in values)
    }
    read = {node.id for node in module.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    names = {key.text for key in made}
    return (
        set()
        if names & read or any("." in name for name in names)
        else {"GradScaler", "torch.cuda.amp", *names}
    )


def scaler_with_bf16(module: Module) -> Iterator[Hit]:
    """AMP012: Find enabled scalers in modules in which all regions are bfloat16."""
    if not all(region.dtype == "bfloat16" and region.is_sure for region in module.regions):
        return
    scaled = {
        event.who
        for flow in module.flows
        if any(e.context.region for e in flow.events)
        for event in flow.of("scaled backward")
    }
    for key in scaled:
        made = module.names.bound.get(key, []) if key else []
        for value, _ in made if len(made) == 1 else ():
            if not isinstance(value, ast.Call) or "scaler" not in module.names.made_by(value):
                continue
            words = {word.arg: word.value for word in value.keywords}
            if None not in words and _is_on_with_regions(module, words.get("enabled")):
                yield Hit(value)


def _is_on_with_regions(module: Module, enabled: ast.expr | None) -> bool:
    """Return True if a scaler is enabled whenever an autocast region is enabled."""
    if enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True):
        return True
    when = tuple(facts(enabled, holds=True))
    return bool(module.regions) and all(region.when == when for region in module.regions)


def cuda_scaler_on_cpu(module: Module) -> Iterator[Hit]:
    """AMP019: Find scalers for CUDA in modules in which all autocast regions are on the CPU."""
    if not module.regions or any(region.device != "cpu" for region in module.regions):
        return
    for event in module.events():
        dotted = module.names.dotted(event.call.func)
        if not {"scaler", "enabled scaler"} <= module.names.made_by(event.call) or ".cpu." in dotted:
            continue
        words = {word.arg: word.value for word in event.call.keywords}
        given = words.get("device") or (event.call.args[0] if event.call.args else None)
        if ".cuda." in dotted or (
            None not in words and (given is None or module.names.constant(given, event.scope) == "cuda")
        ):
            yield Hit(event.call)


def autocast_over_threads(module: Module) -> Iterator[Hit]:
    """AMP017: Find threads that start inside a region, and DataParallel inside a bfloat16 region."""
    for event in module.events():
        region = event.context.region
        if region is None:
            continue
        function = event.call.func
        if isinstance(function, ast.Attribute) and function.attr in {"start", "submit", "map"}:
            made = (value for value, _ in module.names.values(function.value, event.scope))
            if any(
                isinstance(call, ast.Call) and module.names.dotted(call.func) in _THREADS for call in made
            ):
                yield Hit(event.call)
        elif region.dtype == "bfloat16" and "data parallel" in module.roles(function, event.scope):
            detail = "the threads of DataParallel compute in float16 in a bfloat16 region"
            yield Hit(event.call, detail)


def function_without_custom_fwd(module: Module) -> Iterator[Hit]:
    """AMP018: Find autograd Functions without custom_fwd that compute matrix products inside a region."""
    reported: set[str] = set()
    for event in module.events():
        function = event.call.func
        if not (isinstance(function, ast.Attribute) and function.attr == "apply"):
            continue
        name = function.value.id if isinstance(function.value, ast.Name) else ""
        kind = module.names.classes.get(name)
        bases = {module.names.dotted(base) for base in kind.bases} if kind else set()
        if not bases & {"torch.autograd.Function", "torch.autograd.function.Function"} or name in reported:
            continue
        methods = [module.names.functions.get(f"{name}.{m}") for m in ("forward", "backward")]
        is_decorated = any("custom_" in ast.unparse(d) for m in methods if m for d in m.decorator_list)
        region = module.region_around(event.context, event.scope)
        if region is not None and not is_decorated and any(_has_product(m) for m in methods if m):
            reported.add(name)
            yield Hit(event.call)


def _has_product(function: FunctionNode) -> bool:
    return any(_is_product(node) for node in ast.walk(function))


def _is_product(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PRODUCTS


def constant_out_of_range(module: Module) -> Iterator[Hit]:
    """AMP014: Find fill values and eps that float16 cannot represent.

    A fill value or eps is reported only if it is used with the result of a float16 matrix product.
    """
    for flow in module.flows:
        places = [(event.call, event.context) for event in flow.events] + flow.divisions
        covered = []
        for node, context in places:
            region = module.region_around(context, flow.scope)
            if region is not None and region.dtype == "float16":
                covered.append(node)
        narrow = _narrow_names(flow.scope.node) if covered else set()
        for node in covered:
            for value, tensor in _fill_values(node):
                if _LARGEST < abs(value) < float("inf") and _is_narrow(tensor, narrow):
                    yield Hit(node, f"float16 cannot hold {value:g}")
            for value, tensor in _divisors(node):
                if 0 < value < _SMALLEST and _is_narrow(tensor, narrow):
                    yield Hit(node, f"{value:g} is 0 in float16")


def _fill_values(node: ast.AST) -> Iterator[tuple[float, ast.AST]]:
    """Yield the fill value of a ``masked_fill`` call, together with its tensor."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 2:
        value = _number(node.args[1]) if node.func.attr in {"masked_fill", "masked_fill_"} else None
        if value is not None:
            yield value, node.func.value


def _divisors(node: ast.AST) -> Iterator[tuple[float, ast.AST]]:
    """Yield the eps and the tensor of each ``tensor + eps`` in a divisor, root or logarithm."""
    inner: ast.AST | None = None
    if isinstance(node, ast.BinOp):
        inner = node.right
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        inner = node.args[0] if node.func.attr in {"log", "sqrt", "rsqrt"} else None
    if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add):
        for eps, tensor in ((inner.left, inner.right), (inner.right, inner.left)):
            value = _number(eps)
            if value is not None:
                yield value, tensor


def _narrow_names(function: ast.AST) -> set[str]:
    """Return the variables that hold the result of a matrix product, or of later ops that keep its dtype."""
    narrow: set[str] = set()
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) and _is_narrow(node.value, narrow) else []
        narrow.update(target.id for target in targets if isinstance(target, ast.Name))
    return narrow


def _is_narrow(node: ast.AST, narrow: set[str]) -> bool:
    if _is_product(node):
        return True
    if isinstance(node, ast.Name):
        return node.id in narrow
    if isinstance(node, ast.BinOp):
        sides = [side for side in (node.left, node.right) if not isinstance(side, ast.Constant)]
        return bool(sides) and _is_narrow(sides[0], narrow)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _KEEP_DTYPE and _is_narrow(node.func.value, narrow)
    return False


def _number(node: ast.AST) -> float | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    return None
