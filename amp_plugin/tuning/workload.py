"""What is tuned: batches of a step function or of a program, run again from the same state, and its ops."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import Self

from amp_plugin.casting.dispatcher import rules_on_trial
from amp_plugin.casting.op_names import overloads_of, schema_of, written_arguments
from amp_plugin.casting.rules import OpRules
from amp_plugin.program import Program, run_program

Gradients = Mapping[str, Tensor]  # name of a parameter -> its gradient


class Observer(Protocol):
    """Is told of each batch while a workload runs."""

    def begin(self) -> None:
        """A batch begins."""

    def end(self, gradients: Gradients) -> None:
        """A batch has run; its gradients are there until this returns."""


class NoObserver:
    """Looks at no batch."""

    def begin(self) -> None:
        """Do nothing."""

    def end(self, gradients: Gradients) -> None:
        """Do nothing."""


class Workload(Protocol):
    """Batches that can be run as often as wanted, with the same numbers each time."""

    @property
    def batches(self) -> int:
        """The number of batches."""

    @property
    def model(self) -> nn.Module | None:
        """The model that gives ops their module names, if there is one."""

    def run(self, observer: Observer, *, batches: int) -> None:
        """Run the first batches, telling an observer of each."""


class Steps:
    """A step function on batches.

    Args:
        step: runs forward and backward on a batch, in an autocast region without rules of its own; it leaves
            the optimizer out.
        model: whose gradients are compared.
        batches: what ``step`` takes.

    Raises:
        ValueError: there is no batch, or no parameter wants a gradient.
    """

    def __init__(self, step: Callable[[Any], object], model: nn.Module, batches: Sequence[Any]) -> None:
        self._step = step
        self.model: nn.Module = model
        self._batches = list(batches)
        if not self._batches:
            msg = "tune(batches=[]): give at least one batch; two or three tell more"
            raise ValueError(msg)
        if not any(param.requires_grad for param in model.parameters()):
            msg = (
                "tune(model=...): no parameter of the model requires a gradient, so there is none to compare"
            )
            raise ValueError(msg)

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self._batches)

    def run(self, observer: Observer, *, batches: int) -> None:
        """Run the first batches from the state that the model and the generators have now."""
        with _state_kept(self.model), _gradients_kept(self.model):
            versions = {name: param._version for name, param in self.model.named_parameters()}
            for batch in self._batches[:batches]:
                self.model.zero_grad(set_to_none=True)
                observer.begin()
                self._step(batch)
                observer.end(self._gradients(versions))

    def _gradients(self, versions: dict[str, int]) -> dict[str, Tensor]:
        params = dict(self.model.named_parameters())
        changed = [name for name, param in params.items() if param._version != versions[name]]
        if changed:
            msg = f"the step changed the weight {changed[0]}; leave optimizer.step() out of what tune runs"
            raise ValueError(msg)
        gradients = {name: param.grad for name, param in params.items() if param.grad is not None}
        if not gradients:
            msg = "the step gave no parameter a gradient; it has to call backward()"
            raise ValueError(msg)
        return gradients


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Put buffers and random generators back as they were."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    python = random.getstate()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Put the gradients back that were there before."""
    gradients = {param: param.grad for param in model.parameters()}
    try:
        yield
    finally:
        for param, gradient in gradients.items():
            param.grad = gradient


class Enough(BaseException):
    """The backward passes that were wanted have run."""


class Script:
    """A program whose backward passes are the batches.

    It starts anew for each set of rules, with the same seeds, and is ended after the last batch. Optimizers
    step, but their weights are put back, so that all batches see the same ones.

    Args:
        program: a file or a module.
        arguments: its arguments.
        batches: backward passes to run.
    """

    model: nn.Module | None = None

    def __init__(self, program: Program, arguments: Sequence[str], *, batches: int) -> None:
        is_below = ".." not in program.file.parts and not program.file.is_absolute()
        self._program = program if is_below else replace(program, file=program.file.absolute())
        self._arguments = list(arguments)
        self._has_run = False
        self._scratch = ScratchFolder()
        self.batches = batches

    def run(self, observer: Observer, *, batches: int) -> None:
        """Run the program until its first backward passes are done; its output is dropped.

        Raises:
            RuntimeError: it ended before, by itself or by an error.
        """
        random.seed(0)
        torch.manual_seed(0)
        counted = _CountedBackwards(observer, batches)
        expected: tuple[type[BaseException], ...] = (Enough, Exception) if self._has_run else (Enough,)
        quiet = contextlib.redirect_stderr(io.StringIO()) if self._has_run else contextlib.nullcontext()
        with contextlib.redirect_stdout(io.StringIO()), quiet, self._scratch.opened():
            run = run_program(self._program, self._arguments, around=counted, expected=expected)
        if counted.count < batches:
            ended = "an error" if run.failed else f"exit code {run.code}"
            msg = (
                f"{self._program.name} ended with {ended} after {counted.count} backward passes, and "
                f"{batches} are wanted; it must run by itself, and train for as many batches"
            )
            raise RuntimeError(msg)
        self._has_run = True


class ScratchFolder:
    """A copy of the present folder in which trials write: loggers and checkpoints leave nothing behind.

    Small files are copied, large ones and what is in deep folders are linked; what a program writes by an
    absolute
    path is written there.
    """

    _MOST = 2000  # files that are mirrored
    _SMALL = 1_000_000  # bytes of a file that is copied

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Work in a new copy while the block runs."""
        present = Path.cwd()
        with tempfile.TemporaryDirectory(prefix="amp_plugin_tune_") as folder:
            self._mirror(present, Path(folder), [self._MOST])
            os.chdir(folder)
            try:
                yield
            finally:
                os.chdir(present)

    def _mirror(self, source: Path, target: Path, left: list[int]) -> None:
        for entry in source.iterdir():
            left[0] -= 1
            copy = target / entry.name
            is_folder = entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(".")
            if is_folder and left[0] > 0:
                copy.mkdir()
                self._mirror(entry, copy, left)
            elif entry.is_file() and left[0] > 0 and entry.stat().st_size < self._SMALL:
                shutil.copy2(entry, copy)
            else:
                copy.symlink_to(entry)


class _CountedBackwards:
    """A region that tells an observer of each backward pass, and ends the program after the last."""

    def __init__(self, observer: Observer, wanted: int) -> None:
        self.count = 0
        self._observer = observer
        self._wanted = wanted
        self._names: dict[Tensor, str] = {}
        self._is_begun = False
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._opened.enter_context(_weights_held_still())
        for hook in (
            register_module_parameter_registration_hook(self._registered),
            register_module_forward_pre_hook(self._forward),
        ):
            self._opened.callback(hook.remove)
        self._opened.enter_context(_wrapped_backward(self._backward))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()
        self._names.clear()

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            self._names.setdefault(param, f"{type(module).__name__}.{name} (number {len(self._names)})")

    def _forward(self, *_: Any) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._observer.begin()

    def _backward(self) -> None:
        gradients = {name: param.grad for param, name in self._names.items() if param.grad is not None}
        if not gradients:  # of losses that no module's parameter is in
            return
        self._observer.end(gradients)
        self.count, self._is_begun = self.count + 1, False
        if self.count >= self._wanted:
            raise Enough


@contextlib.contextmanager
def _weights_held_still() -> Iterator[None]:
    """Put back what each optimizer step changes in its parameters."""
    before: dict[Optimizer, list[Tensor]] = {}

    def parameters(optimizer: Optimizer) -> list[Tensor]:
        return [param for group in optimizer.param_groups for param in group["params"]]

    def keep(optimizer: Optimizer, *_: Any) -> None:
        before[optimizer] = [param.detach().clone() for param in parameters(optimizer)]

    def restore(optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for param, value in zip(parameters(optimizer), before.pop(optimizer), strict=True):
                param.copy_(value)

    hooks = register_optimizer_step_pre_hook(keep), register_optimizer_step_post_hook(restore)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _wrapped_backward(done: Callable[[], None]) -> Iterator[None]:
    """Call a function after each backward pass of the program, those within one left out."""
    plain = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        is_inner = torch._C._current_graph_task_id() != -1
        plain(*args, **kwargs)
        if not is_inner:
            done()

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain


# Their results are no floating-point numbers, or are what the caller asked for by dtype.
_LEFT_OUT: Final = {
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "argmax", "argmin", "argsort"),
    *("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "all", "any"),
    *("_to_copy", "clone", "item", "is_nonzero", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_full", "bernoulli", "rand_like", "randn_like", "nonzero", "arange"),
}
_NOT_FORWARD: Final = ("autograd::engine", "Optimizer.")


def used_ops(workload: Workload, rules: OpRules) -> list[str]:
    """Run a workload's first batch and return the ops it calls in forward passes, most frequent first.

    An op that another op calls is not listed: autocast looks at the outermost.

    Args:
        workload: what runs.
        rules: which it runs by.

    Returns:
        Names without overload, ``"aten::layer_norm"``, of ops that make new floating-point tensors.
    """
    profiled = profile()
    with rules_on_trial(rules):
        with _without_standard_error():
            profiled.__enter__()  # type: ignore[no-untyped-call]
        try:
            workload.run(NoObserver(), batches=1)
        finally:
            with _without_standard_error():
                profiled.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    counts: dict[str, int] = {}
    for event in profiled.function_events or []:
        if _is_outermost(event):
            counts[event.name] = counts.get(event.name, 0) + 1
    return sorted((op for op in counts if _may_have_rule(op)), key=lambda op: -counts[op])


@contextmanager
def _without_standard_error() -> Iterator[None]:
    """Drop what C++ writes to standard error: the profiler of torch 2.13 tells of each start and stop."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _is_outermost(event: FunctionEvent) -> bool:
    """Whether an event is an op of a forward pass that no other op has called."""
    parent = event.cpu_parent
    while parent is not None:
        if "::" in parent.name or parent.name.startswith(_NOT_FORWARD):
            return False
        parent = parent.cpu_parent
    return "::" in event.name and not event.name.startswith(_NOT_FORWARD)


def _may_have_rule(op: str) -> bool:
    if op.partition("::")[2] in _LEFT_OUT:
        return False
    try:
        overloads = overloads_of(op)
    except ValueError:  # written in place, or no op of the dispatcher
        return False
    return any(_makes_new_tensors(full) for full in overloads)


def _makes_new_tensors(full: str) -> bool:
    schema = schema_of(full)
    tensor = torch._C.TensorType.get()
    returned = [returns for returns in schema.returns if returns.type.isSubtypeOf(tensor)]
    given = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    is_view = any(returns.alias_info is not None for returns in schema.returns)
    return (
        bool(returned and given)
        and not is_view
        and not written_arguments(full) - {"running_mean", "running_var"}
    )
