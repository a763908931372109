"""Record what the ops of a region make and read, in a few numbers per tensor, for ``compare_runs``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Observer, Region
from amp_plugin.numerics.values import PLAIN, Storages, is_low_precision, real_values

NUDGES = (2.0**-12, 2.0**-7)
"""By how much of their size inputs are changed to see what a result makes of it."""

_BUCKETS = 128
_FEW_WAYS = ("in few", "in few, turned")
_WAYS = ("at random", "alike", "in proportion", *_FEW_WAYS)
_FEW = 16  # one element of so many may have all of the error
_FORMAT = "amp_plugin run 3"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NO_DISCRETE = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "_foreach_norm"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """A tensor in a few numbers; every element is in each of them."""

    checksum: int  # of all bits and their places; equal tensors of one dtype have equal ones
    norm: float  # Euclidean, of the finite elements
    unfinite: int  # how many elements are not finite
    # sums of elements with signs that look random, in buckets that look random: the norm of the difference of
    # two sketches is that of the tensors' difference, to some 10 %
    sketch: Sequence[float]
    is_discrete: bool = False  # it holds integers or booleans
    made_by: int = -1  # number of the record that made it; -1 where no op of the region did

    def difference(self, other: Fingerprint) -> float:
        """Return the relative difference from a tensor of the same shape; inf if others are not finite."""
        if self.unfinite != other.unfinite:
            return math.inf
        apart = math.dist(self.sketch, other.sketch)
        element = 2.0 if self.is_discrete and self.checksum != other.checksum else 0.0  # one at least
        apart = max(apart, abs(self.norm - other.norm), element)
        return 0.0 if apart == 0 else apart / other.norm if other.norm else math.inf


def fingerprint(tensor: Tensor, made_by: int = -1) -> Fingerprint:
    """Return a dense tensor in a few numbers; integers and booleans count as equal or not, one by one.

    Raises:
        ValueError: its numbers cannot be read.
    """
    is_discrete = not (tensor.is_floating_point() or tensor.is_complex())
    values = tensor.detach() if is_discrete and not tensor.is_quantized else real_values(tensor)
    if values is None:
        msg = f"fingerprint: the numbers of a {type(tensor).__name__} of {tensor.dtype} cannot be read"
        raise ValueError(msg)
    flat = values.contiguous().reshape(-1)
    places = torch.arange(flat.numel(), device=flat.device)
    bits = flat.long() if is_discrete else flat.view(_BITS[flat.element_size()]).long()
    if is_discrete:
        flat = (_mixed(bits * 2654435761 + places) / 2.0**30 - 1) * math.sqrt(3)
    flat = flat.double()
    finite = flat.isfinite()
    flat = torch.where(finite, flat, 0.0)
    hashed = _mixed(places)
    sketch = torch.zeros(_BUCKETS, dtype=torch.float64, device=flat.device)
    sketch.index_add_(0, hashed % _BUCKETS, flat * ((hashed >> 20 & 1) * 2 - 1))
    return Fingerprint(
        checksum=int((bits * (2 * places + 1)).sum()),
        norm=float(torch.linalg.vector_norm(flat)),
        unfinite=int((~finite).sum()),
        sketch=tuple(sketch.tolist()),
        is_discrete=is_discrete,
        made_by=made_by,
    )


def _mixed(numbers: Tensor) -> Tensor:
    """Return whole numbers below 2^31 that look random."""
    mixed = (numbers * 0x9E3779B1 + 0x7F4A7C15) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & 0x7FFFFFFF
    return mixed ^ (mixed >> 13)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRecord:
    """One result of one op."""

    step: int  # optimizer steps before it
    direction: str  # "forward" or "backward"
    module: str  # path of the module; empty outside of modules
    op: str  # full name
    line: str  # the line that called it, or its forward op; empty if unknown
    dtype: str  # of the result
    shape: tuple[int, ...]  # of the result
    held: int  # number of the result's fingerprint
    reads: tuple[int, ...]  # those of the inputs
    # by how much of its size the result changed when the inputs were changed by NUDGES
    answers: tuple[float, ...]
    eps: float  # of the coarsest dtype among result and inputs

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}, {self.direction}, step {self.step}, {self.dtype}[{shape}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A recorded run."""

    records: list[OpRecord] = field(default_factory=list)  # results in the order of the ops
    prints: list[Fingerprint] = field(default_factory=list)  # fingerprints, which records name by number
    # ops that did not run again on changed inputs -> how often
    unmeasured: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the run to a file of numpy's ``.npz`` format; nothing in it is pickled."""
        numpy = _numpy()
        rows = json.dumps([[asdict(record) for record in self.records], self.unmeasured])
        columns = [numpy.array(column) for column in zip(*map(astuple, self.prints), strict=True)]
        numpy.savez_compressed(path, _FORMAT, numpy.frombuffer(rows.encode(), numpy.uint8), *columns)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run.

        Raises:
            ImportError: numpy is not installed.
            ValueError: the file is no such run.
            OSError: it cannot be read.
        """
        numpy = _numpy()
        try:
            with numpy.load(path, allow_pickle=False) as file:
                tag, rows, *columns = [file[name] for name in file.files]
            if str(tag) != _FORMAT:
                raise KeyError(_FORMAT)  # noqa: TRY301 - answered below like any other file
            records, unmeasured = json.loads(rows.tobytes())
        except (ValueError, KeyError, EOFError) as error:
            msg = f"{path} is not a recorded run; make one with: amp-plugin diagnose --save run.npz train.py"
            raise ValueError(msg) from error
        rows = zip(*(column.tolist() for column in columns), strict=True)
        names = Fingerprint.__slots__
        prints = [Fingerprint(**dict(zip(names, row, strict=True))) for row in rows]
        lists = ("shape", "reads", "answers")
        return cls(
            records=[OpRecord(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in records],
            prints=prints,
            unmeasured=unmeasured,
        )


def _numpy() -> Any:
    try:
        import numpy as np  # noqa: PLC0415 - torch works without
    except ImportError as error:
        msg = "recorded runs are files of numpy's format; run: pip install numpy"
        raise ImportError(msg) from error
    return np


class RunRecorder(Region, Observer):
    """A region whose results are written to a file when it ends; see ``record_run``.

    Attributes:
        run: what was recorded so far.
    """

    def __init__(self, path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> None:
        self._path, self._most, self._tracker = Path(path), steps, Tracker(model)
        self._made: Storages[tuple[int, int, object]] = Storages()  # record, fingerprint, layout and version
        super().__init__(self._tracker, self)
        self.run = Run(unmeasured=self.recorder.unmeasured)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop recording and write the file, after an error of the program too."""
        super().__exit__(kind, error, traceback)
        self.run.save(self._path)

    def before(self, call: Call) -> None:
        """Take the inputs' fingerprints, and copies of what the op writes."""
        traits = call.traits
        is_made = not (traits.is_view or traits.is_unwritten or traits.is_collective)
        if is_made and traits.base not in _NO_DISCRETE and self._tracker.steps < self._most:
            written = call.given if traits.written else ()
            copies = {id(argument.tensor): argument.tensor.detach().clone() for argument in written}
            call.kept = (copies, tuple(self._reads(call)))

    def after(self, call: Call, output: Any) -> None:
        """Record the results."""
        made = call.made(output) if call.kept else []
        results = {number: result.tensor for number, result in enumerate(made) if _is_readable(result.tensor)}
        if not results:
            return
        copies, reads = call.kept
        answers = _answers(call, copies, len(made))
        for number, tensor in results.items():
            self._add(call, tensor, reads, answers[number])

    def _reads(self, call: Call) -> Iterator[int]:
        for leaf in (argument.tensor for argument in call.given):
            if _is_readable(leaf) and leaf.numel():
                made, held, layout = self._made.get(leaf) or (-1, -1, None)
                if layout != _layout(leaf):
                    held = self._print(leaf, made)
                    if made < 0:
                        self._made.set(leaf, (-1, held, _layout(leaf)))
                yield held

    def _print(self, tensor: Tensor, made_by: int) -> int:
        self.run.prints.append(fingerprint(tensor, made_by))
        return len(self.run.prints) - 1

    def _add(self, call: Call, tensor: Tensor, reads: tuple[int, ...], answers: tuple[float, ...]) -> None:
        held = self._print(tensor, len(self.run.records))
        self._made.set(tensor, (len(self.run.records), held, _layout(tensor)))
        dtypes = [tensor.dtype, *(argument.tensor.dtype for argument in call.arguments)]
        record = OpRecord(
            step=self._tracker.steps,
            direction=call.direction,
            module=call.site.module,
            op=call.traits.name,
            line=str(call.site.place or ""),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            held=held,
            reads=reads,
            answers=answers,
            eps=max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0),
        )
        self.run.records.append(record)


def _is_readable(tensor: Tensor) -> bool:
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    is_plain = is_plain and tensor.dtype is not torch.uint8  # room for a backward pass
    return is_plain and not (tensor.is_meta or tensor.is_quantized or tensor._is_zerotensor())


def _layout(tensor: Tensor) -> object:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version)


def _answers(call: Call, copies: dict[int, Tensor], count: int) -> list[tuple[float, ...]]:
    """Return for each result by how much of its size it changes when the op's inputs are nudged.

    Errors of inputs may be alike in all elements, or in proportion to them, or neither; or in few elements,
    where they are larger by as much: the first step of Adam is the sign of a gradient, which errors in few
    elements near 0 turn. The largest change counts, and never less than the nudge.
    """
    answers: list[tuple[float, ...]] = [NUDGES] * count
    if not call.is_repeatable:
        if call.reads:
            call.count_unmeasured()
        return answers
    exact = _run_nudged(call, copies, count, "", 0.0)
    for way in _WAYS if exact else ():
        low, high = (_run_nudged(call, copies, count, way, nudge) for nudge in NUDGES)
        if exact is None or low is None or high is None:
            return [NUDGES] * count
        for number, same in enumerate(exact):
            is_steep = call.traits.is_pointwise or call.traits.is_listwise or not same.is_floating_point()
            share = _FEW if way in _FEW_WAYS else 1
            changes = (_change(low[number], same, share), _change(high[number], same, share))
            if share == 1 or is_steep:
                answers[number] = tuple(map(max, answers[number], changes))
    return answers


def _run_nudged(
    call: Call, copies: dict[int, Tensor], count: int, way: str, nudge: float
) -> list[Tensor] | None:
    """Run an op again with its inputs nudged, in fp32 at least."""
    generator = torch.Generator().manual_seed(0)

    def changed(tensor: Tensor) -> Tensor:
        tensor = copies.get(id(tensor), tensor)
        if not _is_readable(tensor) or not tensor.is_floating_point():
            return tensor.clone() if copies else tensor
        dtype = torch.float32 if is_low_precision(tensor.dtype) else tensor.dtype
        wide = tensor.detach().to(dtype, copy=True)
        return wide.add_(nudge * _noise(wide, way, generator)) if nudge and wide.numel() else wide

    return call.again(call.changed(changed, torch.float32), count)


def _noise(tensor: Tensor, way: str, generator: torch.Generator) -> Tensor:
    """Return noise of a tensor's size; in few elements, where all have what those would have."""
    finite = torch.where(tensor.isfinite(), tensor, 0.0)
    if way == "in proportion":
        return finite
    size = finite.square().mean().sqrt()
    if way == "alike":
        return size
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    if way in _FEW_WAYS:
        noise = noise.sign() * math.sqrt(min(_FEW, tensor.numel())) * (1 if way == _FEW_WAYS[0] else -1)
    return noise * size


def _change(result: Tensor, exact: Tensor, share: int = 1) -> float:
    """Return by how much of its size a result has changed, counting one of ``share`` elements, the worst."""
    if result.shape != exact.shape or not exact.numel():
        return 0.0
    if not exact.is_floating_point():
        return math.sqrt(4 * min(float((result != exact).double().mean()), 1 / share))
    finite = exact.isfinite() & result.isfinite()
    apart, values = (result - exact)[finite].double(), exact[finite].double()
    if share > 1:
        apart = apart.abs().topk(math.ceil(apart.numel() / share)).values
    norm, change = (float(torch.linalg.vector_norm(of)) for of in (values, apart))
    return change / norm if norm else math.inf if change else 0.0


def record_run(path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> RunRecorder:
    """Record what each op of a region makes, into a file for ``compare_runs``.

    A few hundred numbers of each tensor are kept: some 1 kB per op. Each op runs eleven times more, on inputs
    that are changed a little, to learn how much its result answers; the program's own results and random
    numbers stay.

    Args:
        path: of the file; ``.npz`` is added where it is missing.
        model: gives the module names; default: whatever module is called.
        steps: optimizer steps to record; what comes later runs unrecorded.

    Returns:
        A context manager; the file is written when it ends.

    Raises:
        ValueError: ``steps`` is below 1.
    """
    if steps < 1:
        msg = f"record_run(steps={steps}): give at least 1"
        raise ValueError(msg)
    return RunRecorder(path, model, steps=steps)
