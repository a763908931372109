"""Record what one rank computes, namely the results of its ops, its gradients and its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from amp_plugin.hardware import in_widest_float
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call
from amp_plugin.numerics.parts import Axis, Part, part_of
from amp_plugin.numerics.places import Site, is_called_by_engine
from amp_plugin.numerics.rank_files import RankFile
from amp_plugin.numerics.recorded import FORMAT, OpRecord, Run, Weight
from amp_plugin.numerics.shares import Share
from amp_plugin.numerics.values import (
    Fingerprint,
    ShadowValues,
    Storages,
    distance,
    fingerprint,
    norm,
    real_values,
)

# The allowed rounding error of fp32 sums, divided by the product of the norms of the two largest inputs.
_SUMS = 64 * 2.0**-23


class RankRecorder:
    """Records what one rank computes, and writes it to the file of this rank.

    Args:
        file: The file of the rank.
        shadows: The values that tensors would have without rounding.
        tracker: The tracker, which knows the names of modules and weights, and which counts steps.

    Attributes:
        file: The file of the rank.
        run: The recording so far.
    """

    def __init__(self, file: RankFile, shadows: ShadowValues, tracker: Tracker) -> None:
        self.file, self._shadows, self._tracker = file, shadows, tracker
        self._made: Storages[int] = Storages()  # the index of the recorded op that last wrote to the storage
        # The collectives whose results no op has read yet. A result may arrive after the op has returned.
        self._exchanged: Storages[Call] = Storages()
        # The relative rounding error of each tensor that this rank passed to a collective.
        self._taken: Storages[float] = Storages()
        # Maps the name of each weight in a DDP bucket to the relative rounding error of its gradient.
        self._taken_of_weights: dict[str, float] = {}
        self.run = Run([], {}, {}, {}, parts={}, mesh={})

    def settle(self, seat: tuple[int, int] | None) -> None:
        """Determine the rank and the number of ranks, and create the folder if there are several ranks.

        Args:
            seat: The rank and the number of ranks. None for those of this process.
        """
        self.file.settle(seat, self._sizes_of_mesh)

    def write(self, unmeasured: dict[str, int], *, is_whole: bool) -> None:
        """Write the records so far.

        Args:
            unmeasured: Maps each op to how often it could not run in fp64.
            is_whole: Whether the recorded region has ended without an error.
        """
        kept = self.run._replace(unmeasured=unmeasured, is_whole=is_whole)
        self.file.write(lambda path: torch.save((FORMAT, *kept), path), self._sizes_of_mesh)

    def write_step(self, unmeasured: dict[str, int]) -> None:
        """Write the results recorded so far, because the failure of another rank may end this process.

        If there is a single rank, nothing is written.
        """
        self._taken = Storages()
        self._taken_of_weights = {}
        if self.file.has_other_ranks:
            with suppress(OSError):  # if the disk is full, the error is raised at the end of the region
                self.write(unmeasured, is_whole=False)

    def note_mesh(self, mesh: dict[Axis, int]) -> None:
        """Remember a device mesh, given as a dict from each mesh dimension to this rank's coordinate.

        If the program has several meshes, the mesh with the most dimensions is used.
        """
        if len(mesh) > len(self.run.mesh):
            self.run = self.run._replace(mesh=mesh)

    @property
    def _sizes_of_mesh(self) -> dict[str, int]:
        return dict(self.run.mesh.keys())

    def record_weight(self, share: Share) -> None:
        """Record this rank's part of a weight before the weight is first updated."""
        name, weight, describe = share
        values = real_values(weight)
        if name in self.run.weights or values is None:
            return
        is_constant = bool((values == values.flatten()[0]).all())
        dtype = str(values.dtype).removeprefix("torch.")
        part = describe(in_widest_float(values))
        self.run.weights[name] = Weight(dtype, fingerprint(values), part, is_constant)

    def record_gradient(self, share: Share) -> None:
        """Record this rank's part of a gradient that reaches the optimizer."""
        name, gradient, describe = share
        if not self._is_read(gradient):
            return
        self._arrives(gradient, name)
        module, _, own_name = name.rpartition(".")
        # The result of a collective is taken as exact, although its inputs had rounding errors.
        # The size of these rounding errors is recorded together with the gradient.
        exchanged = self._taken.get(gradient)
        taken = 0.0 if exchanged is None else max(exchanged, self._taken_of_weights.get(name, 0.0))
        site = Site(f"gradient of {own_name}", module, None, None, in_block=False)
        part = replace(describe(self._shadows.of(gradient)), maker=self._maker_of(gradient))
        self.run.gradients[len(self.run.records)] = name
        self._made.set(gradient, len(self.run.records))
        self._add(site, "backward", gradient, _coarsest([gradient]), part, taken=taken)

    def _maker_of(self, gradient: Tensor) -> int:
        """Return the index of the recorded op that computed a gradient, or -1 if the op is not known."""
        made = self._made.get(gradient)
        if made is None:
            return -1
        # All gradients in a flat tensor share one storage.
        return self.run.parts[made].maker if made in self.run.gradients else made

    def read_before(self, call: Call) -> None:
        """Take the fingerprints of an op's inputs."""
        if not call.traits.is_collective:
            for argument in call.given:
                self._arrives(argument.tensor)
        if not call.traits.waits:  # the data that the op waits for might not have arrived yet
            call.keep_fingerprints(self._reads(call))
        if call.traits.is_collective:
            call.keep(self._rounding_of_inputs(call))

    def record_exchange(self, call: Call, results: Sequence[Tensor]) -> None:
        """Remember a collective, so that its results are recorded when an op reads them."""
        for result in results:
            self._taken.set(result, call.kept)
            # Gradients in a DDP bucket are recorded one by one before the optimizer step.
            if not _is_of_bucket(call):
                self._exchanged.set(result, call)

    def _arrives(self, tensor: Tensor, weight: str = "") -> None:
        """Record the result of a collective when it is first read.

        If the result is a gradient, ``weight`` is the name of its weight.
        """
        if (call := self._exchanged.get(tensor)) is None:
            return
        self._exchanged.discard(tensor)
        if self._is_read(tensor) and tensor.numel():
            self._made.set(tensor, len(self.run.records))
            site = replace(call.site, op=call.traits.name, module=weight or call.site.module)
            part = replace(part_of(self._shadows.of(tensor)), group=call.group)
            self._add(
                site, call.direction, tensor, _coarsest([tensor]), part, reads=call.read, taken=call.kept
            )

    def record(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Record a result.

        Args:
            call: The call to the op.
            result: The result of the program.
            exact: The result in fp64 on the same inputs. None if the op cannot run in fp64.
        """
        if call.traits.is_unwritten or not self._is_read(result):
            return
        site, tensors = replace(call.site, op=call.traits.name), [given.tensor for given in call.arguments]
        if _is_of_bucket(call):
            # Copies out of a bucket are not recorded, because their order differs between runs.
            if call.leaf is None:
                taken = max((self._taken.get(tensor) or 0.0 for tensor in tensors), default=0.0)
                self._taken.set(result, taken)
                return
            site = replace(site, module=self._tracker.weight(call.leaf) or site.module)
            self._taken_of_weights[site.module] = self._rounding(result)
        coarsest = _coarsest([result, *tensors])
        self._made.set(result, len(self.run.records))
        is_made = all(given.name in call.traits.overwritten for given in call.given)
        part = replace(part_of(self._shadows.of(result)), is_random=call.draws, is_made=is_made)
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
            step=self._tracker.steps,
            direction=direction,
            module=site.module,
            op=site.op,
            line=str(site.place or ""),
            dtype=str(result.dtype).removeprefix("torch."),
            shape=tuple(result.shape),
            checksum=fingerprint(result).checksum,
            held=fingerprint(self._shadows.of(result), len(self.run.records)),
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
                yield fingerprint(self._shadows.of(tensor), -1 if made_by is None else made_by)

    def _is_read(self, tensor: Tensor) -> bool:
        is_room = tensor.dtype is torch.uint8  # memory that an op reserves for its backward pass
        return self._shadows.follows(tensor) and not is_room

    def _rounding(self, tensor: Tensor) -> float:
        is_known = self._shadows.follows(tensor) and tensor.is_floating_point()
        return distance(tensor, self._shadows.of(tensor)) if is_known else 0.0


def _is_of_bucket(call: Call) -> bool:
    """Return whether DDP's C++ code calls the op to fill or empty a gradient bucket."""
    return (call.leaf is not None or not call.is_backward) and is_called_by_engine()


def _coarsest(tensors: Sequence[Tensor]) -> torch.finfo | None:
    """Return ``torch.finfo`` of the dtype with the largest eps, or None if all tensors hold integers."""
    dtypes = [tensor.dtype for tensor in tensors]
    floats = [torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max(floats, key=lambda info: info.eps, default=None)


def _excess(call: Call, result: Tensor, exact: Tensor, coarsest: torch.finfo) -> float:
    """Return an op's own error, divided by the largest error that rounding can cause.

    An error counts as rounding if it can come from rounding the result, or from fp32 sums whose terms cancel.
    """
    if not result.is_floating_point():
        return 0.0
    finite = exact.isfinite() & result.isfinite()
    given = [argument.tensor for argument in call.arguments]
    apart, size, *norms = map(norm, ((result - exact)[finite], exact[finite], *given))
    product = math.prod(sorted(max(size, 1.0) for size in norms)[-2:])
    tiny = coarsest.eps * coarsest.smallest_normal * math.sqrt(result.numel())
    allowed = 2 * coarsest.eps * size + _SUMS * product + tiny
    return apart / allowed if math.isfinite(allowed) else 0.0
