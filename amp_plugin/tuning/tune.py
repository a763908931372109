"""Search for the best op rules for a program, verify them, and write them to a file."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args, overload

import torch
from rich import filesize
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from amp_plugin.casting.rules import OpRules
from amp_plugin.messages import did_you_mean
from amp_plugin.tuning.gap import Gap, close_gap
from amp_plugin.tuning.gap_tuning import GapTuning
from amp_plugin.tuning.measure import Goal, Measurement, Trials, rules_without_16_bits, timed_in_turns
from amp_plugin.tuning.search import Changes, Search, Tried, as_yaml, with_changes
from amp_plugin.tuning.workload import StepFunction, Workload, used_ops

_REFERENCES: Final = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The op rules that a search chose, and their measured cost and gradient error.

    Attributes:
        rules: The chosen rules. If the search found no better rules, the default rules are kept.
        goal: The goal of the search.
        budget: The fraction by which the gradient error was allowed to grow. With the goal ``"accuracy"``, it
            is the fraction by which the bytes saved for the backward pass and the bytes cast were allowed to
            grow.
        reference: The dtype of the reference gradients, ``"fp64"`` or ``"fp32"``.
        before: The measurement of the default rules on all batches.
        after: The measurement of the chosen rules on all batches.
        seconds: The median time of a batch in seconds, first with the default rules and then with the chosen
            rules. The default and the chosen rules are timed alternately.
        changes: The chosen rules that differ from the default rules.
        tried: All sets of rules that were tried, in order, with their measurements.
        nearest: A description of the most accurate set of rules that lowers the cost but exceeds the error
            budget. ``nearest`` is empty if all tried sets of rules that lower the cost are within the error
            budget.
        is_followed: False if op rules have no effect, because autocast is off or each autocast block has its
            own rules.
        jump: A sentence that names the op at which the accumulated error jumps under the default rules,
            followed by lines of code that make this op's module compute in fp32. ``jump`` is empty if no op
            stands out, or if the goal is not ``"accuracy"``.
    """

    rules: OpRules
    goal: Goal
    budget: float
    reference: str
    before: Measurement
    after: Measurement
    seconds: tuple[float, float]
    changes: Changes
    tried: tuple[Tried, ...]
    nearest: str
    is_followed: bool
    jump: tuple[str, ...] = ()

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self.before.errors)

    @property
    def keeps_default(self) -> bool:
        """Whether the chosen rules are the default rules."""
        return not self.changes

    def table(self) -> Table:
        """Return a ``rich`` table that compares the default rules with the chosen rules."""
        table = Table(box=None, pad_edge=False)
        table.add_column("per batch")
        for column in ("default", "tuned", "change"):
            table.add_column(column, justify="right", no_wrap=True)
        times = [f"{taken * 1e3:.1f} ms" for taken in self.seconds]
        for cells in [*_rows(self.before, self.after), ("time", *times, _change(*self.seconds))]:
            table.add_row(*cells)
        return table

    def to_yaml(self) -> str:
        """Return the rules as the text of a YAML file, with the measurements in its comments."""
        comments = [
            self.headline,
            f"gradients compared with {self.reference}, {self.batches} batches",
            *(f"with the default rules, {text}" for text in self.jump[:1]),
        ]
        for name, old, new, changed in _rows(self.before, self.after):
            comments.append(f"{name}: {old} -> {new}" + (f" ({changed})" if changed else ""))
        return as_yaml(self.rules.device_type, self.changes, comments)

    def save(self, path: str | Path) -> None:
        """Write the rules to a file that ``OpRules.from_yaml`` reads."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Plot the cost and the gradient error of each set of rules that was tried, and save the plot.

        The suffix of the file's name determines the format.
        """
        require_plots(path)
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional

        figure = Figure(figsize=(9, 6))
        draw(self, figure.subplots())
        figure.savefig(path, dpi=120)

    @property
    def headline(self) -> str:
        """One line that says what the tuning did."""
        if not self.is_followed:
            return (
                f"tuned for {self.goal}: the rules have no effect, so the default rules stay; open autocast "
                f"for {self.rules.device_type} around the forward pass, and pass no rules= to it"
            )
        if self.keeps_default:
            nothing = f"tuned for {self.goal}: nothing better was found, the default rules stay"
            missed = f"; the budget is {self.budget:.0%}, and the set nearest to it was {self.nearest}"
            return nothing + (missed if self.nearest else "")
        rules = f"{len(self.changes)} rule{'s' if len(self.changes) > 1 else ''}"
        if self.before.failed == self.batches:
            return (
                f"tuned for {self.goal}: {rules}, without which every batch overflows; no budget was applied"
            )
        return f"tuned for {self.goal}: {rules}, budget {self.budget:.0%}"


def require_plots(path: str | Path) -> None:
    """Check that matplotlib is installed and can write a file of this format.

    If matplotlib is missing, an ImportError is raised. If the format is unknown, a ValueError is raised.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415 - optional
    except ImportError as error:
        msg = f"a plot needs matplotlib ({error}); run: pip install matplotlib"
        raise ImportError(msg) from error
    known = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.lower().removeprefix(".") not in known:
        msg = f"matplotlib cannot draw into {str(path)!r}; let its name end in .{', .'.join(known)}"
        raise ValueError(msg)


@overload
def tune(
    step: Callable[[Any], object],
    *,
    model: nn.Module,
    batches: Sequence[Any],
    device_type: str = "",
    goal: Goal = "memory",
    budget: float = 0.05,
    reference: str = "fp64",
    progress: bool = False,
) -> Tuning: ...


@overload
def tune(
    step: Callable[[Tensor], object],
    *,
    goal: Gap,
    model: nn.Module | None = None,
    device_type: str = "",
    progress: bool = False,
) -> GapTuning: ...


def tune(
    step: Callable[[Any], object],
    *,
    model: nn.Module | None = None,
    batches: Sequence[Any] = (),
    device_type: str = "",
    goal: Goal | Gap = "memory",
    budget: float = 0.05,
    reference: str = "fp64",
    progress: bool = False,
) -> Tuning | GapTuning:
    """Find op rules that use less memory or fewer casts within a gradient error budget, or avoid an overflow.

    ``step`` runs about fifty times with different rules. Each run starts with the current weights and random
    states.

    With ``goal=Gap(rollout)``, the function finds out why the log-probabilities of a trainer differ from
    those that a generator recorded, and which changes close the gap. For this goal, ``step`` takes int64
    token ids of shape (sequences, length), where ``length`` is that of the longest sequence. ``step`` returns
    logits of shape (sequences, length, vocabulary), or an object with ``.logits``, and runs no backward pass.
    The arguments ``batches``, ``budget`` and ``reference`` have no effect with a ``Gap``.

    Args:
        step: A function that runs the forward and backward pass on a batch, in an autocast region without
            ``rules=``. The function must not step an optimizer. The loss may be scaled by a constant power of
            two.
        model: The model whose gradients are compared. The model's weights are not changed, and its buffers
            are restored after each run. The model is optional for a ``Gap``.
        batches: The arguments of ``step``, one for each batch. The search uses the first half of the batches,
            and the result is verified on all batches.
        device_type: The device type of the rules. The default is the device type of the model's parameters,
            or ``"cpu"`` if there is no model or if it has no parameters.
        goal: ``"memory"`` reduces the bytes that are saved for the backward pass. ``"casts"`` reduces the
            bytes that are cast. ``"accuracy"`` makes gradients finite with a minimal set of fp32 ops, and
            reduces the error of gradients that are already finite. ``Gap(rollout)`` brings a trainer's
            log-probabilities closer to those of its generator.
        budget: The fraction by which the gradient error may grow. With the goal ``"accuracy"``, it is the
            fraction by which the bytes saved for the backward pass and the bytes cast may grow.
        reference: The dtype of the reference gradients, ``"fp64"`` or ``"fp32"``.
        progress: True shows a progress bar.

    Returns:
        A :class:`Tuning` with the chosen rules and their measurements. The methods ``table()``,
        ``save("rules.yaml")`` and ``plot("rules.png")`` show and write the result. For a ``Gap``, a
        :class:`GapTuning`, which can be printed.

    Raises:
        ValueError: An option has a value that is not allowed, or the step changes a weight or computes no
            gradients. For a ``Gap``, the error is also raised if the step returns no logits.
        TypeError: ``model`` or ``batches`` is missing.
        RuntimeError: The native core is missing, or no rules make the gradients finite.

    Example:
        >>> from amp_plugin import autocast
        >>> model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
        >>> def step(batch):
        ...     with autocast("cpu", dtype=torch.bfloat16):
        ...         loss = model(batch).square().mean()
        ...     loss.backward()
        >>> tuning = tune(step, model=model, batches=[torch.randn(16, 8)])
        >>> tuning.after.saved_bytes <= tuning.before.saved_bytes
        True
    """
    params = () if model is None else model.parameters()
    device = device_type or next((param.device.type for param in params), "cpu")
    if isinstance(goal, Gap):
        return close_gap(step, goal, model=model, device_type=device, progress=progress)
    if model is None:
        msg = f"tune(goal={goal!r}) needs model= and batches=; only goal=Gap(rollout) works without them"
        raise TypeError(msg)
    workload = StepFunction(step, model, batches)
    return tuned(workload, device, goal=goal, budget=budget, reference=reference, progress=progress)


def tuned(
    workload: Workload, device_type: str, *, goal: str, budget: float, reference: str, progress: bool
) -> Tuning:
    """Tune the op rules of a workload. :func:`tune` explains the arguments."""
    wanted = _checked(goal, budget, reference)
    default = OpRules.default(device_type)
    # The output of the trials is dropped.
    with Console(file=sys.stderr, quiet=not progress).status("") as status:

        def measure(changes: Changes, batches: int) -> Measurement:
            told = ", ".join(map(str, changes)) or "the default rules"
            status.update(f"{len(search.tried)} sets of rules tried: {told}")
            return trials.measure(with_changes(default, changes), batches=batches)

        status.update(f"running without 16 bits, in {reference}")
        trials = Trials(workload, device_type, reference=_REFERENCES[reference])
        search = Search(measure, trials.batches, default, wanted, budget)
        ops = used_ops(partial(workload.run, lambda *_: None, batches=1), default)
        changes = _chosen(search, ops, wanted)
        rules, after = with_changes(default, changes), search.measure(changes) or search.default()
        in_fp32 = rules_without_16_bits(device_type)
        is_followed = bool(changes) or trials.measure(in_fp32) != search.default()
        jump = trials.told_jump(default) if wanted == "accuracy" else []
        status.update("timing")
        changed = partial(trials.seconds, rules) if changes else None
        seconds = timed_in_turns(partial(trials.seconds, default), changed)
    return Tuning(
        rules=rules,
        goal=wanted,
        budget=budget,
        reference=reference,
        before=search.default(),
        after=after,
        seconds=seconds,
        changes=changes,
        tried=search.tried,
        nearest=search.nearest(),
        is_followed=is_followed,
        jump=tuple(jump),
    )


def _checked(goal: str, budget: float, reference: str) -> Goal:
    """Check the options and return the goal."""
    goals, msg = get_args(Goal), ""
    if goal not in goals:
        hint = did_you_mean(goal, goals, aliases={"speed": "casts", "bytes": "memory"}, written=repr)
        msg = f"goal={goal!r} is not one of {', '.join(map(repr, goals))}{hint}"
    elif not 0 <= budget < 10:
        limits = "from 0 to below 10 (1000 %)"
        msg = f"budget={budget} ({budget:.0%}) is not allowed; give a share {limits}, such as 0.05 for 5 %"
    elif reference not in _REFERENCES:
        msg = f"reference={reference!r} is not allowed; give 'fp64' or 'fp32'"
    if msg:
        raise ValueError(msg)
    return goal  # type: ignore[return-value]


def _chosen(search: Search, ops: list[str], goal: Goal) -> Changes:
    before = search.default()
    if before.failed < len(before.errors):
        return search.best(ops)
    if goal == "accuracy":
        return search.cured(ops)
    msg = (
        "no batch has finite gradients with the default rules, so no error can be measured; "
        "search for accuracy first: goal='accuracy', or amp-plugin tune --for accuracy"
    )
    raise ValueError(msg)


def _size(count: float) -> str:
    return filesize.decimal(round(count))


# Maps the name of a number in the table to its attribute and to a function that formats the number.
_NUMBERS: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "saved for backward": ("saved_bytes", _size),
    "cast": ("cast_bytes", _size),
    "gradient error": ("error", "{:.3e}".format),
    "mean error of the parameters": ("mean_error", "{:.3e}".format),
}


def _rows(before: Measurement, after: Measurement) -> list[tuple[str, ...]]:
    """Return a table with one row for each measured quantity.

    Each row has the name of the quantity, its values before and after, and the change in percent.
    """
    rows: list[tuple[str, ...]] = []
    for name, (attribute, text) in _NUMBERS.items():
        old, new = getattr(before, attribute), getattr(after, attribute)
        rows.append((name, text(old), text(new), _change(old, new)))
    if before.failed or after.failed:
        rows.append(("batches that overflow", str(before.failed), str(after.failed), ""))
    return rows


def _change(before: float, after: float) -> str:
    """Return a relative change as text, such as ``"-12.3 %"``, or ``""`` if it is undefined."""
    if before == 0 or not (math.isfinite(before) and math.isfinite(after)):
        return ""
    return f"{(after / before - 1) * 100:+.1f} %"


_COSTS: Final = {"memory": "bytes saved for backward", "casts": "bytes cast", "accuracy": "gradient error"}


def draw(tuning: Tuning, axes: Any) -> None:
    """Draw each tried set of rules as a point, and mark the default rules, chosen rules and budget."""
    goal, before = tuning.goal, tuning.before

    def place(measured: Measurement) -> tuple[float, float]:
        default = before.first(len(measured.errors))
        base = default.cost(goal)
        return measured.cost(goal) / (base if 0 < base < math.inf else 1), measured.growth(goal, default)

    tried = {
        attempt.changes: place(attempt.measurement)
        for attempt in tuning.tried
        if attempt.changes and attempt.measurement and attempt.measurement.failed <= before.failed
    }
    places = {changes: at for changes, at in tried.items() if all(map(math.isfinite, at))}
    for rule in sorted({changes[-1].rule.value for changes in places}):
        of_rule = [at for changes, at in places.items() if changes[-1].rule.value == rule]
        axes.scatter(*zip(*of_rule, strict=True), s=24, label=rule)
    for label, marker, measured in (("default rules", "s", before), ("chosen rules", "*", tuning.after)):
        axes.scatter(*place(measured), s=130, marker=marker, label=label, zorder=3)
    if before.failed < tuning.batches:  # no budget applies if all batches overflow with the default rules
        axes.axhline(1 + tuning.budget, color="black", linewidth=1, linestyle="--", label="budget")
    grows = "bytes, saved or cast" if goal == "accuracy" else "gradient error, whole or mean"
    cost = _COSTS[goal] + ", default rules: 1" * (before.failed < tuning.batches)
    axes.set(xlabel=cost, ylabel=f"{grows}, default rules: 1")
    axes.set_title(tuning.headline, fontsize=9, wrap=True)
    axes.legend(fontsize=9)
    _name_points(axes, places)


def _name_points(axes: Any, places: dict[Changes, tuple[float, float]]) -> None:
    """Label each point with the op of the last rule in its rule set, unless labels would overlap."""
    taken: list[Any] = []
    middle = sum(axes.get_xlim()) / 2
    for changes, at in places.items():
        name = changes[-1].op.removeprefix("aten::") + f" + {len(changes) - 1}" * (len(changes) > 1)
        offset, side = ((-9, 3), "right") if at[0] > middle else ((9, 3), "left")
        text = axes.annotate(name, at, offset, textcoords="offset points", ha=side, fontsize=7)
        box = text.get_window_extent()
        text.set_visible(not any(map(box.overlaps, taken)))
        taken += [box] * text.get_visible()
