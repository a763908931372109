"""Record what the ops of a region make and read, in a few numbers per tensor, for ``compare_runs``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from amp_plugin.numerics.modules import Modules, Progress
from amp_plugin.numerics.op import Call, Region
from amp_plugin.numerics.values import PLAIN, Storages, is_low_precision, real_values

NUDGES = (2.0**-12, 2.0**-7)
"""By how much of their size inputs are changed to see what a result makes of it."""

_BUCKETS = 128
_WAYS = ("at random", "alike", "in proportion")
_FORMAT = "amp_plugin run 2"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NO_DISCRETE = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "_foreach_norm"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """A tensor in a few numbers; every element is in each of them.

    Attributes:
        checksum: of all bits and their places; equal tensors of one dtype have equal ones.
        norm: Euclidean, of the finite elements.
        unfinite: how many elements are not finite.
        sketch: sums of elements with signs that look random, in buckets that look random: the norm of the
            difference of two sketches is that of the tensors' difference, to some 10 %.
    """

    checksum: int
    norm: float
    unfinite: int
    sketch: tuple[float, ...]

    def difference(self, other: Fingerprint) -> float:
        """Return the relative difference from a tensor of the same shape; inf if others are not finite."""
        if self.unfinite != other.unfinite:
            return math.inf
        apart = math.dist(self.sketch, other.sketch)
        apart = max(apart, abs(self.norm - other.norm))
        return 0.0 if apart == 0 else apart / other.norm if other.norm else math.inf


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return a tensor in a few numbers.

    Args:
        tensor: dense, on any device. Integers and booleans count as equal or not, element by element.

    Raises:
        ValueError: its numbers cannot be read.
    """
    is_discrete = not (tensor.is_floating_point() or tensor.is_complex())
    values = tensor.detach() if is_discrete and not tensor.is_quantized else real_values(tensor)
    if values is None:
        msg = f"fingerprint: the numbers of a {type(tensor).__name__} of {tensor.dtype} cannot be read"
        raise ValueError(msg)
    flat = values.contiguous().reshape(-1)
    if not flat.numel():
        return Fingerprint(checksum=0, norm=0.0, unfinite=0, sketch=(0.0,) * _BUCKETS)
    places = torch.arange(flat.numel(), device=flat.device)
    if is_discrete:
        numbers = _mixed(flat.long() * 2654435761 + places)
        checksum, flat = int((flat.long() * (2 * places + 1)).sum()), (numbers & 1).double() * 2 - 1
    else:
        bits = flat.view(_BITS[flat.element_size()]).long()
        checksum, flat = int((bits * (2 * places + 1)).sum()), flat.double()
    finite = flat.isfinite()
    flat = torch.where(finite, flat, 0.0)
    hashed = _mixed(places)
    signed = flat * ((hashed >> 20 & 1) * 2 - 1)
    sketch = torch.zeros(_BUCKETS, dtype=torch.float64, device=flat.device)
    sketch.index_add_(0, hashed % _BUCKETS, signed)
    return Fingerprint(
        checksum=checksum,
        norm=float(torch.linalg.vector_norm(flat)),
        unfinite=int((~finite).sum()),
        sketch=tuple(sketch.tolist()),
    )


def _mixed(numbers: Tensor) -> Tensor:
    """Return whole numbers below 2^31 that look random."""
    mixed = (numbers * 0x9E3779B1 + 0x7F4A7C15) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & 0x7FFFFFFF
    return mixed ^ (mixed >> 13)


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """An input of an op.

    Attributes:
        held: number of its fingerprint.
        made_by: number of the record that made it; -1 where no op of the region did.
        is_discrete: integers or booleans.
    """

    held: int
    made_by: int
    is_discrete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRecord:
    """One result of one op.

    Attributes:
        step: optimizer steps before it.
        direction: ``"forward"`` or ``"backward"``.
        module: path of the module; empty outside of modules.
        op: full name.
        line: the line that called it, or its forward op; empty if unknown.
        dtype: of the result.
        shape: of the result.
        held: number of the result's fingerprint.
        reads: the inputs.
        answers: by how much of its size the result changed when the inputs were changed by ``NUDGES``.
        eps: of the coarsest dtype among result and inputs.
    """

    step: int
    direction: str
    module: str
    op: str
    line: str
    dtype: str
    shape: tuple[int, ...]
    held: int
    reads: tuple[Read, ...]
    answers: tuple[float, ...]
    eps: float

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}, {self.direction}, step {self.step}, {self.dtype}[{shape}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A recorded run.

    Attributes:
        records: results in the order of the ops.
        prints: fingerprints, which records name by number.
    """

    records: list[OpRecord]
    prints: list[Fingerprint]

    def save(self, path: Path) -> None:
        """Write the run to a file of numpy's ``.npz`` format; nothing in it is pickled."""
        numpy = _numpy()
        numpy.savez_compressed(
            path,
            format=numpy.array(_FORMAT),
            rows=numpy.frombuffer(
                json.dumps([asdict(record) for record in self.records]).encode(), numpy.uint8
            ),
            checksums=numpy.array([held.checksum for held in self.prints], dtype=numpy.int64),
            numbers=numpy.array([[held.norm, held.unfinite] for held in self.prints], dtype=numpy.float64),
            sketches=numpy.array([held.sketch for held in self.prints], dtype=numpy.float64),
        )

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
                held = {name: file[name] for name in file.files}
            if str(held["format"]) != _FORMAT:
                raise KeyError(_FORMAT)  # noqa: TRY301 - answered below like any other file
            rows = json.loads(held["rows"].tobytes())
        except (ValueError, KeyError, EOFError) as error:
            msg = f"{path} is not a recorded run; make one with: amp-plugin diagnose --save {path} script.py"
            raise ValueError(msg) from error
        columns = zip(
            held["checksums"].tolist(), held["numbers"].tolist(), held["sketches"].tolist(), strict=True
        )
        prints = [
            Fingerprint(checksum=checksum, norm=norm, unfinite=int(unfinite), sketch=tuple(sketch))
            for checksum, (norm, unfinite), sketch in columns
        ]
        return cls(records=[_record(row) for row in rows], prints=prints)


def _record(row: dict[str, Any]) -> OpRecord:
    reads = tuple(Read(**read) for read in row["reads"])
    return OpRecord(**{**row, "shape": tuple(row["shape"]), "reads": reads, "answers": tuple(row["answers"])})


def _numpy() -> Any:
    try:
        import numpy as np  # noqa: PLC0415 - torch works without
    except ImportError as error:
        msg = "recorded runs are files of numpy's format; run: pip install numpy"
        raise ImportError(msg) from error
    return np


class RunRecorder(Region):
    """A region whose results are written to a file when it ends; see ``record_run``.

    Attributes:
        run: what was recorded so far.
    """

    def __init__(self, path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> None:
        self.run = Run(records=[], prints=[])
        self._path, self._most, self._progress = Path(path), steps, Progress()
        self._made: Storages[tuple[int, int, object]] = Storages()  # record, fingerprint, layout and version
        super().__init__(Modules(model), self, self._progress)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop recording and write the file, after an error of the program too."""
        super().__exit__(kind, error, traceback)
        self.run.save(self._path)

    def before(self, call: Call) -> None:
        """Take the inputs' fingerprints, and copies of what the op writes."""
        if self._is_recorded(call):
            given = _copied((call.args, call.kwargs)) if call.traits.written else (call.args, call.kwargs)
            call.kept = (given, tuple(self._reads(call)))

    def failed(self, call: Call) -> None:
        """Do nothing: a call that raised has no result to record."""

    def after(self, call: Call, output: Any) -> None:
        """Record the results."""
        if not self._is_recorded(call):
            return
        (args, kwargs), reads = call.kept
        written = [argument.tensor for argument in call.arguments if argument.name in call.traits.written]
        results = [*written, *(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))]
        results = [tensor for tensor in dict.fromkeys(results) if _is_readable(tensor)]
        if not results:
            return
        answers = _answers(call, args, kwargs, len(results))
        for number, tensor in enumerate(results):
            self._add(call, tensor, reads, answers[number])

    def _is_recorded(self, call: Call) -> bool:
        traits = call.traits
        is_made = not (traits.is_view or traits.is_unwritten or traits.is_collective)
        return is_made and traits.base not in _NO_DISCRETE and self._progress.steps < self._most

    def _reads(self, call: Call) -> Iterator[Read]:
        for leaf in tree_leaves((call.args, call.kwargs)):
            if isinstance(leaf, Tensor) and _is_readable(leaf) and leaf.numel():
                made, held, layout = self._made.get(leaf) or (-1, -1, None)
                if layout != _layout(leaf):
                    held = self._print(leaf)
                    if made < 0:
                        self._made.set(leaf, (-1, held, _layout(leaf)))
                is_discrete = not (leaf.is_floating_point() or leaf.is_complex())
                yield Read(held=held, made_by=made, is_discrete=is_discrete)

    def _print(self, tensor: Tensor) -> int:
        self.run.prints.append(fingerprint(tensor))
        return len(self.run.prints) - 1

    def _add(self, call: Call, tensor: Tensor, reads: tuple[Read, ...], answers: tuple[float, ...]) -> None:
        held = self._print(tensor)
        self._made.set(tensor, (len(self.run.records), held, _layout(tensor)))
        dtypes = [tensor.dtype, *(argument.tensor.dtype for argument in call.arguments)]
        record = OpRecord(
            step=self._progress.steps,
            direction=call.direction,
            module=call.site.module,
            op=call.traits.name,
            line=str(call.site.where.place or ""),
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


def _copied(values: Any) -> Any:
    """Return copies of tensors; one that is given twice stays one."""
    copies: dict[object, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return copies.setdefault((leaf.data_ptr(), _layout(leaf)), leaf.detach().clone())

    return tree_map(copied, values)


def _answers(call: Call, args: Any, kwargs: Any, count: int) -> list[tuple[float, ...]]:
    """Return for each result by how much it changes when the op's inputs are nudged, in fp32 at least.

    Errors of inputs may be alike in all elements, or in proportion to them, or neither: each nudge is tried
    in all three
    ways. The largest change counts, and never less than the nudge.
    """
    least = [tuple(NUDGES)] * count
    if call.traits.is_random or not call.arguments:
        return least
    try:
        exact = _run_again(call, args, kwargs, 0.0, _WAYS[0])
        changed = [[_run_again(call, args, kwargs, nudge, way) for way in _WAYS] for nudge in NUDGES]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return least
    if len(exact) != count or any(len(results) != count for ways in changed for results in ways):
        return least
    return [
        tuple(
            max(nudge, *(_change(results[index], exact[index]) for results in ways))
            for nudge, ways in zip(NUDGES, changed, strict=True)
        )
        for index in range(count)
    ]


def _run_again(call: Call, args: Any, kwargs: Any, nudge: float, way: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    known: dict[int, Tensor] = {}  # a tensor that is given twice is changed once

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype) and is_low_precision(leaf):
            return torch.float32
        if not isinstance(leaf, Tensor) or not _is_readable(leaf) or not leaf.is_floating_point():
            return leaf.clone() if isinstance(leaf, Tensor) and call.traits.written else leaf
        if id(leaf) in known:
            return known[id(leaf)]
        wide = leaf.detach().to(torch.float32 if is_low_precision(leaf.dtype) else leaf.dtype, copy=True)
        if nudge and wide.numel():
            noise = torch.randn(wide.shape, generator=generator) if way == "at random" else torch.ones(())
            size = torch.where(wide.isfinite(), wide, 0.0)
            size = size if way == "in proportion" else size.square().mean().sqrt()
            wide += noise.to(wide) * size * nudge
        known[id(leaf)] = wide
        return wide

    args, kwargs = tree_map(changed, (args, kwargs))
    if call.traits.base in {"_softmax", "_log_softmax"}:
        args = (*args[:2], False)  # half_to_float: of a half tensor only
    output = call.func(*args, **kwargs)
    given = {**dict(zip(call.traits.arguments, args, strict=False)), **kwargs}
    written = [
        leaf
        for name in call.traits.arguments
        if name in call.traits.written
        for leaf in _floats(given.get(name))
    ]
    results = [*written, *(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))]
    return [tensor for tensor in dict.fromkeys(results) if _is_readable(tensor)]


def _floats(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _change(result: Tensor, exact: Tensor) -> float:
    """Return by how much of its size a result has changed."""
    if not exact.is_floating_point() or result.shape != exact.shape:
        share = (
            float((result != exact).double().mean()) if result.shape == exact.shape and exact.numel() else 0.0
        )
        return math.sqrt(4 * share)
    finite = exact.isfinite() & result.isfinite()
    norm = float(torch.linalg.vector_norm(exact[finite].double()))
    apart = float(torch.linalg.vector_norm((result - exact)[finite].double()))
    return apart / norm if norm else math.inf if apart else 0.0


def record_run(path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> RunRecorder:
    """Record what each op of a region makes, into a file for ``compare_runs``.

    A few hundred numbers of each tensor are kept: some 1 kB per op. Each op runs seven times more, on
    inputs that are
    changed a little, to learn how much its result answers; the program's own results and random numbers stay.

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
