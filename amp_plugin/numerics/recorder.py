"""Record what each op of a region makes, to compare it with another run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from amp_plugin.numerics.fingerprint import fingerprint
from amp_plugin.numerics.forward_sites import Site, runs_backward
from amp_plugin.numerics.module_paths import ModulePaths
from amp_plugin.numerics.op_call import Argument, arguments_of, made_by
from amp_plugin.numerics.op_mode import OpMode
from amp_plugin.numerics.op_region import OpRegion
from amp_plugin.numerics.op_traits import OpTraits
from amp_plugin.numerics.places import called_from
from amp_plugin.numerics.recorded_run import OpRecord, save_records
from amp_plugin.numerics.tensor_summary import real_values
from amp_plugin.numerics.unwatched import unwatched


class RunRecorder(OpRegion):
    """A region whose results are written to a file when it ends; see ``record_run``.

    Attributes:
        records: what was recorded so far.
    """

    def __init__(self, path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> None:
        self.records: list[OpRecord] = []
        self._path = Path(path)
        self._steps, self._most = _Steps(), steps
        super().__init__(_RecordingMode(ModulePaths(model), self._add), self._steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop recording and write the file, after an error of the program too."""
        super().__exit__(kind, error, traceback)
        save_records(self.records, self._path)

    def _add(self, traits: OpTraits, result: Argument, site: Site, direction: str) -> None:
        if self._steps.taken >= self._most:
            return
        tensor = result.tensor
        record = OpRecord(
            step=self._steps.taken,
            direction=direction,
            module=site.module,
            op=traits.name,
            line=str(site.where.place or ""),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            result=fingerprint(tensor),
        )
        self.records.append(record)


class _Steps:
    """Count the optimizer steps between open and close."""

    def __init__(self) -> None:
        self.taken = 0
        self._hook: RemovableHandle | None = None

    def open(self) -> None:
        self._hook = register_optimizer_step_post_hook(self._count)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _count(self, *_: Any) -> None:
        self.taken += 1


class _RecordingMode(OpMode):  # type: ignore[no-untyped-call]
    """Hand on every result, with the place of its op.

    Args:
        modules: knows which module runs; open.
        add: called with the op, a result, the place and the direction.
    """

    def __init__(self, modules: ModulePaths, add: Callable[[OpTraits, Argument, Site, str], None]) -> None:
        super().__init__(modules)
        self._add = add

    def run_op(self, func: OpOverload, traits: OpTraits, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the op and hand its results on."""
        output = func(*args, **kwargs)
        if traits.is_view or traits.is_unwritten or traits.is_collective:
            return output
        node = torch._C._current_autograd_node()
        site = self.sites.of(node) or Site(traits.name, self.modules.current(), called_from())
        direction = "backward" if runs_backward(node) else "forward"
        with unwatched():
            for result in made_by(traits, arguments_of(traits, args, kwargs), output):
                if real_values(result.tensor) is not None:
                    self._add(traits, result, site, direction)
        return output


def record_run(path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> RunRecorder:
    """Record what each op of a region makes, into a file for ``compare_runs``.

    A few dozen numbers of each result are kept: some 0.5 kB an op.

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
