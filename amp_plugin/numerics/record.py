"""Record what the ops of a region make and read, and would without rounding, for ``compare_runs``."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_plugin.numerics.op import Call
from amp_plugin.numerics.rounding import distance
from amp_plugin.numerics.shadow import WideRun
from amp_plugin.numerics.values import PLAIN, Storages, norm, real_values

_BUCKETS = 128
_FORMAT = "amp_plugin run 4"
_SUMS = 64 * 2.0**-23  # of the product of the two largest inputs: rounding of sums that cancel
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    checksum: int  # of its bits
    held: Fingerprint  # of what it would be without rounding
    reads: tuple[Fingerprint, ...]  # of the inputs without rounding
    eps: float  # of the coarsest dtype among result and inputs
    rounding: float  # how far the result is from the one without rounding, relative
    # the op's own error over what rounding its result once and sums in fp32 may come to
    excess: float
    # that of the inputs, where the result is taken as exact since the op does not run in fp64; else 0
    taken: float

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}, {self.direction}, step {self.step}, {self.dtype}[{shape}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A recorded run."""

    format: str = _FORMAT
    records: list[OpRecord] = field(default_factory=list)  # results in the order of the ops
    # ops that did not run in fp64 -> how often
    unmeasured: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run; nothing else is unpickled.

        Raises:
            ValueError: the file is no such run.
            OSError: it cannot be read.
        """
        run, reason = None, None
        with torch.serialization.safe_globals([cls, OpRecord, Fingerprint, Counter]):
            try:
                run = torch.load(path, weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                reason = error
        if not isinstance(run, cls) or run.format != _FORMAT:
            msg = f"{path} is not a recorded run; make one with: amp-plugin diagnose --save run.pt train.py"
            raise ValueError(msg) from reason
        return run


class RunRecorder(WideRun):
    """A region whose results are written to a file when it ends; see ``record_run``.

    Attributes:
        run: what was recorded so far.
    """

    def __init__(self, path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> None:
        super().__init__(model, torch.float32 if torch.backends.mps.is_available() else torch.float64)
        self._path, self._most = Path(path), steps
        self._made: Storages[tuple[Fingerprint, object]] = Storages()  # and its layout and version
        self.run = Run(unmeasured=self.recorder.unmeasured)

    def ended(self, error: BaseException | None) -> None:
        """Write the file, after an error of the program too."""
        torch.save(self.run, self._path)

    @property
    def is_empty(self) -> bool:
        """Whether no op made a number."""
        return not self.run.records

    def to_dict(self) -> dict[str, Any]:
        """Return file, number of results and steps, as JSON's values."""
        records = self.run.records
        steps = records[-1].step + 1 if records else 0
        return {"file": str(self._path), "results": len(records), "steps": steps}

    def report(self) -> str:
        """Return the same as text."""
        return "{results} results of {steps} steps are in {file}".format(**self.to_dict())

    def before(self, call: Call) -> None:
        """Take the inputs' fingerprints."""
        if self.recorder.tracker.steps < self._most:
            super().before(call)
            call.read = tuple(self._reads(call))

    def after(self, call: Call, output: Any) -> None:
        """Record the results."""
        if self.recorder.tracker.steps < self._most:
            super().after(call, output)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Record a result."""
        if call.traits.is_unwritten or call.traits.is_collective or not _is_readable(result):
            return
        site, dtypes = call.site, [result.dtype, *(argument.tensor.dtype for argument in call.arguments)]
        floats = [torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
        coarsest = max(floats, key=lambda info: info.eps, default=None)
        taken = [self._rounding(given.tensor) for given in call.arguments] if exact is None else []
        record = OpRecord(
            step=self.recorder.tracker.steps,
            direction=call.direction,
            module=site.module,
            op=call.traits.name,
            line=str(site.place or ""),
            dtype=str(result.dtype).removeprefix("torch."),
            shape=tuple(result.shape),
            checksum=fingerprint(result).checksum,
            held=self._print(result, len(self.run.records)),
            reads=call.read,
            eps=coarsest.eps if coarsest else 0.0,
            rounding=self._rounding(result),
            excess=_excess(call, result, exact, coarsest) if exact is not None and coarsest else 0.0,
            taken=max(taken, default=0.0),
        )
        self.run.records.append(record)

    def _reads(self, call: Call) -> Iterator[Fingerprint]:
        for tensor in (argument.tensor for argument in call.given):
            if _is_readable(tensor) and tensor.numel():
                made = self._made.get(tensor)
                is_known = made is not None and made[1] == _layout(tensor)
                yield made[0] if made and is_known else self._print(tensor, made[0].made_by if made else -1)

    def _print(self, tensor: Tensor, made_by: int) -> Fingerprint:
        follows = self.shadows.follows(tensor)
        held = fingerprint(self.shadows.of(tensor) if follows else tensor, made_by)
        self._made.set(tensor, (held, _layout(tensor)))
        return held

    def _rounding(self, tensor: Tensor) -> float:
        is_known = self.shadows.follows(tensor) and tensor.is_floating_point()
        return distance(tensor, self.shadows.of(tensor)) if is_known else 0.0


def _is_readable(tensor: Tensor) -> bool:
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    is_plain = is_plain and tensor.dtype is not torch.uint8  # room for a backward pass
    return is_plain and not (tensor.is_meta or tensor.is_quantized or tensor._is_zerotensor())


def _layout(tensor: Tensor) -> object:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version)


def _excess(call: Call, result: Tensor, exact: Tensor, coarsest: torch.finfo) -> float:
    """Return an op's own error over what rounding its result, and sums in fp32 that cancel, may come to."""
    if not result.is_floating_point():
        return 0.0
    finite = exact.isfinite() & result.isfinite()
    given = [argument.tensor for argument in call.arguments]
    apart, size, *norms = map(norm, ((result - exact)[finite], exact[finite], *given))
    product = math.prod(sorted(max(size, 1.0) for size in norms)[-2:])
    tiny = coarsest.eps * coarsest.smallest_normal * math.sqrt(result.numel())
    allowed = 2 * coarsest.eps * size + _SUMS * product + tiny
    return apart / allowed if math.isfinite(allowed) else 0.0


def record_run(path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> RunRecorder:
    """Record what each op of a region makes, into a file for ``compare_runs``.

    A few hundred numbers of each tensor are kept: some 2 kB per op. Each op runs twice more in fp64, on its
    inputs and on what they would be without rounding; the program's own results and random numbers stay.
    Memory: the fp64 values of every living tensor.

    Args:
        path: of the file.
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
