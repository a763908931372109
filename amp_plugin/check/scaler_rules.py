"""The ``amp-plugin check`` rules about the order of backward, unscale, clip, step and update."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from typing import Final

from amp_plugin.check.flow import Event, Flow, Kind
from amp_plugin.check.module import Hit, Module

_PRECISION = re.compile(
    r"\bamp|_amp|scal|fp16|bf16|half|mixed|precision|enabled|cuda|device|^(case|handler) \d", re.IGNORECASE
)
_BACKWARDS: Final[tuple[Kind, ...]] = ("scaled backward", "backward", "framework backward")
_NO_SCALE: Final = {"bf16", "no", "bf16-mixed", "bf16-true", "32-true", "32"}
_UNPREPARED: Final = (
    "the learning rate scheduler advances although Accelerate may have skipped the step; "
    "pass the scheduler to prepare(), or step it only if accelerator.optimizer_step_was_skipped is False"
)
_AHEAD: Final = (
    "the learning rate scheduler steps before scaler.step(optimizer), so the first value of its schedule is "
    "skipped; step it after scaler.update(), and only if the step was taken: if scaler.get_scale() has not "
    "decreased"
)
_RARELY = re.compile(r"%|\blen\(|last|final|num_batch|n_batch|steps_per_epoch", re.IGNORECASE)


def clip_before_unscale(module: Module) -> Iterator[Hit]:
    """AMP001: Find calls to torch's clipping functions that clip gradients before they are unscaled."""
    for flow in module.flows:
        for clip in filter(_bounds, flow.of("clip")):
            if any(_clips_scaled(flow, clip, step) for step in flow.of("scaler step")):
                yield Hit(clip.call)
        if not flow.of("scaled backward", "unscale", "scaler clip", "backward", "framework backward"):
            yield from _clip_in_a_step(module, flow)


def _clips_scaled(flow: Flow, clip: Event, step: Event) -> bool:
    """Return whether gradients are clipped after a scaled backward pass and before ``scaler.step()``."""
    if step.position < clip.position or step.context.excludes(clip.context):
        return False
    earlier = [
        event
        for event in flow.events[: clip.position]
        if event.kind in _BACKWARDS
        and not event.context.excludes(clip.context)
        and not event.context.excludes(step.context)
        and not _is_in_reserve(event, clip)
    ]
    if not earlier or (earlier[-1].kind, earlier[-1].who) != ("scaled backward", step.who):
        return False
    is_free = _adds_no_doubt(clip, {*earlier[-1].context.conditions, *step.context.conditions})
    return is_free and not _is_interrupted(flow, earlier[-1], clip)


def _is_in_reserve(event: Event, other: Event) -> bool:
    """Return True if ``event`` is in an ``except`` block that does not contain ``other``."""
    return any(text.startswith("handler ") and holds for text, holds in _extra(event, other))


def _extra(event: Event, other: Event) -> set[tuple[str, bool]]:
    """Return the conditions around ``event`` that are not around ``other``."""
    return {*event.context.conditions} - {*other.context.conditions}


def _adds_no_doubt(event: Event, known: set[tuple[str, bool]]) -> bool:
    """Return True if no condition around an event depends on the precision, apart from those in ``known``."""
    return not any(_PRECISION.search(text) for text, _ in {*event.context.conditions} - known)


def _bounds(clip: Event) -> bool:
    """Return whether a clipping call changes gradients. With a limit of inf, it only measures the norm."""
    words = [word.value for word in clip.call.keywords if word.arg in {"max_norm", "clip_value"}]
    bound = ast.unparse((*clip.call.args[1:2], *words, clip.call)[0])
    return not re.fullmatch(r"(math|np|numpy|torch)\.inf|float\(['\"]\+?inf(inity)?['\"]\)|inf", bound)


def _clip_in_a_step(module: Module, flow: Flow) -> Iterator[Hit]:
    """Find gradient clipping before ``scaler.step()``, in a function that contains no backward pass.

    If any code in the module unscales gradients, the rule reports nothing.
    """
    if any(event.kind in {"unscale", "scaler clip"} for event in module.events()):
        return
    scaled = {event.who for event in module.events() if event.kind == "scaled backward"}
    for clip in filter(_bounds, flow.of("clip")):
        for step in flow.of("scaler step"):
            is_next = clip.position < step.position and clip.context.goes_with(step.context)
            if is_next and step.who in scaled and not _is_interrupted(flow, clip, step):
                yield Hit(clip.call)
                break


def step_past_scaler(module: Module) -> Iterator[Hit]:
    """AMP002: Find ``optimizer.step()`` after a scaled backward pass, or after ``scaler.step(optimizer)``."""
    for flow in module.flows:
        for step in flow.of("optimizer step"):
            scaled = _last_before(flow, step, *_BACKWARDS)
            if scaled is None or scaled.kind != "scaled backward" or _is_interrupted(flow, scaled, step):
                if any(_has_stepped(flow, other, step) for other in flow.of("scaler step")):
                    yield Hit(step.call)
                continue
            others = (e for e in flow.of("scaler step") if e.who == scaled.who)
            if not any(other.context.excludes(step.context) for other in others):
                yield Hit(step.call)


def _has_stepped(flow: Flow, before: Event, step: Event) -> bool:
    """Return True if ``optimizer.step()`` always runs after ``scaler.step(optimizer)`` for the same loss.

    Code with this mistake was meant to call ``optimizer.step()`` only in the branch without a scaler, but the
    call was written outside of that branch.
    """
    is_next = before.position < step.position and before.context.loops == step.context.loops
    if not is_next or before.optimizer != step.who or _extra(step, before):
        return False
    earlier = flow.events[: step.position]
    backward = [e for e in earlier if e.kind in _BACKWARDS and not e.context.excludes(before.context)]
    if not backward or (backward[-1].kind, backward[-1].who) != ("scaled backward", before.who):
        return False
    between = [e for e in flow.between(before, step) if not e.context.excludes(before.context)]
    calls = " ".join(ast.unparse(e.call.func) for e in between)
    return backward[-1].position < before.position and not re.search("backward|train|loss|closure", calls)


_UPDATED_LATE: Final = (
    "update() stands outside the loop that steps, and the second step without it is an error"
)


def no_update(module: Module) -> Iterator[Hit]:
    """AMP004: Find scalers that a module creates and steps, but does not update in the loop."""
    for flow in module.flows:
        yield from _updates_late(module, flow)
    if "get_scale" in module.identifiers:
        return
    events = list(module.events())
    updated = {event.who for event in events if event.kind == "update"}
    touched = {key for event in events for key in event.touches}
    reported: set[object] = set()
    for event in events:
        is_known = event.who is None or event.who in reported | updated | touched
        if (
            event.kind == "scaler step"
            and event.context.loops
            and not is_known
            and _is_made_here(module, event)
        ):
            reported.add(event.who)
            yield Hit(event.call)


def _updates_late(module: Module, flow: Flow) -> Iterator[Hit]:
    """Find updates that come after a loop, although the scaler steps in each iteration of the loop."""
    reported: set[ast.Call] = set()
    for step in flow.of("scaler step"):
        updates = [event for event in module.events() if event.kind == "update" and event.who == step.who]
        are_outside = updates and all(event in flow.events and _is_behind(event, step) for event in updates)
        if (
            are_outside
            and updates[0].call not in reported
            and _steps_each_batch(module, flow, step, updates[0])
        ):
            reported.add(updates[0].call)
            yield Hit(updates[0].call, _UPDATED_LATE)


def _is_behind(update: Event, step: Event) -> bool:
    """Return True if an update comes after the loop that contains a step."""
    outer, inner = update.context.loops, step.context.loops
    is_plain = not (update.call.args or update.call.keywords)
    is_outside = len(outer) < len(inner) and inner[: len(outer)] == outer
    return is_plain and is_outside and update.position > step.position


def _steps_each_batch(module: Module, flow: Flow, step: Event, update: Event) -> bool:
    """Return True if the loop around a step scales a loss and steps this optimizer in each iteration.

    The result is False if the loop may end after the step, or if the scaler may be passed to other code.
    """
    loop = step.context.loops[-1]
    if step.who is None or step.optimizer is None or not isinstance(loop, ast.For):
        return False
    inside = [event for event in module.events() if loop in event.context.loops]
    scales = any(e.kind == "scaled backward" and _turn(e) == _turn(step) for e in inside)
    is_handed_on = any(e.kind == "unknown" and e.may_change(step.who) for e in (*inside, *flow.events))
    nodes = [*ast.walk(loop)]
    changes = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {
        node.id for argument in step.call.args for node in ast.walk(argument) if isinstance(node, ast.Name)
    }
    ends = any(isinstance(n, (ast.Break, ast.Return)) and n.lineno > step.call.lineno for n in nodes)
    is_sometimes = any(
        not _PRECISION.search(text) or _RARELY.search(text) for text, _ in _extra(step, update)
    )
    return scales and not (is_handed_on or changes & used or ends or is_sometimes)


def _is_made_here(module: Module, event: Event) -> bool:
    """Return True if this module creates the scaler whose method is called.

    The result is False if the call is in a class that has base classes.
    """
    if event.who is None or event.who not in module.names.bound:
        return False
    owner = event.scope.owner()
    bases = owner.node.bases if owner and isinstance(owner.node, ast.ClassDef) else []
    return all(isinstance(base, ast.Name) and base.id == "object" for base in bases)


def update_between_steps(module: Module) -> Iterator[Hit]:
    """AMP005: Find ``update()`` between a scaled backward pass and the ``step()`` or ``unscale_()`` after it.

    The rule ignores programs with amp_plugin's GradScaler, which remembers the scale of each gradient.
    """
    if "amp_plugin.GradScaler" in module.names.imports.values():
        return
    for flow in module.flows:
        for update in flow.of("update"):
            rest = flow.events[update.position + 1 :]
            for event in rest:
                if not _same_scaler(event, update):
                    continue
                if event.kind in {"scaler step", "unscale"} and _same_pass(event, update):
                    before = flow.events[: update.position]
                    if _steps_an_earlier_loss(before, event, update):
                        yield Hit(update.call)
                    break
                if event.kind in {"scaled backward", "update", "unknown"}:
                    break


def _steps_an_earlier_loss(before: list[Event], step: Event, update: Event) -> bool:
    """Return True if a loss is scaled before ``update()``, but its optimizer steps after ``update()``."""
    scaled = [e for e in before if e.kind == "scaled backward" and e.who == step.who and _same_pass(e, step)]
    stepped = [e for e in before if e.kind == "scaler step" and e.who == step.who and _same_pass(e, update)]
    since = before[before.index(scaled[-1]) :] if scaled else []
    return (
        bool(stepped)
        and any(e in since for e in stepped)
        and all(e.optimizer != step.optimizer for e in stepped)
    )


def update_in_accumulation(module: Module) -> Iterator[Hit]:
    """AMP006: Find steps and updates that run at different rates, and updates in iterations without a step.

    Torch's scaler raises an error if no step precedes an update. amp_plugin's scaler does not.
    """
    is_torchs = "amp_plugin.GradScaler" not in module.names.imports.values()
    for flow in module.flows:
        for step in flow.of("scaler step"):
            updates = [e for e in flow.of("update") if _turn(e) == _turn(step)]
            if updates and all(_is_rarer(update, step) for update in updates):
                yield Hit(step.call, "step() runs after each micro-batch, update() once a window")
        for update in flow.of("update"):
            steps = [e for e in flow.of("scaler step") if _turn(e) == _turn(update)]
            if steps and all(_is_rarer(step, update) for step in steps):
                yield Hit(update.call, "update() runs after each micro-batch, step() once a window")
            elif is_torchs and _follows_nothing(flow, update, steps):
                yield Hit(update.call, "update() without a step() before it raises an error")
            elif is_torchs and any(_is_inside_window(flow, update, step) for step in steps):
                yield Hit(update.call, "update() runs within the window of another optimizer")


def _turn(event: Event) -> tuple[object, ...]:
    """Return a key that is the same for all method calls on one scaler in the body of one loop."""
    return event.who, event.context.loops


def _follows_nothing(flow: Flow, update: Event, steps: list[Event]) -> bool:
    """Return True if an update has no step in its branch and no earlier call unscales gradients."""
    before = [e for e in flow.events[: update.position] if not e.context.excludes(update.context)]
    is_plain = not (update.call.args or update.call.keywords)
    return (
        is_plain
        and bool(steps)
        and all(step.context.excludes(update.context) for step in steps)
        and not any(_same_scaler(e, update) and e.kind != "scaled backward" for e in before)
    )


def _is_inside_window(flow: Flow, update: Event, step: Event) -> bool:
    """Return True if ``update()`` runs while an optimizer that has not stepped is accumulating gradients."""
    turn = [e for e in flow.of("scaled backward", "scaler step") if _turn(e) == _turn(update)]
    before = [e for e in turn[: turn.index(step)] if not e.context.excludes(step.context)]
    last = [e for e in turn if e.position < update.position and e.context.goes_with(update.context)]
    if not before or before[-1].kind != "scaled backward" or not last or last[-1].kind != "scaler step":
        return False
    ends = {(text, holds) for text, holds in _extra(step, before[-1]) if holds and "%" in text}
    if last[-1].optimizer == step.optimizer or not ends or _is_cleared(flow, step, ends):
        return False
    if ends <= {*update.context.conditions}:
        return update.position < before[-1].position
    return not any("%" in text for text, _ in update.context.conditions)


def _is_cleared(flow: Flow, step: Event, ends: Collection[tuple[str, bool]]) -> bool:
    """Return True if each iteration clears gradients that may belong to the step's optimizer."""
    optimizers = {e.optimizer for e in flow.of("scaler step")} - {step.optimizer}
    others = {optimizer.text for optimizer in optimizers if optimizer}
    cleared = [event for event in flow.events if _method(event) == "zero_grad"]
    return any(
        ast.unparse(event.call.func).removesuffix(".zero_grad") not in others
        and not {*ends} <= {*event.context.conditions}
        for event in cleared
    )


def _is_rarer(event: Event, other: Event) -> bool:
    """Return True if ``event`` runs only at the end of accumulation windows, but ``other`` always runs."""
    mine, its = {*event.context.conditions}, {*other.context.conditions}
    return its < mine and any("%" in text and holds for text, holds in mine - its)


def unscale_twice(module: Module) -> Iterator[Hit]:
    """AMP007: Find calls to ``unscale_`` that run twice before an update, or after each micro-batch."""
    for flow in module.flows:
        unscales = flow.of("unscale")
        for event in unscales:
            if isinstance(event.call.func, ast.Attribute) and event.call.func.attr != "unscale_":
                continue
            earlier = [e for e in flow.events[: event.position] if _same_optimizer(e, event)]
            turn = (event.who, event.optimizer, event.context.loops)
            steps = [e for e in flow.of("scaler step") if (e.who, e.optimizer, e.context.loops) == turn]
            if earlier and _same_pass(earlier[-1], event) and not _renewed(flow, earlier[-1], event):
                yield Hit(event.call)
            elif steps and all(_is_rarer(step, event) for step in steps):
                yield Hit(event.call, "unscale_() runs after each micro-batch, step() once a window")


def _renewed(flow: Flow, first: Event, last: Event) -> bool:
    return any(e.kind in {"update", "unknown"} and _same_scaler(e, last) for e in flow.between(first, last))


def scheduler_on_skip(module: Module) -> Iterator[Hit]:
    """AMP016: Find schedulers that step before the scaler, or that step even if the scaler skips its step.

    Schedulers that are passed the epoch or a metric, or that step once per epoch, are left out.
    """
    reported: set[ast.Call] = set()
    for flow in module.flows:
        events = module.steps(flow)
        for number, event in enumerate(events):
            if event.kind != "scheduler step" or event.call.args or event.call.keywords:
                continue
            steps = [e for e in events[:number] if e.kind == "scaler step"]
            if event.call not in reported and any(_goes_along(module, event, step) for step in steps):
                reported.add(event.call)
                yield Hit(event.call)
            elif _is_unprepared(module, flow, event):
                yield Hit(event.call, _UNPREPARED)
            elif event.call not in reported and _goes_ahead(module, flow, event):
                reported.add(event.call)
                yield Hit(event.call, _AHEAD)


def _goes_ahead(module: Module, flow: Flow, event: Event) -> bool:
    """Return True if a scheduler steps before the optimizer in each iteration."""
    if event not in flow.events or not event.context.loops:
        return False
    others = flow.of("scaler step", "optimizer step")
    turn = [
        e for e in others if _iterations(e) == _iterations(event) and not e.context.excludes(event.context)
    ]
    before = [e for e in turn if e.position < event.position]
    steps = [e for e in turn if e.position > event.position and e.kind == "scaler step"]
    is_alone = len({step.optimizer for step in steps}) == 1 and not before
    return is_alone and not _extra(event, steps[0]) and _goes_along(module, event, steps[0])


def _goes_along(module: Module, event: Event, step: Event) -> bool:
    """Return True if a scheduler steps whenever a scaler does, even if the scaler skips its step."""
    knows_skips = any(name in module.identifiers for name in ("get_scale", "last_step", "skipped"))
    if _iterations(step) != _iterations(event) or step.context.excludes(event.context):
        return False
    extra, missing = _extra(event, step), _extra(step, event)
    if (extra and knows_skips) or any(_RARELY.search(text) for text, _ in extra | missing):
        return False
    if event.scope is not step.scope and any("sch" not in text.lower() for text, _ in extra):
        # The extra condition may test a flag that says whether the optimizer step was taken.
        return False
    return _adds_no_doubt(event, {*step.context.conditions})


def _is_unprepared(module: Module, flow: Flow, event: Event) -> bool:
    """Return True if the program prepares an optimizer with Accelerate, but not its scheduler."""
    backward = _last_before(flow, event, *_BACKWARDS) if event in flow.events else None
    if backward is None or event.who is None or "optimizer_step_was_skipped" in module.identifiers:
        return False
    framework, precision = _framework(module, backward)
    if framework != "accelerator" or precision in _NO_SCALE or not isinstance(event.call.func, ast.Attribute):
        return False
    calls = [e for e in module.events() if _method(e).startswith("prepare")]
    given = {argument for e in calls for argument in e.call.args}
    names = {ast.unparse(argument) for argument in given}
    steps = [e for e in flow.between(backward, event) if e.kind == "optimizer step"]
    are_known = bool(steps) and all(_values(module, step) & given for step in steps)
    is_given = _values(module, event) & given or {ast.unparse(v) for v in _values(module, event)} & names
    is_beside = any(e.scope.name == event.who.scope for e in calls) and "." not in event.who.text
    is_open = any(isinstance(argument, ast.Starred) for argument in given)
    return are_known and is_beside and not is_given and not is_open and _goes_along(module, event, steps[-1])


def _method(event: Event) -> str:
    return event.call.func.attr if isinstance(event.call.func, ast.Attribute) else ""


def _values(module: Module, event: Event) -> set[ast.AST]:
    """Return the expressions from which the object of a method call may get its value."""
    function = event.call.func
    receiver = function.value if isinstance(function, ast.Attribute) else function
    return {value for value, _ in module.names.values(receiver, event.scope)}


def _iterations(event: Event) -> tuple[ast.AST, ...]:
    """Return the loops around a step, except a loop over the optimizers or schedulers themselves."""
    loops = event.context.loops
    objects = {key.text for key in (event.who, event.optimizer) if key is not None}
    is_over_objects = loops and isinstance(loops[-1], ast.For) and ast.unparse(loops[-1].target) in objects
    return loops[:-1] if is_over_objects else loops


def framework_bypassed(module: Module) -> Iterator[Hit]:
    """AMP003: Find ``loss.backward()`` and torch's clipping functions in Accelerate and Fabric programs.

    If Accelerate or Fabric scales the loss, the program must call the framework's methods for
    backward and clipping.
    """
    for flow in module.flows:
        backwards = flow.of("framework backward")
        for clip in filter(_bounds, flow.of("clip")):
            before = _last_before(flow, clip, *_BACKWARDS)
            if before is None or before.kind != "framework backward":
                continue
            framework, precision = _framework(module, before)
            if framework and precision not in _NO_SCALE:
                better = {"accelerator": "clip_grad_norm_", "fabric": "clip_gradients"}[framework]
                text = f"{before.who.text if before.who else framework}.{better}"
                yield Hit(clip.call, f"clips scaled gradients in fp16; call {text}()")
        for event in flow.of("backward"):
            name = _prepared(module, flow)
            if name and not backwards:
                yield Hit(event.call, f"the loss is not scaled; call {name}.backward(loss)")


def _framework(module: Module, event: Event) -> tuple[str, object]:
    """Return the framework whose method is called, and the precision with which the framework was set up."""
    function = event.call.func
    if not isinstance(function, ast.Attribute):
        return "", None
    for name, option in (("accelerator", "mixed_precision"), ("fabric", "precision")):
        if name in module.roles(function.value, event.scope):
            for value, scope in module.names.values(function.value, event.scope):
                if isinstance(value, ast.Call) and name in module.roles(value, scope):
                    words = {word.arg: word.value for word in value.keywords}
                    return name, module.names.constant(words.get(option), scope)
            return name, None
    return "", None


def _prepared(module: Module, flow: Flow) -> str:
    """Return the accelerator or fabric that prepares objects in this function, or ""."""
    for event in flow.events:
        function = event.call.func
        if not isinstance(function, ast.Attribute) or function.attr not in {"prepare", "setup"}:
            continue
        if event.call.args and {"accelerator", "fabric"} & module.roles(function.value, event.scope):
            return ast.unparse(function.value)
    return ""


def _last_before(flow: Flow, event: Event, *kinds: str) -> Event | None:
    """Return the last event of ``kinds`` before ``event``.

    Return None if each of the two calls can run without the other.
    """
    earlier = flow.events[: event.position]
    found = [e for e in earlier if e.kind in kinds and not e.context.excludes(event.context)]
    return found[-1] if found and found[-1].context.goes_with(event.context) else None


def _is_interrupted(flow: Flow, first: Event, last: Event) -> bool:
    """Return whether a call between two other calls unscales gradients or may unscale them."""
    between = [e for e in flow.between(first, last) if not e.context.excludes(last.context)]
    keys = {key for key in (first.who, first.optimizer, last.who, last.optimizer) if key is not None}
    return any(
        e.kind in {"unscale", "scaler clip"} or (e.kind == "unknown" and any(map(e.may_change, keys)))
        for e in between
    )


def _same_scaler(event: Event, other: Event) -> bool:
    return event.who == other.who or (event.kind == "unknown" and event.may_change(other.who))


def _same_optimizer(event: Event, other: Event) -> bool:
    is_step = event.kind in {"unscale", "scaler step"}
    return is_step and (event.who, event.optimizer) == (other.who, other.optimizer)


def _same_pass(event: Event, other: Event) -> bool:
    """Return whether two calls are in the same loops, and one of them always runs if the other one does."""
    return event.context.loops == other.context.loops and event.context.goes_with(other.context)
