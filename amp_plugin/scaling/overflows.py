"""Reports which gradients of a step were not finite, and the possible cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.kernels.reference import INF_FLAG, NAN_FLAG
from amp_plugin.patterns import clean_name
from amp_plugin.scaling.gradients import Measurement

FINDS_THE_OP: Final = "`amp-plugin diagnose train.py` finds the op and its line."
_SCALE_TOO_HIGH: Final = (
    "Only gradients of parameters overflowed, so the loss scale was probably too high for them. If steps are "
    "still skipped at a much lower loss scale, look at what is computed outside of modules."
)
_UNSEEN: Final = "The overflow came from inside these modules, or from what is computed outside of modules."
_ONLY_PARAMETERS: Final = (
    "Only gradients of parameters were not finite: look at the backward pass of the modules that own "
    "these parameters, and at what is computed outside of modules."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstModules:
    """The modules that were the first in a step to have an inf or nan in an input, output or gradient.

    Attributes:
        forward: A sentence about the first input or output that was not finite; empty if all were finite.
        backward: A sentence about the first output gradient that was not finite; empty if all were finite.
        unseen: The modules that were not watched, and why.
        numbers: The number of module inputs, outputs and gradients that were checked.
    """

    forward: str = ""
    backward: str = ""
    unseen: tuple[str, ...] = ()
    numbers: int = 0

    def told(self, if_finite: str) -> str:
        """Return sentences in one line.

        Args:
            if_finite: The sentences to return if all inputs, outputs and output gradients were finite.
        """
        if self.forward:
            text = f"In the forward pass {self.forward}."
        elif self.backward:
            text = f"In the forward pass modules' numbers were finite. In the backward pass {self.backward}."
        elif self.numbers:
            text = if_finite
        else:
            text = (
                "No call of a module was seen: they ran in compiled code, or in a model that is not watched."
            )
        return text + (f" Not looked into: {', '.join(self.unseen)}." if self.unseen else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverflowReport:
    """The parameters whose gradients were not finite.

    ``str(report)`` lists the parameters, beginning with those nearest the loss, and gives the possible cause.

    Attributes:
        inf: The names of parameters whose gradient has an inf, in the optimizer's order.
        nan: The names of parameters whose gradient has a nan. A parameter can be in both ``inf`` and ``nan``.
        elsewhere: True if all gradients on this rank are finite, but a gradient on another rank is not.
        unattributed: True if only the norm of all gradients was checked, and the norm was inf or nan.
        spike: If ``on_spike`` skipped the step, a string with the norm or loss and its limit. All gradients
            were finite then.
        checked: The number of gradients that were checked.
        named: True if parameters are identified by name; False if by group and index.
        scaled: True if a loss scale above 1 may be the cause of the inf.
        modules: The first modules with an inf or nan; None if no hooks were watching modules.
    """

    inf: tuple[str, ...] = ()
    nan: tuple[str, ...] = ()
    elsewhere: bool = False
    unattributed: bool = False
    spike: str = ""
    checked: int = field(default=0, compare=False)
    named: bool = field(default=True, compare=False)
    scaled: bool = field(default=False, compare=False)
    modules: FirstModules | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        """Return whether anything overflowed."""
        return bool(self.inf or self.nan or self.elsewhere or self.unattributed)

    def __str__(self) -> str:
        """Return the summary, the possible cause, and the first module with an inf or nan, one per line."""
        return "\n".join(filter(None, (self.summary(), self.meaning(), self.where())))

    def summary(self) -> str:
        """Return one line that names up to five parameters, beginning with those nearest the loss."""
        if self.spike:
            return f"a spike, {self.spike}"
        if self.unattributed:
            return "the norm of the gradients is not finite"
        if not self:
            return "no overflow"
        kinds = (("inf", self.inf), ("nan", self.nan))
        lines = [f"{kind} in {_first(names[::-1])}" for kind, names in kinds if names]
        return "; ".join(lines) or "overflow on another rank"

    def meaning(self) -> str:
        """Return one line about the possible cause; empty if nothing overflowed."""
        if self.spike:
            return "All gradients were finite, and on_spike= left the step out: look at that batch."
        if self.elsewhere:
            return "The report of the rank with the overflow names its parameters: look at that rank's batch."
        if self.unattributed:
            return f"Which gradients made it so was not noted: {FINDS_THE_OP}"
        unnamed = " The parameters have no names yet: call scaler.register(optimizer, names=model)."
        return self._place() + unnamed * (not self.named) if self else ""

    def where(self) -> str:
        """Return one line about the first module with an inf or nan; empty if no hooks were watching modules.

        A parameter's gradient is computed inside the backward pass of its module, where hooks do not see it.
        If everything that hooks saw was finite, only gradients of parameters overflowed.
        """
        if self.modules is None or self.spike:
            return ""
        finite = "The inputs, outputs and output gradients of all modules were finite"
        if not (self.inf or self.nan):
            return self.modules.told(f"{finite} on this rank.")
        if self.modules.unseen:
            return self.modules.told(f"{finite}, except in those not looked into. {_UNSEEN}")
        if self.scaled:
            return self.modules.told(f"{finite}. {_SCALE_TOO_HIGH}")
        return self.modules.told(f"{finite}. {_ONLY_PARAMETERS}")

    def _place(self) -> str:
        """Return where to look for the cause.

        If all gradients overflowed, the cause is the loss or its gradient.
        """
        either = "Either the loss scale is still too high, and a few more skipped steps lower it enough, or"
        if len({*self.inf, *self.nan}) < self.checked:
            where = "Look at the batch, and at the backward pass near the first one named."
            mended = f"{either} the module of the first one named needs fp32."
            return f"The other gradients are finite. {mended if self.scaled else where}"
        bad = f"the loss or the forward pass is not finite: {FINDS_THE_OP}"
        return f"All gradients overflowed at once. {either if self.scaled else 'Probably'} {bad}"


def _first(names: Sequence[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    gradients = "1 gradient" if len(names) == 1 else f"{len(names)} gradients"
    return f"{gradients}: {', '.join(names[:count])}{more}"


Names = dict[int, tuple[Tensor, str]]
"""Maps the id of a parameter to the parameter and its name. swap_tensors does not allow weak references."""


def names_of(params: Sequence[Tensor], optimizer: Optimizer | None, given: Names) -> list[str]:
    """Return a name for each parameter.

    The name is the one given to ``register()``, else the optimizer's own name, else the group and index. The
    names of wrappers, such as ``_orig_mod`` of torch.compile, are left out.
    """
    known: list[str] = []
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        label = group.get("name", f"param_groups[{number}]['params']")
        known += group.get("param_names") or [f"{label}[{i}]" for i in range(len(group["params"]))]
    known += [f"parameter {i}" for i in range(len(known), len(params))]
    names = [given.get(id(param), (param, name))[1] for param, name in zip(params, known, strict=False)]
    return [clean_name(name) for name in names]


def checked_names(names: Any) -> dict[str, Tensor]:
    """Return the argument ``names`` as a dict that maps names to parameters, or raise TypeError."""
    pairs = names.named_parameters() if isinstance(names, torch.nn.Module) else names or {}
    try:
        named = dict(pairs)
    except (TypeError, ValueError):
        named = {"": None}
    if not all(isinstance(param, Tensor) for param in named.values()):
        msg = (
            f"register(names=...): a module, its named_parameters(), or a mapping of names to parameters is "
            f"wanted, got {type(names).__name__}"
        )
        raise TypeError(msg)
    return named


def report_of(
    params: list[Tensor],
    measurements: Sequence[Measurement],
    given: Names,
    optimizer: Callable[[], Optimizer | None],
    copies: Sequence[Tensor] = (),
) -> OverflowReport:
    """Return a report about an optimizer's parameters whose gradients were not finite.

    This function causes a host sync, unless ``copies`` contains copies of the overflow flags in host memory.
    """
    all_flags = copies or [measured.flags for measured in measurements]
    index = {id(param): i for i, param in enumerate(params)}
    flags: dict[int, int] = {}
    for measured, found in zip(measurements, all_flags, strict=True):
        for param, flag in zip(measured.params, found.tolist(), strict=False):
            place = index[id(param)]
            flags[place] = flags.get(place, 0) | flag
    known = names_of(params, optimizer(), given)
    overflowed = [place for place in sorted(flags) if flags[place]]
    groups = getattr(optimizer(), "param_groups", ())
    has_names = any("param_names" in group for group in groups)
    return OverflowReport(
        inf=tuple(known[place] for place in overflowed if flags[place] & INF_FLAG),
        nan=tuple(known[place] for place in overflowed if flags[place] & NAN_FLAG),
        checked=len(flags),
        named=has_names or all(id(params[place]) in given for place in overflowed),
    )
