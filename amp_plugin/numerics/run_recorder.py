"""Record the results of each op in a region. Each rank has its own file."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.hardware import widest_float
from amp_plugin.messages import warn_user
from amp_plugin.numerics.flat_shards import flat_shards, mesh_of_unit
from amp_plugin.numerics.op import Call
from amp_plugin.numerics.rank_files import RankFile
from amp_plugin.numerics.rank_recorder import RankRecorder
from amp_plugin.numerics.recorded import Run
from amp_plugin.numerics.shadow import WideRun
from amp_plugin.numerics.shares import FlatShare, Placements, axes_of, check_placements, mesh_of, shares_of
from amp_plugin.numerics.simulated_ranks import simulated_ranks
from amp_plugin.patterns import clean_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ENTERED_INSIDE = (
    "LocalTensorMode was entered inside record_run, which therefore cannot tell the simulated ranks apart; "
    "enter the mode first, as in: with LocalTensorMode(4), record_run(path):"
)


class RunRecorder(WideRun):  # type: ignore[no-untyped-call]
    """Record the results of each op in a region, and write them to a file for ``compare_runs``.

    If there are several ranks, each rank writes its own file, and ``path`` is a folder. The folder contains
    ``rank-0.amp``, ``rank-1.amp`` and so on, and ``manifest.json``. Each rank also writes its file after each
    step, so that the recorded steps are not lost if the rank is killed. In torch's ``LocalTensorMode``, one
    process simulates all ranks and writes all their files. The mode must be entered before the recording.

    The recording contains a few hundred numbers per tensor, which is about 5 kB per op. Each op runs two more
    times in fp64, once on the program's inputs and once on the inputs of a run without rounding. The
    program's own results and random numbers do not change. The region needs memory for the fp64 values of
    every live tensor. The file is written when the region ends.

    Args:
        path: The path of the file, or of the folder if there are several ranks.
        model: The model from which module names are taken. By default, names begin with the class of the
            outermost module that is called.
        steps: The number of optimizer steps to record. Later steps run without recording.
        mesh: The device mesh of the ranks. Reports of ``compare_runs`` name the dimensions of the mesh.
            ``mesh`` is needed only if no weight is a DTensor.
        placements: The placements of weights that the program shards itself, on the device mesh ``mesh``. The
            dict maps the name of a weight to one placement of ``torch.distributed.tensor`` for each dimension
            of the mesh. Names are written as in a report, and ``*`` matches any text. With placements, each
            shard is compared at its position in the whole tensor. All shards of a weight must have the same
            size.

    Raises:
        ValueError: ``steps`` is below 1, or ``placements`` does not fit ``mesh``.
        FileExistsError: ``path`` is an existing folder although there is a single rank, or an existing file
            although there are several ranks.
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module | None = None,
        *,
        steps: int = 10,
        mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
    ) -> None:
        if steps < 1:
            msg = f"record_run(steps={steps}): give at least 1"
            raise ValueError(msg)
        check_placements(placements or {}, mesh)
        super().__init__(model, widest_float(torch.accelerator.current_accelerator() or torch.device("cpu")))
        self._path, self._most = Path(path), steps
        self._mesh, self._placements = mesh, placements or {}
        self._ranks: dict[int | None, RankRecorder] = {}  # None is the rank of this process

    @property
    def run(self) -> Run:
        """The recording so far.

        If this process simulates several ranks, the recording of the first rank is returned.
        """
        return next(iter(self._ranks.values())).run

    def open(self, _: ExitStack) -> None:
        """Determine which files this process writes."""
        for rank in simulated_ranks() or (None,):
            self._ranks[rank] = RankRecorder(RankFile(self._path), self.shadows, self.tracker)
            self._ranks[rank].note_mesh(axes_of(self._mesh, rank))
        self._settle()

    def _settle(self) -> None:
        """Determine the ranks, and create their folder."""
        count = 1 + max((rank for rank in self._ranks if rank is not None), default=0)
        for rank, recorder in self._ranks.items():
            recorder.settle(None if rank is None else (rank, count))

    def ended(self, error: BaseException | None) -> None:
        """Write the files, even if the program raised an error."""
        self._settle()
        for recorder in self._ranks.values():
            recorder.write(self._unmeasured(), is_whole=error is None)

    def _unmeasured(self) -> dict[str, int]:
        return {name: -(-count // len(self._ranks)) for name, count in self.unseen.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the path of the file, the number of results and the number of steps."""
        runs = [recorder.run for recorder in self._ranks.values()]
        first = next(iter(self._ranks.values()))
        results, steps = sum(len(run.records) for run in runs), max(run.steps for run in runs)
        file = first.file.path if len(runs) == 1 else self._path
        return {"file": str(file), "results": results, "steps": steps}

    def report(self) -> str:
        """Return a line of text with the number of results, the number of steps and the path of the file.

        Skipped steps are not counted. The last step counts as soon as it has begun.
        """
        counts = self.to_dict()
        steps = f"{counts['steps']} optimizer step{'s' * (counts['steps'] != 1)}"
        return f"{counts['results']} results of {steps} are in {counts['file']}"

    def step_begins(self, optimizer: Optimizer) -> None:
        """Record the gradients that reach the optimizer, and each weight before its first step."""
        if self.tracker.steps >= self._most:
            return
        with suppress(OSError):  # if the folder cannot be created, the error is raised at the region's end
            self._settle()
        flat = self._flat_shares()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for place, weight in enumerate(weights):
            name = self.tracker.weight(weight) or f"parameter {place} of {type(optimizer).__name__}"
            for rank, recorder in self._ranks.items():
                recorder.note_mesh(mesh_of(weight, rank))
                parts_of = partial(
                    shares_of, name=name, rank=rank, mesh=self._mesh, asked=self._placements, flat=flat
                )
                for share in parts_of(weight, weight):
                    recorder.record_weight(share)
                for share in parts_of(weight, weight.grad):
                    recorder.record_gradient(share)

    def _flat_shares(self) -> dict[int, list[FlatShare]]:
        """Map the id of each flat parameter of FSDP1 to the weights that this flat parameter contains."""
        flat: dict[int, list[FlatShare]] = {}
        for unit in self.tracker.flat_units():
            for recorder in self._ranks.values():
                recorder.note_mesh(mesh_of_unit(unit))
            for holder, module, name, elements, describe in flat_shards(unit):
                path = clean_name(f"{self.tracker.name_of(module)}.{name}")
                flat.setdefault(id(holder), []).append((path, elements, describe))
        return flat

    def step_ended(self, _: Optimizer) -> None:
        """Write the results recorded so far, if the run has several ranks."""
        if self.tracker.steps < self._most:
            for recorder in self._ranks.values():
                recorder.write_step(self._unmeasured())

    def before(self, call: Call) -> None:
        """Take the fingerprints of the inputs."""
        if self.tracker.steps >= self._most:
            return
        if call.rank is None and simulated_ranks():
            warn_user(_ENTERED_INSIDE)
        super().before(call)
        self._ranks[call.rank].read_before(call)

    def after(self, call: Call, output: Any) -> None:
        """Record the results."""
        if self.tracker.steps < self._most:
            super().after(call, output)

    def exchanged(self, call: Call, results: list[Tensor]) -> None:
        """Remember a collective, so that its results are recorded when an op reads them."""
        super().exchanged(call, results)
        if not call.traits.waits:
            self._ranks[call.rank].record_exchange(call, results)

    def take(self, call: Call, result: Tensor, exact: Tensor | None) -> None:
        """Record a result."""
        self._ranks[call.rank].record(call, result, exact)


record_run = RunRecorder
