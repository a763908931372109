"""What the documentation says of a call before it is made: whether it has one meaning, whether it is an error.

Errors are predicted as NO, MAYBE or YES.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.fuzz.model import MAYBE, NO, YES, Model


def may_meet(model: Model, o: int, joining: Iterable[int] | None = None) -> bool:
    """Whether an optimizer may be met now: all it brings comes from the last backward's scale.

    An optimizer that is met later is a limit that the documentation names.
    """
    if o in model.known and joining is None:
        return True
    new = [i for i in model.present(joining or model.members[o]) if not model.owners(i)]
    return all(
        model.gradients[i].origins <= {model.last_backward}
        and (model.gradients[i].origins or not model.params[i].grad.any())
        for i in new
    )


def may_edit(model: Model, index: int) -> bool:
    """Whether a change of a gradient by the user has one meaning.

    That of one which an optimizer has stepped with has: the change of an unscaled gradient before ``update()``,
    of a scaled one after it. Of others a change between ``update()`` and the next backward may come from a
    backward that was not seen: documented as a limit. A folded clip forbids changes.
    """
    gradient = model.gradients[index]
    return model.params[index].grad is not None and all(
        (o in gradient.used_by or w.stages == {"unscaled"} or w.fresh != NO) and not w.folded
        for o, w in ((o, model.windows[o]) for o in model.owners(index))
    )


def may_update(model: Model) -> bool:
    """Whether no gradient is there that would look like one of an unseen backward after ``update()``."""
    return not any(
        gradient.replaced and not gradient.pending and set(model.owners(i)) - gradient.used_by
        for i, gradient in enumerate(model.gradients)
        if model.params[i].grad is not None
    )


def are_unscaled(model: Model, indices: Iterable[int]) -> bool:
    """Whether the user may treat these gradients as unscaled ones."""
    present = model.present(indices)
    windows = [model.windows[o] for i in present for o in model.owners(i)]
    return (
        all(model.gradients[i].unscaled and model.owners(i) for i in present)
        and all(w.stages == {"unscaled"} for w in windows)
        and not any(w.folded for w in windows)
    )


def error_of_unscale(model: Model, o: int) -> str:
    """Whether ``unscale_`` is an error: called twice, or after ``step``, without new gradients."""
    window = model.windows[o]
    due = error_of_missing_update(model, o)
    if due != NO:
        return due
    if window.fresh == YES or window.stages == {"ready"}:
        return NO
    sure = window.explicit or window.stages == {"stepped"}
    return YES if window.fresh == NO and sure and not window.grown else MAYBE


def error_of_step(model: Model, o: int) -> str:
    """Whether ``step`` is an error: called twice without new gradients, or all have stepped without an update."""
    window = model.windows[o]
    if window.folded and window.edited:
        return MAYBE
    due = error_of_missing_update(model, o)
    if due != NO:
        return due
    if window.fresh == YES or "stepped" not in window.stages:
        return NO
    sure = window.fresh == NO and window.stages == {"stepped"} and not window.grown
    return YES if sure else MAYBE


def error_of_missing_update(model: Model, o: int) -> str:
    """Whether an optimizer may not begin again: each one known has stepped since the last update."""
    stages = [model.windows[other].stages for other in {*model.known, o}]
    if not model.scales.is_dynamic or any("stepped" not in s for s in stages):
        return NO
    return YES if all(s == {"stepped"} for s in stages) else MAYBE


def error_of_copy(model: Model) -> str:
    """Whether a copy is an error: in the middle of an iteration."""
    stages = [model.windows[o].stages for o in model.known]
    waits = update_waits(model)
    if waits or any("ready" not in s for s in stages):
        return YES
    return NO if waits is False and all(s == {"ready"} for s in stages) else MAYBE


def update_waits(model: Model) -> bool | None:
    """Whether a known optimizer holds scaled gradients that it has not used; None: open."""
    states = set()
    for o in model.known:
        for index in model.present(model.members[o]):
            pending = model.gradients[index].pending
            states.add(pending and None if (o, index) in model.joined else pending)
    return True if True in states else None if None in states else False
