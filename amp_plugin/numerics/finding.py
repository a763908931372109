"""What a diagnosis found: one origin of numbers that are not finite, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from amp_plugin.numerics.places import Place
from amp_plugin.numerics.values import Held, TensorSummary, as_json
from amp_plugin.precision import short_name
from amp_plugin.scaling.ranks import rank_of_process

Kind = Literal[
    "made", "weight", "input", "unwritten", "collective", "constant", "function", "learning", "dtype", "clip"
]

_HEADLINES: dict[Kind, str] = {
    "made": "{op} made {held} {where}, in {dtype}",
    "weight": "the weight {source} held {held} before {op} read it",
    "input": "the data held {held}: {source}, read by {op}",
    "unwritten": "{op} returned memory that nobody wrote; it holds {held}",
    "collective": "{op} brought {held}: another rank made it",
    "constant": "{op} wrote {held} on purpose, and it was not masked",
    "function": "{op}, an autograd function of the program, made {held} outside of torch's ops",
    "learning": "{lesson}",
    "clip": "{op} clipped gradients that are still multiplied by the loss scale, {lesson}",
    "dtype": "torch refused {what} of {dtypes}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """A change to a program.

    Attributes:
        place: where the lines go, in words.
        code: the lines; they run as they are, where the model is named ``model``.
    """

    place: str
    code: str

    def __str__(self) -> str:
        return f"# {self.place}\n{self.code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An origin of numbers that are not finite, or a reason why a program does not learn.

    Attributes:
        kind: ``"made"`` by the op from finite inputs, or from infinities that were put there on purpose;
            ``"weight"`` or ``"input"``: it was there before the op, which read it first; ``"unwritten"``:
            memory of ``torch.empty`` that nobody wrote; ``"collective"``: it came from another rank;
            ``"constant"``: the program wrote it; ``"function"``: an autograd function made it outside torch;
            ``"learning"``: all numbers are finite, and weights do not move; ``"dtype"``: torch raised an
            error for the dtypes of the op's inputs, and the op runs in others; ``"clip"``: gradients of a
            scaled loss were clipped before they were unscaled.
        cause: why. ``"range"``: too large for a 16-bit dtype; ``"size"``: for fp32 as well; ``"pole"``: a
            division by zero, or a function or derivative that is infinite there; ``"digits"``: 16 bits
            rounded a number near 1 to 1; ``"domain"``: not defined there;
            ``"mask"``: a softmax of nothing but masked positions; ``"infinity"``: arithmetic with
            infinities that are there on purpose; ``"empty"``: statistics of too few elements;
            ``"divergence"``: the weights have grown; else what brought it: ``"data"``, ``"weight"``,
            ``"unwritten"``, ``"collective"``, ``"constant"``, ``"function"``, ``"loss scale"``; or why
            nothing is learnt: ``"lost updates"``, ``"underflow"``, ``"no step"``; or ``"dtype"``,
            ``"scaled clip"``.
        op: full name of the op, ``"aten::exp.default"``.
        forward_op: of an op in a backward pass: the op of the forward pass it belongs to; else empty.
        held: which numbers it made or read, of ``"nan"``, ``"inf"`` and ``"-inf"``.
        module: path of the module; empty outside of modules.
        place: the line that called the op, or that called its forward op; None if unknown.
        caller: the program's line that led there, if ``place`` is in an installed library.
        dtype: what the op computed in.
        output: the result.
        inputs: the tensors among the arguments.
        numbers: the Python numbers among them, by name.
        rank: of this process; None where there is one process.
        reached: what the numbers did next: ``"nan in aten::_softmax.default ..."``, ``"the loss"``.
        advice: what to do.
        cures: lines to paste into the program, where computing in fp32 is a way out.
        when: how far the program was: calls of its model, backward passes, optimizer steps.
        device_type: of the tensors the op made, ``"cpu"``.
        in_block: whether an autocast block was open; for a backward op around its forward op.
        rule_names: the ops to give the rule fp32 where 16 bits are the reason, as ``OpRules.with_rule`` takes
            them.
        source: of data: the batch, its tensor and the row, as far as they are known; of a weight its path.
        lesson: of ``"learning"``: what was measured; of ``"dtype"``: the dtypes that were given;
            of ``"clip"``: the loss scale and the limit.
        count: how often it was found, of one op and line in modules alike.
    """

    kind: Kind
    cause: str = ""
    op: str = ""
    forward_op: str = ""
    held: Held = ()
    module: str = ""
    place: Place | None = None
    caller: Place | None = None
    dtype: torch.dtype = torch.float32
    output: TensorSummary = TensorSummary()  # noqa: RUF009 - frozen
    inputs: tuple[TensorSummary, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    rank: int | None = field(default_factory=rank_of_process)
    reached: str = ""
    advice: str = ""
    cures: tuple[Cure, ...] = ()
    when: str = ""
    device_type: str = "cpu"
    in_block: bool = False
    rule_names: tuple[str, ...] = ()
    source: str = ""
    lesson: str = ""
    count: int = 1

    @property
    def direction(self) -> Literal["forward", "backward"]:
        """Whether the op ran in a backward pass; ``"forward"`` is everything outside of one."""
        return "backward" if self.forward_op else "forward"

    @property
    def blames_scale(self) -> bool:
        """Whether a loss scale that is too high has this effect."""
        return self.direction == "backward" and self.cause in {"range", "loss scale"}

    @property
    def headline(self) -> str:
        """What happened, in one sentence."""
        culprit = next((given.name for given in self.inputs if given.nan or given.inf), "")
        return _HEADLINES[self.kind].format(
            op=self.op,
            held=" and ".join(self.held),
            where=f"in the backward pass of {self.forward_op}" if self.forward_op else f"in {self.direction}",
            dtype=short_name(self.dtype),
            source=self.source or culprit or "(without a name)",
            lesson=self.lesson,
            what=self.op or "a line",
            dtypes=self.lesson or "tensors for their dtypes",
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield what is known, as names and texts, for people."""
        if self.when:
            yield "when", self.when + (f", and {self.count - 1} times more" if self.count > 1 else "")
        if self.module:
            yield "module", self.module
        for name, place in (("line", self.place), ("called from", self.caller)):
            if place:
                yield name, f"{place}{': ' if place.text else ''}{place.text}"
        numbers = [", ".join(f"{name}={number:g}" for name, number in self.numbers)] if self.numbers else []
        yield from _under("inputs", [*map(str, self.inputs), *numbers])
        if self.kind == "made":
            yield "output", f"{self.output}, first at {list(self.output.first)}"
        if self.reached:
            yield "then", self.reached
        if self.rank is not None:
            yield "rank", str(self.rank)
        yield "do", self.advice
        yield from _under("paste", "# or\n".join(f"{cure}\n" for cure in self.cures).splitlines())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON has, nan and inf as words."""
        return {"headline": self.headline, "direction": self.direction, **as_json(self)}

    def __str__(self) -> str:
        return laid_out(self.headline, self.rows())


class NonFiniteError(FloatingPointError):
    """Raised by ``diagnose`` at the first number that is not finite and matters.

    Attributes:
        finding: the origin.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.finding,)


def laid_out(headline: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a headline with rows of names and texts under it."""
    named = list(rows)
    width = max(len(name) for name, _ in named)
    return "\n".join([headline, *(f"  {name:<{width}}  {text}" for name, text in named)])


def _under(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield texts below each other, the name next to the first."""
    for number, text in enumerate(texts):
        yield "" if number else name, text
