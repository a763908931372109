"""The report on a gap between a trainer and a generator, with its causes and the changes that close it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from amp_plugin.casting.rules import OpRules
from amp_plugin.numerics.values import as_json
from amp_plugin.tuning.log_probs import GapNumbers, Sampling, Setting
from amp_plugin.tuning.search import Changes, as_yaml

CLOSE: Final = 1.2
"""If a gap is at most this number times ``floor``, rounding alone explains the gap."""

_NOT_CLOSED: Final = (
    "the generator differs in another way: other weights, other token ids, or other mathematics"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One cause of the gap between a trainer and a generator, such as a result that only one of them rounds.

    Attributes:
        name: A description of the cause in words.
        side: The program whose rounding is the cause, ``"generator"`` or ``"trainer"``. If the cause is a
            different temperature or top-p, ``side`` is ``"record"``.
        gap: The mean gap that remains if only this cause is removed.
        setting: The generator's setting that removes the cause, as a pair of its name and its value. Both
            strings are empty if the cause lies in the trainer.
    """

    name: str
    side: str
    gap: float
    setting: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class GapTuning:
    """The gap between a trainer and a generator, its causes, and the changes that close it.

    Attributes:
        gap: The gap between trainer and generator before any changes.
        floor: The mean gap that rounding alone explains.
        trainer_error: The mean absolute difference between the trainer's log-probabilities and
            log-probabilities computed without rounding.
        generator_error: The mean absolute difference between the recorded log-probabilities and
            log-probabilities computed without rounding.
        sampling: The temperature and top-p with which the recorded log-probabilities were computed.
        causes: The causes, the largest first.
        explained: The mean gap if the trainer uses ``rules`` and emulates the generator's rounding steps.
        rules: The op rules for the trainer.
        changes: The op rules that differ from the default rules.
        fp32_modules: The modules of the trainer that must run in fp32 to close the gap. Only the head can be
            among them.
        after: The gap between trainer and generator if the trainer uses ``rules`` and runs ``fp32_modules``
            in fp32.
        seconds: The seconds that a forward and backward pass of one batch takes, without and with the
            changes.
        tried: The number of trials, each with a different rounding or set of rules.
        is_followed: False if op rules have no effect on the step, for example because it uses no autocast
            block.
    """

    gap: GapNumbers
    floor: float
    trainer_error: float
    generator_error: float
    sampling: Sampling
    causes: tuple[Cause, ...] = ()
    explained: float
    rules: OpRules
    changes: Changes = ()
    fp32_modules: tuple[str, ...] = ()
    after: GapNumbers
    seconds: tuple[float, float]
    tried: int = 0
    is_followed: bool = True

    @property
    def generator(self) -> dict[str, str]:
        """Maps the names of generator settings to the values that remove a cause of the gap."""
        return dict(cause.setting for cause in self.causes if cause.setting[0])

    @property
    def is_rounding(self) -> bool:
        """Whether rounding alone explains the gap.

        Rounding explains the gap if no cause was found and the gap is at most 1.2 times ``floor``.
        """
        return not self.causes and self.gap.mean <= CLOSE * self.floor

    @property
    def is_closed(self) -> bool:
        """Whether removing the causes reduces the gap to at most 1.2 times ``floor``."""
        return self.explained <= CLOSE * self.floor

    @property
    def headline(self) -> str:
        """One line that says what was found."""
        if self.is_rounding:
            return (
                f"rounding alone explains the gap of {self.gap.mean:.2e} (the floor is {self.floor:.2e}), "
                "so there is nothing to gain"
            )
        if not self.causes:
            return (
                f"not explained: the gap is {self.gap.mean:.2e}, the floor {self.floor:.2e}, and no rounding "
                f"that was tried brings it down; {_NOT_CLOSED}"
            )
        first, *more = self.causes
        others = f", and {len(more)} more" if more else ""
        rest = "" if self.is_closed else f"; the rest is not explained: {_NOT_CLOSED}"
        down = f"the gap comes down from {self.gap.mean:.2e} to {self.explained:.2e}"
        return f"{first.name}{others}: {down}, the floor is {self.floor:.2e}{rest}"

    def report(self) -> str:
        """Return all measurements, causes and changes as text."""
        errors = f"trainer {self.trainer_error:.2e}, generator {self.generator_error:.2e}"
        lines = [
            self.headline,
            f"gap        {self.gap}, {self.gap.tokens} tokens",
            f"floor      mean {self.floor:.2e}",
            f"rounding   {errors}, mean distance from a run without rounding",
        ]
        lines += [
            f"cause      {cause.side}: {cause.name}; without it the gap is {cause.gap:.2e}"
            for cause in self.causes
        ]
        lines += [f"generator  set {name} to {value}" for name, value in self.generator.items()]
        if self.fp32_modules:
            lines.append(f"trainer    fp32_modules={[*self.fp32_modules]}")
        lines += [f"trainer    rule {change}" for change in self.changes]
        if self.changes or self.fp32_modules:
            before, after = self.seconds
            price = f"{before * 1e3:.1f} ms -> {after * 1e3:.1f} ms ({(after / before - 1) * 100:+.1f} %)"
            lines += [f"after      {self.after}", f"price      {price} per batch, forward and backward"]
        if not self.is_followed:
            lines.append(
                "note       op rules have no effect on this step, because it uses no autocast block; "
                "rules were not searched"
            )
        return "\n".join(lines)

    __str__ = report

    def to_dict(self) -> dict[str, Any]:
        """Return all measurements, causes and changes as JSON-serializable values."""
        names = ("gap", "floor", "trainer_error", "generator_error", "causes", "explained")
        more = ("fp32_modules", "after", "generator", "seconds", "tried", "is_followed", "is_rounding")
        values = {name: getattr(self, name) for name in (*names, *more, "is_closed", "headline")}
        rules = {change.op: change.rule.value for change in self.changes}
        sampling = {name: told(getattr(self.sampling, name)) for name in ("temperature", "top_p")}
        return as_json({**values, "rules": rules, "sampling": sampling})  # type: ignore[no-any-return]

    def to_yaml(self) -> str:
        """Return the rules as the text of a YAML file, with the measurements in its comments."""
        comments = [self.headline, f"gap {self.gap}", f"after {self.after}", f"floor {self.floor:.2e}"]
        return as_yaml(self.rules.device_type, self.changes, comments)

    def save(self, path: str | Path) -> None:
        """Write the rules to a file that ``OpRules.from_yaml`` reads."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")


def told(setting: Setting) -> float | str:
    """Return a temperature or top-p as one number, or as a string if it differs between sequences."""
    if not isinstance(setting, Tensor):
        return setting
    values = sorted(set(setting.tolist()))
    return values[0] if len(values) == 1 else "as the file states for each sequence"
