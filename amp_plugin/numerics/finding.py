"""A finding of ``diagnose``, as data and as text.

A finding describes the origin of a nan or inf, or a reason why a model does not learn.
"""

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
    "input": "the data held {held} before {op} read it: {source}",
    "unwritten": "{op} returned memory that was not written yet; it holds {held}",
    "collective": "{op} received {held} from another rank",
    "constant": "{op} wrote {held} on purpose, and no mask removed it",
    "function": "{op}, an autograd function of the program, made {held} outside torch's ops",
    "learning": "{lesson}",
    "clip": "{op} clipped gradients that are still multiplied by the loss scale of {lesson}",
    "order": "{op} was called {lesson}",
    "dtype": "torch refused to run {what} because of the dtypes of its {dtypes}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """A change to a program.

    Attributes:
        place: A string that says what the lines of code do and where to put them.
        code: The lines of code. The lines need no change if the program's variable for the model is
            ``model``.
    """

    place: str
    code: str

    def __str__(self) -> str:
        return f"# {self.place}\n{self.code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The origin of a nan or inf, or a reason why a model does not learn.

    Attributes:
        kind: The kind of the finding.

            - ``"made"``: The op produced the nan or inf from finite inputs, or from infs that the program
              had written on purpose.
            - ``"weight"``, ``"input"``: A weight or the input data held the nan or inf before any op read it.
            - ``"unwritten"``: The memory of ``torch.empty`` was read before it was written.
            - ``"collective"``: The nan or inf came from another rank.
            - ``"constant"``: The program wrote the nan or inf.
            - ``"function"``: A user's autograd function produced the nan or inf in code that is not a torch
              op.
            - ``"learning"``: All numbers are finite, but the model does not learn.
            - ``"dtype"``: Torch raised an error because of the dtypes of the inputs.
            - ``"clip"``: The program clipped gradients before they were unscaled.
            - ``"order"``: The scaler raised an error because a method was called too late or twice.
        cause: The cause of the finding.

            - ``"range"``: The result is too large for fp16.
            - ``"size"``: The result is too large even for fp32.
            - ``"pole"``: The op, or its derivative, is infinite at this input, as in a division by zero.
            - ``"digits"``: 16 bits rounded a number near 1 to 1.
            - ``"domain"``: The op is not defined for this input.
            - ``"mask"``: Every position of a softmax is masked.
            - ``"infinity"``: The op computed with infs that the program had written on purpose.
            - ``"empty"``: The op computed a mean or variance of too few elements.
            - ``"divergence"``: The weights have grown too much.
            - ``"loss scale"``: The loss scale may be too large.
            - ``"lost updates"``, ``"underflow"``, ``"no step"``: The reason why the model does not learn.
            - ``"data"``, ``"weight"``, ``"unwritten"``, ``"collective"``, ``"constant"``, ``"function"``,
              ``"dtype"``, ``"scaled clip"``, ``"order"``: The cause adds no information to ``kind``.

        op: The full name of the op, for example ``"aten::exp.default"``. For the kind ``"order"``, the name
            of the scaler's method.
        forward_op: If the op ran in a backward pass, the name of its forward op. Otherwise empty.
        held: Which of ``"nan"``, ``"inf"`` and ``"-inf"`` the op produced or read.
        module: The path of the module that called the op. Empty outside modules.
        format: The format below 16 bits in which the module computes, for example ``"fp8"``. Empty if the
            module computes in 16 bits or more.
        place: The line that called the op or, for a backward op, its forward op. None if it is not known.
        caller: If ``place`` is in an installed library, the line of the program that called the library.
        dtype: The dtype in which the op computed.
        output: A summary of the op's result.
        inputs: Summaries of the tensors among the op's arguments.
        numbers: The name and value of each Python number among the op's arguments.
        rank: The rank of this process. None if there is a single process.
        reached: A string that says where the nan or inf went, for example ``"the loss"``.
        advice: A string that says what to do.
        cures: Lines of code to paste into the program, if computing in fp32 helps.
        when: A string that says how many forward passes, backward passes and optimizer steps have run so far.
        device_type: The device type of the op's results, for example ``"cpu"``.
        in_block: Whether the op or, for a backward op, its forward op ran in an autocast block.
        rule_names: The ops that need an fp32 rule, if computing in 16 bits is the cause of the nan or inf.
            See ``OpRules.with_rule``.
        source: The path of the weight that held the nan or inf. If the input data held the nan or inf,
            ``source`` names the batch, the tensor and the row, as far as they are known.
        lesson: A string with details that depend on the kind. For ``"order"``, it names the missing call. For
            ``"clip"``, it gives the loss scale and the limit. For ``"dtype"``, it gives the dtypes of the
            inputs. For ``"learning"``, it gives the measurement.
        count: The number of times that this finding occurred at the same op and line.
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
        """Whether the loss scale may be too large."""
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
            dtypes=f"inputs, {self.lesson}" if self.lesson else "tensors",
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the report, each with a name and a text."""
        if self.when:
            yield "when", self.when + (f" (found {self.count} times)" if self.count > 1 else "")
        if self.module:
            yield "module", self.module
        if self.format:
            kept = f"with formats={{{self.module!r}: 'bf16'}} this layer computes in bf16"
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
        """Return the finding as JSON-serializable values. nan and inf become strings."""
        return {"headline": self.headline, "direction": self.direction, **as_json(self)}

    def __str__(self) -> str:
        return laid_out(self.headline, self.rows())


class NonFiniteError(FloatingPointError):
    """Raised by ``diagnose`` at the first harmful nan or inf.

    Attributes:
        finding: The origin of the nan or inf.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.finding,)


def laid_out(headline: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a string with the headline on the first line, followed by one line for each row."""
    named = list(rows)
    width = max(len(name) for name, _ in named)
    return "\n".join([headline, *(f"  {name:<{width}}  {text}" for name, text in named)])


def _under(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a row for each text. Only the first row has the name."""
    for number, text in enumerate(texts):
        yield "" if number else name, text
