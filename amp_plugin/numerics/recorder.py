"""Record what each op of a region makes, to compare it with another run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from amp_plugin.casting.autocast_kernels import KERNELS
from amp_plugin.numerics.fingerprint import fingerprint
from amp_plugin.numerics.forward_sites import ForwardSites, Site
from amp_plugin.numerics.module_paths import ModulePaths
from amp_plugin.numerics.op_call import Argument, arguments_of, results_of
from amp_plugin.numerics.op_traits import OpTraits, traits_of
from amp_plugin.numerics.places import called_from
from amp_plugin.numerics.recorded_run import OpRecord, save_records
from amp_plugin.numerics.tensor_summary import real_values
from amp_plugin.numerics.unwatched import unwatched

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class RunRecorder:
    """A region whose results are written to a file when it ends; see ``record_run``.

    Attributes:
        records: what was recorded so far.
    """

    def __init__(self, path: str | Path, model: nn.Module | None = None, *, steps: int = 10) -> None:
        self.records: list[OpRecord] = []
        self._path = Path(path)
        self._steps, self._most = 0, steps
        self._modules = ModulePaths(model)
        self._mode = _RecordingMode(self._modules, self._add)
        self._hook: RemovableHandle | None = None
        self._stance = torch.compiler.set_stance("default")

    def __enter__(self) -> Self:
        """Start recording; compiled functions run eagerly meanwhile."""
        KERNELS.install()
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._modules.open()
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop recording and write the file, after an error of the program too."""
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._modules.close()
        if self._hook is not None:
            self._hook.remove()
        self._stance.__exit__(kind, error, traceback)
        save_records(self.records, self._path)

    def _stepped(self, *_: Any) -> None:
        self._steps += 1

    def _add(self, traits: OpTraits, result: Argument, site: Site, direction: str) -> None:
        if self._steps >= self._most:
            return
        tensor = result.tensor
        record = OpRecord(
            step=self._steps,
            direction=direction,
            module=site.module,
            op=traits.name,
            line=str(site.where.place or ""),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            result=fingerprint(tensor),
        )
        self.records.append(record)


class _RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hand on every result, with the place of its op.

    Args:
        modules: knows which module runs; open.
        add: called with the op, a result, the place and the direction.
    """

    def __init__(self, modules: ModulePaths, add: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules, self._add, self._sites = modules, add, ForwardSites()

    def __enter__(self) -> Self:
        self._sites.open()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op and hand its results on."""
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        traits = traits_of(func)
        if torch.is_grad_enabled():
            self._sites.note(traits.name, self._modules.current())
        output = func(*args, **kwargs)
        if traits.is_view or traits.is_unwritten or traits.is_collective:
            return output
        node = torch._C._current_autograd_node()
        forward = self._sites.of(node) if node is not None else None
        site = forward or Site(traits.name, self._modules.current(), called_from())
        direction = "backward" if node is not None and not torch.is_grad_enabled() else "forward"
        with unwatched():
            written = [a for a in arguments_of(traits, args, kwargs) if a.name in traits.written]
            known = {id(argument.tensor) for argument in written}
            for result in [*written, *(r for r in results_of(output) if id(r.tensor) not in known)]:
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
