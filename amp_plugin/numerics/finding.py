"""A finding of a diagnosis, as data and as text: the op or value from which nans and infs came."""

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
    "made",
    "weight",
    "input",
    "unwritten",
    "collective",
    "constant",
    "function",
    "learning",
    "dtype",
    "clip",
    "order",
]

_HEADLINES: dict[Kind, str] = {
    "made": "{op} made {held} {where}, in {dtype}",
    "weight": "the weight {source} held {held} before {op} read it",
    "input": "the data held {held}: {source}, read by {op}",
    "unwritten": "{op} returned memory that was not written yet; it holds {held}",
    "collective": "{op} received {held}: another rank made it",
    "constant": "{op} wrote {held} on purpose, and it was not masked",
    "function": "{op}, an autograd function of the program, made {held} outside torch's ops",
    "learning": "{lesson}",
    "clip": "{op} clipped gradients that are still multiplied by the loss scale, {lesson}",
    "order": "{op} was called {lesson}",
    "dtype": "torch refused {what} of {dtypes}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """A change to a program.

    Attributes:
        place: A text that says where to put the lines.
        code: The lines. They run unchanged if the model is called ``model``.
    """

    place: str
    code: str

    def __str__(self) -> str:
        return f"# {self.place}\n{self.code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An origin of nans or infs, or a reason why a model does not learn.

    Attributes:
        kind: Where the numbers came from.

            - ``"made"``: the op made them from finite inputs, or from infinities that were there on purpose.
            - ``"weight"``, ``"input"``: they were there before, and the op was the first to read them.
            - ``"unwritten"``: the memory of ``torch.empty`` was read before it was written.
            - ``"collective"``: they came from another rank.
            - ``"constant"``: the program wrote them.
            - ``"function"``: an autograd function made them outside torch's ops.
            - ``"learning"``: all numbers are finite, but the weights do not change.
            - ``"dtype"``: torch raised an error for the dtypes of the inputs. The op runs in other dtypes.
            - ``"clip"``: gradients were clipped before they were unscaled.
            - ``"order"``: the scaler raised an error for a call that came too late or twice.
        cause: Why.

            - ``"range"``: too large for the 16-bit dtype. ``"size"``: too large for fp32 as well.
            - ``"pole"``: a division by zero, or an input where the function or its derivative is infinite.
            - ``"digits"``: 16 bits rounded a number near 1 to 1.
            - ``"domain"``: the op is not defined for the input.
            - ``"mask"``: every position of a softmax is masked.
            - ``"infinity"``: arithmetic with infinities that are there on purpose.
            - ``"empty"``: statistics of too few elements.
            - ``"divergence"``: the weights have grown too much.
            - ``"loss scale"``: the loss scale may be too large.
            - ``"lost updates"``, ``"underflow"``, ``"no step"``: why the model does not learn.
            - ``"data"``, ``"weight"``, ``"unwritten"``, ``"collective"``, ``"constant"``, ``"function"``,
              ``"dtype"``, ``"scaled clip"``, ``"order"``: as in ``kind``.
        op: The full name of the op, for example ``"aten::exp.default"``. For ``"order"``, the method.
        forward_op: For an op in a backward pass, the op of the forward pass that it belongs to. Else empty.
        held: The kinds of numbers that it made or read: ``"nan"``, ``"inf"``, ``"-inf"``.
        module: The path of the module. Empty outside modules.
        format: The format below 16 bits in which the module computes, for example ``"fp8"``. Else empty.
        place: The line that called the op, or its forward op. None if it is not known.
        caller: If ``place`` is in an installed library, the line of the program that called the library.
        dtype: The dtype in which the op computed.
        output: The result.
        inputs: The tensors among the arguments.
        numbers: The Python numbers among the arguments, by name.
        rank: The rank of this process. None if there is a single process.
        reached: Where the numbers arrived: ``"nan in aten::_softmax.default ..."``, ``"the loss"``.
        advice: What to do.
        cures: Lines to paste into the program, if computing in fp32 helps.
        when: How far the program was: forward passes, backward passes and optimizer steps.
        device_type: The device type of the op's results, for example ``"cpu"``.
        in_block: Whether an autocast block was open. For a backward op, whether it was around its forward op.
        rule_names: If 16 bits are the reason, the ops to give the rule fp32 (see ``OpRules.with_rule``).
        source: For data, the batch, the tensor and the row, as far as known. For a weight, its path.
        lesson: For ``"learning"``, what was measured. For ``"dtype"``, the dtypes of the inputs. For
            ``"clip"``, the loss scale and the limit. For ``"order"``, the call that is missing.
        count: How often it was found at the same op and line.
    """

    kind: Kind
    cause: str = ""
    op: str = ""
    forward_op: str = ""
    held: Held = ()
    module: str = ""
    format: str = ""
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
        """``"backward"`` if the op ran in a backward pass, otherwise ``"forward"``."""
        return "backward" if self.forward_op else "forward"

    @property
    def blames_scale(self) -> bool:
        """Whether a loss scale that is too high can be the reason."""
        return self.direction == "backward" and self.cause in {"range", "loss scale"}

    @property
    def headline(self) -> str:
        """One sentence that says what happened."""
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
        """Yield the rows of the report: a name and a text each."""
        if self.when:
            yield "when", self.when + (f", and {self.count - 1} times more" if self.count > 1 else "")
        if self.module:
            yield "module", self.module
        if self.format:
            kept = f"formats={{{self.module!r}: 'bf16'}} computes this layer in bf16"
            yield "format", f"{self.format}; {kept}"
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
        """Return everything as values that JSON can hold. nan and inf become strings."""
        return {"headline": self.headline, "direction": self.direction, **as_json(self)}

    def __str__(self) -> str:
        return laid_out(self.headline, self.rows())


class NonFiniteError(FloatingPointError):
    """Raised by ``diagnose`` at the first nan or inf that matters.

    Attributes:
        finding: The origin of the nan or inf.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.finding,)


def laid_out(headline: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a headline, with a row below it for each name and text."""
    named = list(rows)
    width = max(len(name) for name, _ in named)
    return "\n".join([headline, *(f"  {name:<{width}}  {text}" for name, text in named)])


def _under(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a row for each text. Only the first row has the name."""
    for number, text in enumerate(texts):
        yield "" if number else name, text
