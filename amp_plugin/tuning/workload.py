"""Run the batches of a step function or program repeatedly, for a search over op rules.

Each run starts from the same weights and random states.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

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

from amp_plugin.casting.bound_rules import ours_by_default
from amp_plugin.casting.op_names import overloads_of, schema_of, written_arguments
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.rules_in_force import rules_on_trial
from amp_plugin.numerics.modules import buffers_kept
from amp_plugin.patches import replaced
from amp_plugin.program import Program, main_restored, run_program
from amp_plugin.scaling.gradients import params_of
from amp_plugin.tuning.folder_copy import FolderCopy
from amp_plugin.tuning.model_call import Step, model_calls

Gradients = Mapping[str, Tensor]  # maps the name of a parameter to its gradient
# A function that is called after each batch, with the gradients and the time in seconds.
OnBatch = Callable[[Gradients, float], None]


class StepFunction:
    """A step function and its batches."""

    def __init__(self, step: Callable[[Any], object], model: nn.Module, batches: Sequence[Any]) -> None:
        self._step, self._inputs, self.model = step, list(batches), model
        if not self._inputs:
            msg = "tune(batches=[]): give at least one batch; two or three make the result more reliable"
            raise ValueError(msg)

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self._inputs)

    def run(self, on_batch: OnBatch, *, batches: int) -> None:
        """Run the first batches, starting from the current weights, buffers and random states."""
        params = dict(self.model.named_parameters())
        versions = {name: param._version for name, param in params.items()}
        with _state_kept(self.model):
            for batch in self._inputs[:batches]:
                self.model.zero_grad(set_to_none=True)
                started = time.perf_counter()
                self._step(batch)
                gradients, msg = _gradients(params), ""
                taken = time.perf_counter() - started
                if changed := [name for name, p in params.items() if p._version != versions[name]]:
                    msg = f"the step changed the weight {changed[0]}; leave out optimizer.step()"
                elif not gradients:
                    msg = "the step gave no parameter a gradient; it has to call backward()"
                if msg:
                    raise ValueError(msg)
                on_batch(gradients, taken)


def _gradients(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wait for the device, and return the gradients of all parameters that have a gradient."""
    gradients = {name: param.grad for name, param in params.items() if param.grad is not None}
    for device in {grad.device for grad in gradients.values() if grad.is_cuda}:
        torch.cuda.synchronize(device)
    return gradients


@contextmanager
def _gradients_set_aside(params: Iterable[Tensor]) -> Iterator[None]:
    """Set all gradients to None inside a ``with`` block, and restore the gradients afterwards."""
    before = [(param, param.grad) for param in params]
    for param, _ in before:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in before:
            param.grad = grad


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, the gradients and the random number generators after a ``with`` block."""
    python = random.getstate()
    with torch.random.fork_rng(), buffers_kept(model), _gradients_set_aside(model.parameters()):
        try:
            yield
        finally:
            random.setstate(python)


class Script:
    """A program as a workload, in which each backward pass counts as one batch.

    For each set of rules, the program runs from its start, with the same seeds, up to the last batch. The
    program runs in a copy of the working directory, so that its loggers and checkpoints overwrite no files.
    Optimizers step, but the weights are restored after each step, so that all batches see the same weights.
    """

    model = None  # a program does not say which of its modules is the model

    def __init__(self, program: Program, arguments: Sequence[str], *, batches: int) -> None:
        file, present = Path(os.path.normpath(program.file.absolute())), Path.cwd()
        is_below = program.module is None and file.is_relative_to(present)
        self._program = replace(program, file=file.relative_to(present) if is_below else file)
        self._arguments = list(arguments)
        self._folder = FolderCopy(present)
        self._has_run = False
        self.batches = batches

    def run(self, on_batch: OnBatch, *, batches: int) -> None:
        """Run the program until its first ``batches`` backward passes are done. Its output is dropped."""
        count = 0

        def counted(gradients: Gradients, seconds: float) -> None:
            nonlocal count
            if count < batches:
                on_batch(gradients, seconds)
                count += 1
            if count >= batches:
                sys.exit()  # end the program as if it had called sys.exit() itself

        ended = self._run_quietly(_batches_followed(counted))
        if count < batches:
            msg = (
                f"{self._program.name} ended with {ended} after {count} backward passes, but {batches} "
                "are needed; check that it runs without tune and calls backward(), or set another "
                "number with --batches"
            )
            raise RuntimeError(msg)
        self._has_run = True

    def first_call(self) -> tuple[nn.Module, Step]:
        """Run the program until a model, with gradients enabled, has computed logits from token ids.

        Return the model, and a function that repeats the call with other token ids.
        """
        calls: list[tuple[nn.Module, Step]] = []
        ended = self._run_quietly(model_calls(lambda *call: calls.append(call)))
        if not calls:
            msg = (
                f"{self._program.name} ended with {ended}, and no module had returned logits of shape "
                "(sequences, longest, vocabulary) for token ids of shape (sequences, longest) while "
                "gradients were on; write a step that does, and call amp_plugin.tune(step, goal=Gap(rollout))"
            )
            raise RuntimeError(msg)
        return calls[0]

    def _run_quietly(self, around: AbstractContextManager[object]) -> str:
        """Run the program in the copy of the folder, and return a string that says how it ended.

        The output of the program is dropped.
        """
        random.seed(0)
        torch.manual_seed(0)
        expected = (Exception,) if self._has_run else ()
        quiet = contextlib.redirect_stderr(io.StringIO()) if self._has_run else contextlib.nullcontext()
        with (
            contextlib.redirect_stdout(io.StringIO()),
            quiet,
            self._folder.entered(),
            main_restored(),
            ours_by_default(),
        ):
            code, failed = run_program(self._program, self._arguments, around=around, expected=expected)
        return "an error" if failed else f"exit code {code}"

    def close(self) -> None:
        """Remove the copy of the folder."""
        self._folder.close()


Workload = StepFunction | Script
"""Batches that can run many times and give the same results each time."""


@contextmanager
def _batches_followed(on_batch: OnBatch) -> Iterator[None]:
    """Call a function after each backward pass that computes gradients of parameters.

    Weights are restored after each optimizer step.
    """
    names: dict[Tensor, str] = {}
    begun: list[float] = []  # the time at which the first module was called in this batch
    plain = torch.autograd.backward

    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            names.setdefault(param, f"{type(module).__name__}.{name} (number {len(names)})")

    def called(module: nn.Module, *_: Any) -> None:
        if not begun:
            # The registration hook does not run if a module is created by copy.deepcopy.
            for name, param in module.named_parameters():
                registered(module, name, param)
            begun.append(time.perf_counter())

    def backward(*args: Any, **kwargs: Any) -> None:
        is_inner = torch._C._current_graph_task_id() != -1
        plain(*args, **kwargs)
        gradients = {} if is_inner else _gradients({name: param for param, name in names.items()})
        if gradients:  # no gradients exist if the loss depends on no parameter
            now = time.perf_counter()
            on_batch(gradients, now - (begun.pop() if begun else now))

    with ExitStack() as stack, replaced(torch.autograd, "backward", backward):
        stack.callback(register_module_parameter_registration_hook(registered).remove)
        stack.callback(register_module_forward_pre_hook(called).remove)
        _hold_weights_still(stack)
        yield


def _hold_weights_still(stack: ExitStack) -> None:
    """Restore the parameters after each optimizer step, until ``stack`` is closed."""
    before: dict[Optimizer, dict[Tensor, Tensor]] = {}

    def keep(optimizer: Optimizer, *_: Any) -> None:
        before[optimizer] = {param: param.detach().clone() for param in params_of(optimizer)}

    def restore(optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for param, value in before.pop(optimizer).items():
                param.copy_(value)

    stack.callback(register_optimizer_step_pre_hook(keep).remove)
    stack.callback(register_optimizer_step_post_hook(restore).remove)


# Ops that return no floating-point tensors, or whose output dtype the caller chooses.
_LEFT_OUT: Final = {
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "argmax", "argmin", "argsort"),
    *("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "all", "any"),
    *("_to_copy", "clone", "item", "is_nonzero", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_full", "bernoulli", "rand_like", "randn_like", "nonzero", "arange"),
}
_NOT_FORWARD: Final = ("autograd::engine", "Optimizer.")


def used_ops(run: Callable[[], object], rules: OpRules) -> list[str]:
    """Run a function under op rules, and return the ops that its forward pass calls.

    Ops that other ops call are left out. The most frequent op comes first.
    """
    with rules_on_trial(rules), profile() as profiled:
        run()
    counts = Counter(event.name for event in profiled.function_events or [] if _is_outermost(event))
    return [op for op, _ in counts.most_common() if _may_have_rule(op)]


def _is_outermost(event: FunctionEvent) -> bool:
    """Return whether a profiler event is a top-level op of the forward pass, not called by another op."""
    parent = event.cpu_parent
    while parent is not None:
        if "::" in parent.name or parent.name.startswith(_NOT_FORWARD):
            return False
        parent = parent.cpu_parent
    return "::" in event.name and not event.name.startswith(_NOT_FORWARD)


def _may_have_rule(op: str) -> bool:
    try:
        overloads = overloads_of(op)
    except ValueError:  # the op works in place, or the dispatcher has no op of this name
        return False
    return op.partition("::")[2] not in _LEFT_OUT and any(map(_makes_new_tensors, overloads))


def _makes_new_tensors(full: str) -> bool:
    schema, tensor = schema_of(full), torch._C.TensorType.get()
    makes = any(returns.type.isSubtypeOf(tensor) for returns in schema.returns)
    is_given = any("Tensor" in str(argument.type) for argument in schema.arguments)
    is_view = any(returns.alias_info is not None for returns in schema.returns)
    writes = written_arguments(full) - {"running_mean", "running_var"}
    return makes and is_given and not is_view and not writes
