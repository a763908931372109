"""The flight recorder: keeps the last window's batches, and runs a step that went wrong again under diagnose.

docs/run_page.md says which steps are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from amp_plugin.casting.region import call_in
from amp_plugin.casting.threads import RegionState, current_state
from amp_plugin.numerics.diagnose import Diagnosis, diagnosed
from amp_plugin.numerics.finding import Finding
from amp_plugin.numerics.modules import buffers_kept
from amp_plugin.numerics.places import Place, called_from
from amp_plugin.scaling.replay import Replay, explain
from amp_plugin.scaling.step_log import LoggedStep, StepLog

_MOST_LOOKS: Final = 5, 20  # at steps of one run, each as long as many steps; of the quiet ones more
_MOST_OTHERS: Final = 20  # steps of other optimizers during a watch: its own may step no more

Found = Callable[[Sequence[Finding], str], None]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of the model in training that can be run again, back to its parameters."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    regions: tuple[RegionState, ...]
    place: Place | None  # the line that called it

    def __call__(self) -> None:
        """Run it again, and its backward pass with gradients of 0, which a pole makes nan."""
        output = call_in([state.region() for state in self.regions], self.model, self.args, self.kwargs)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(results, [torch.zeros_like(result) for result in results])


class FlightRecorder:
    """Keeps what the last window needs to be run again, and looks at the steps that are skipped."""

    def __init__(self, log: StepLog, model: nn.Module, found: Found, *, watches: bool) -> None:
        self._log, self._model, self._found, self._watches = log, model, found, watches
        # A watch, the step before it, and whether it is quiet: the loss scale may have been all.
        self._watching: tuple[Diagnosis, LoggedStep, bool] | None = None
        self._looks, self._others = [0, 0], 0  # others: steps of other optimizers during a watch
        self.unseen = 0  # steps without a call of the model, as if compiled whole
        self._worked = 0.0  # the loss scale of the last step that was taken
        self._patience = 1  # skips of a row until the loss scale does not explain them
        self._was_wrong = self._is_explained = False

    def open(self, stack: ExitStack) -> None:
        """Keep windows until the stack is closed."""
        log = self._log
        stack.callback(log.calls.clear)
        stack.callback(setattr, log, "exact", log.exact)
        stack.callback(setattr, log, "keeps_window", False)
        log.keeps_window = log.exact = True
        hook = self._model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        stack.callback(hook.remove)
        stack.callback(self._end_watch)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Remember a call of the model where the program records nothing itself."""
        watched = module.training and torch.is_grad_enabled() and not is_compiling()
        in_backward = torch._C._current_graph_task_id() != -1  # checkpoint's recomputation
        if watched and not in_backward and not self._log.replaying and not self._is_recorded():
            self._log.remember(ModelCall(module, args, kwargs, current_state(), called_from()[0]))

    def _is_recorded(self) -> bool:
        """Return whether the program itself says how this window is run again."""
        return any(not isinstance(recorded.call, ModelCall) for recorded in self._log.calls)

    def look(self, step: LoggedStep, *, is_wrong: bool) -> None:
        """Look at a step: run it again if it went wrong and the loss scale alone does not explain that."""
        self._end_watch(step)
        self.unseen += not self._log.calls
        result, was_wrong, self._was_wrong = step.result, self._was_wrong, is_wrong
        if not (is_wrong or result.skipped):
            self._is_explained, self._worked = False, result.scale_before
            return
        if step.in_a_row == 1:
            has_worked = result.scale_before <= self._worked
            self._patience = 1 if not result.is_scaled else 2 if has_worked else 3
        alone = ranks() == 1  # else all run it again or none: by what every rank knows of the step
        is_new = alone and is_wrong and not was_wrong
        is_quiet = step.in_a_row < self._patience and not is_new
        lasts = is_new or step.in_a_row == self._patience - is_quiet
        has_nan = step.in_a_row == 1 and result.norm is not None and bool(result.norm.isnan())
        is_over = alone and (self._is_explained or self._watching is not None)
        if not (lasts or has_nan) or is_over or self._looks[is_quiet] == _MOST_LOOKS[is_quiet]:
            return
        self._looks[is_quiet] += 1
        explained = self._explained(step) if has_nan or not is_quiet else None
        findings, how = explained or ((), "")
        if is_quiet and all(finding.blames_scale for finding in findings):
            findings = ()
        if findings or (self._is_recorded() and not is_quiet):
            self._tell(findings, how)
        elif self._watches and lasts and not self._is_recorded():
            self._watching = Diagnosis(self._model, keep_going=True, patience=1), step, is_quiet
            self._watching[0].__enter__()
        elif not self._watches:
            self._is_explained = True  # the weights are lost from now on
            self._found((), "The model's calls ran again and were sound: amp-plugin diagnose watches all.")

    def _explained(self, step: LoggedStep) -> tuple[Sequence[Finding], str] | None:
        with buffers_kept(self._model):
            return explain(self._log, step, self._run_again, list(self._model.parameters()))

    def _run_again(self, replay: Replay) -> tuple[Sequence[Finding], str]:
        diagnosis, failed = diagnosed(replay.run, self._model)
        how = f"The step was run again{f'; then it raised {failed}' if failed else ''}."
        call = replay.calls[0].call
        findings: Sequence[Finding] = diagnosis.findings
        if isinstance(call, ModelCall) and call.place:  # the line that has stepped called all that ran again
            findings = [_placed(finding, called_from()[0], call.place) for finding in findings]
        return findings, how if findings else f"{how} {diagnosis.report()}"

    def _end_watch(self, step: LoggedStep | None = None) -> None:
        """End the watch at the next step of its optimizer, after many of others, or at the end of the run."""
        if self._watching is None:
            return
        diagnosis, after, is_quiet = self._watching
        if step and step.optimizer() is not after.optimizer() and ranks() == 1:
            step, self._others = None, self._others + 1
            if self._others < _MOST_OTHERS:
                return
        self._watching, self._others = None, 0
        diagnosis.__exit__(None, None, None)
        findings = diagnosis.findings
        if is_quiet and not (findings and step and step.result.skipped):
            return
        how = "The next step was watched." if findings or step else "No step followed that could be watched:"
        nothing = " Nothing like it was found:" * bool(step) + " record it with scaler.recorded(call, batch)."
        self._tell(findings, how + ("" if findings else nothing))

    def _tell(self, findings: Sequence[Finding], how: str) -> None:
        self._is_explained = self._is_explained or bool(findings)
        self._found(findings, how)


def ranks() -> int:
    """Return how many processes train together."""
    joined = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if joined else 1


def _placed(finding: Finding, stepped: Place | None, called: Place) -> Finding:
    """Return a finding with the line that called the model in place of the one that has stepped."""
    lines: dict[str, Any] = {
        name: called for name in ("place", "caller") if getattr(finding, name) == stepped
    }
    return replace(finding, **lines)
