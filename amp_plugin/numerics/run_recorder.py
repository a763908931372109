"""Record the results of each op in a region. Each rank writes its own file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.hardware import in_widest_float, widest_float
from amp_plugin.numerics.op import Call
from amp_plugin.numerics.parts import Axis, Part, axes_of, located, mesh_of, part_of
from amp_plugin.numerics.places import Site, is_called_by_engine
from amp_plugin.numerics.rank_files import RankFile
from amp_plugin.numerics.recorded import FORMAT, OpRecord, Run, Weight
from amp_plugin.numerics.shadow import WideRun
from amp_plugin.numerics.values import Fingerprint, Storages, distance, fingerprint, norm, real_values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SUMS = 64 * 2.0**-23  # rounding of sums that cancel, relative to the product of the two largest inputs


class _Exchange(NamedTuple):
    """A collective. Its result is recorded when an op reads it, because it may not have arrived before."""

    site: Site  # where the collective was called
    direction: str
    read: tuple[Fingerprint, ...]  # fingerprints of the tensors that this rank sent
    taken: float  # the relative rounding of the tensors that this rank sent
    group: tuple[int, ...]  # the ranks that take part


class RunRecorder(WideRun):  # type: ignore[no-untyped-call]
    """Record the results of each op in a region, into a file for ``compare_runs``.

    If there are several ranks, each rank writes its own file. Then ``path`` is a folder with ``rank-0.amp``,
    ``rank-1.amp`` and so on, and ``manifest.json``. Each rank also writes its file after each step, so a rank
    that is killed leaves its earlier steps.

    A few hundred numbers are kept per tensor, which is about 5 kB per op. Each op runs twice more in fp64: on
    its inputs, and on the inputs without rounding. The program's own results and random numbers do not
    change. The region needs memory for the fp64 values of every live tensor. The file is written when the
    region ends.

    Args:
        path: The path of the file, or of the folder if there are several ranks.
        model: The model, which gives the module names. By default names begin with the outermost module that
            is called.
        steps: The number of optimizer steps to record. Later steps run without recording.
        mesh: The device mesh of the ranks, if no weight is a DTensor that has it. Then ``compare_runs`` names
            its dimensions.

    Attributes:
        run: The recording so far.

    Raises:
        ValueError: ``steps`` is below 1.
        FileExistsError: ``path`` is a folder although this process is the only one, or a file although there
            are several ranks.
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module | None = None,
        *,
        steps: int = 10,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if steps < 1:
            msg = f"record_run(steps={steps}): give at least 1"
            raise ValueError(msg)
        super().__init__(model, widest_float(torch.accelerator.current_accelerator() or torch.device("cpu")))
        self._file, self._most = RankFile(Path(path)), steps
        self._made: Storages[int] = Storages()  # numbers of the records that made them
        self._exchanged: Storages[_Exchange] = Storages()  # collectives whose results no op has read yet
        # rounding of what ranks exchanged, relative: by storage, and by weight of what DDP puts into buckets
        self._taken: Storages[float] = Storages()
        self._taken_of_weights: dict[str, float] = {}
        self.run = Run([], self.unseen, {}, {}, parts={}, mesh=axes_of(mesh))
        self._file.note_mesh(dict(self.run.mesh.keys()))

    def open(self, _: ExitStack) -> None:
        """Find the file to write."""
        self._file.settle()

    def ended(self, error: BaseException | None) -> None:
        """Write the file, also after an error of the program."""
        self._file.settle()
        self._write(is_whole=error is None)

    def _write(self, *, is_whole: bool) -> None:
        kept = self.run._replace(unmeasured=dict(self.run.unmeasured), is_whole=is_whole)
        self._file.write(lambda path: torch.save((FORMAT, *kept), path))

    def to_dict(self) -> dict[str, Any]:
        """Return the file, the number of results and the number of steps, as values for JSON."""
        return {"file": str(self._file.path), "results": len(self.run.records), "steps": self.run.steps}

    def report(self) -> str:
        """Return the same as text."""
        return "{results} results of {steps} steps are in {file}".format(**self.to_dict())

    def step_begins(self, optimizer: Optimizer) -> None:
        """Record the gradients that reach the optimizer, and each weight before its first step."""
        if self.tracker.steps >= self._most:
            return
        with suppress(
            OSError
        ):  # a folder that cannot be made does not end the run; the end of the region says so
            self._file.settle()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for place, weight in enumerate(weights):
            self._note_mesh(mesh_of(weight))
            name = self.tracker.weight(weight) or f"parameter {place} of {type(optimizer).__name__}"
            self._record_weight(weight, name)
            self._record_gradient(weight.grad, name)

    def _note_mesh(self, mesh: dict[Axis, int]) -> None:
        if len(mesh) > len(self.run.mesh):
            self.run = self.run._replace(mesh=mesh)
            self._file.note_mesh(dict(mesh.keys()))

    def _record_weight(self, weight: Tensor, name: str) -> None:
        values = real_values(_local(weight))
        if name not in self.run.weights and values is not None and values.numel():
            is_constant = bool((values == values.flatten()[0]).all())
            exact = in_widest_float(values)
            held, part = fingerprint(values), located(part_of(exact), exact, weight)
            dtype = str(values.dtype).removeprefix("torch.")
            self.run.weights[name] = Weight(dtype, held, part, is_constant)

    def _record_gradient(self, gradient: Tensor | None, name: str) -> None:
        local = None if gradient is None else _local(gradient)
        if local is None or not self._is_read(local) or not local.numel():
            return
        self._arrives(local, name)
        module, _, own_name = name.rpartition(".")
        exchanged = self._taken.get(
            local
        )  # by a collective, so that all rounding before it is in the numbers
        taken = 0.0 if exchanged is None else max(exchanged, self._taken_of_weights.get(name, 0.0))
        self.run.gradients[len(self.run.records)] = name
        site = Site(f"gradient of {own_name}", module, None, None, in_block=False)
        exact = self.shadows.of(local)
        maker = self._made.get(local)
        part = replace(
            located(part_of(exact), exact, gradient),
            maker=-1 if maker is None else maker,
        )
        self._made.set(local, len(self.run.records))
        self._add(site, "backward", local, _coarsest([local]), part, taken=taken)

    def step_ended(self, _: Optimizer) -> None:
        """If there are other ranks, write the records so far: a failure of another rank may end this one."""
        self._taken = Storages()
        self._taken_of_weights = {}
        if self._file.has_other_ranks and self.tracker.steps < self._most:
            with suppress(OSError):  # a disk that is full does not end the run; the end of the region says so
                self._write(is_whole=False)

    def before(self, call: Call) -> None:
        """Take the fingerprints of the inputs."""
        if self.tracker.steps >= self._most:
            return
        super().before(call)
        if not call.traits.is_collective:
            for argument in call.given:
                self._arrives(argument.tensor)
        if not call.traits.waits:  # what it waits for may be on its way
            call.keep_fingerprints(self._reads(call))
        if call.traits.is_collective:
            call.keep(self._rounding_of_inputs(call))

    def after(self, call: Call, output: Any) -> None:
        """Record the results."""
        if self.tracker.steps < self._most:
            super().after(call, output)

    def exchanged(self, call: Call, results: list[Tensor]) -> None:
        """Note a collective, whose results are recorded when an op reads them."""
        super().exchanged(call, results)
        if call.traits.waits:
            return
        for result in results:
            self._taken.set(result, call.kept)
            # The gradients in a bucket are recorded one by one, before the step.
            if not self._is_of_bucket(call):
                site = replace(call.site, op=call.traits.name)
                self._exchanged.set(result, _Exchange(site, call.direction, call.read, call.kept, call.group))

    @staticmethod
    def _is_of_bucket(call: Call) -> bool:
        """Whether DDP calls the op in C++, to fill or to empty its buckets of gradients."""
        return (call.leaf is not None or not call.is_backward) and is_called_by_engine()

    def _arrives(self, tensor: Tensor, weight: str = "") -> None:
        """Record the result of a collective when it is first read. For a gradient, ``weight`` is the name."""
        if (exchange := self._exchanged.get(tensor)) is None:
            return
        self._exchanged.discard(tensor)
        if self._is_read(tensor) and tensor.numel():
            self._made.set(tensor, len(self.run.records))
            site = replace(exchange.site, module=weight or exchange.site.module)
            coarsest, taken = _coarsest([tensor]), exchange.taken
            part = replace(part_of(self.shadows.of(tensor)), group=exchange.group)
            self._add(site, exchange.direction, tensor, coarsest, part, reads=exchange.read, taken=taken)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Record a result."""
        if call.traits.is_unwritten or not self._is_read(result):
            return
        site, tensors = replace(call.site, op=call.traits.name), [given.tensor for given in call.arguments]
        if self._is_of_bucket(call):
            if (
                call.leaf is None
            ):  # the order in which DDP empties a bucket depends on the other weights in it
                self._taken.set(
                    result, max((self._taken.get(tensor) or 0.0 for tensor in tensors), default=0.0)
                )
                return
            site = replace(site, module=self.tracker.weight(call.leaf) or site.module)
            self._taken_of_weights[site.module] = self._rounding(result)
        coarsest = _coarsest([result, *tensors])
        self._made.set(result, len(self.run.records))
        is_made = all(given.name in call.traits.overwritten for given in call.given)
        part = replace(part_of(self.shadows.of(result)), is_random=call.draws, is_made=is_made)
        self._add(
            site,
            call.direction,
            result,
            coarsest,
            part,
            reads=call.read,
            excess=_excess(call, result, exact, coarsest) if exact is not None and coarsest else 0.0,
            taken=self._rounding_of_inputs(call) if exact is None else 0.0,
        )

    def _add(
        self,
        site: Site,
        direction: str,
        result: Tensor,
        coarsest: torch.finfo | None,
        part: Part,
        *,
        reads: tuple[Fingerprint, ...] = (),
        excess: float = 0.0,
        taken: float = 0.0,
    ) -> None:
        record = OpRecord(
            step=self.tracker.steps,
            direction=direction,
            module=site.module,
            op=site.op,
            line=str(site.place or ""),
            dtype=str(result.dtype).removeprefix("torch."),
            shape=tuple(result.shape),
            checksum=fingerprint(result).checksum,
            held=fingerprint(self.shadows.of(result), len(self.run.records)),
            reads=reads,
            eps=coarsest.eps if coarsest else 0.0,
            excess=excess,
            taken=taken,
        )
        self.run.parts[len(self.run.records)] = replace(part, rounding=self._rounding(result))
        self.run.records.append(record)

    def _rounding_of_inputs(self, call: Call) -> float:
        return max((self._rounding(argument.tensor) for argument in call.arguments), default=0.0)

    def _reads(self, call: Call) -> Iterator[Fingerprint]:
        for tensor in (argument.tensor for argument in call.given):
            if self._is_read(tensor) and tensor.numel():
                made_by = self._made.get(tensor)
                yield fingerprint(self.shadows.of(tensor), -1 if made_by is None else made_by)

    def _is_read(self, tensor: Tensor) -> bool:
        is_room = tensor.dtype is torch.uint8  # for a backward pass
        return self.shadows.follows(tensor) and not is_room

    def _rounding(self, tensor: Tensor) -> float:
        is_known = self.shadows.follows(tensor) and tensor.is_floating_point()
        return distance(tensor, self.shadows.of(tensor)) if is_known else 0.0


def _coarsest(tensors: Sequence[Tensor]) -> torch.finfo | None:
    """Return what is known of the dtype with the largest eps; None if all tensors are discrete."""
    dtypes = [tensor.dtype for tensor in tensors]
    floats = [torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max(floats, key=lambda info: info.eps, default=None)


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank: the shard of a DTensor, else the whole tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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


record_run = RunRecorder
