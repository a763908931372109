"""The runner of the library of broken and healthy programs.

A broken program is a function with one argument, ``fix``, under ``@broken``. Called with a false ``fix`` it fails; the line
that is to be named ends in ``# <-`` (none where no single line is to blame). Called with a true one it is cured as the
finding's advice says: either by hand, in an ``if fix:``, or by the lines that the finding prints, pasted by ``fix(model)``
right after the model is made (``cure="paste"``).

A healthy program is a public function without arguments in a file that ends in ``healthy(globals())``, or a loss in
``healthy_losses``: it looks odd and nothing is to be found.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import amp_plugin
from amp_plugin.numerics.finding import NonFiniteError

BROKEN: list[Program] = []
HEALTHY: list[Callable[[], object]] = []


@dataclass(frozen=True)
class Program:
    """A broken program and what is true of it."""

    run: Callable[[Fix], object]
    cause: str
    op: str
    cure: str

    @property
    def line(self) -> int | None:
        lines, first = inspect.getsourcelines(self.run)
        marked = [first + index for index, text in enumerate(lines) if text.rstrip().endswith("# <-")]
        return marked[0] if marked else None


@dataclass
class Fix:
    """Whether the suggested lines are used in a program, and these lines."""

    wanted: bool = False
    code: str = ""

    def __bool__(self) -> bool:
        return self.wanted

    def __call__(self, model: nn.Module | None = None) -> None:
        if self.code:
            exec(self.code, {"model": model, "torch": torch})


def broken(cause: str, *, op: str = "", cure: str):
    """Register a broken program: its cause, the plain name of the op to name, and what the advice has to say.

    Args:
        cause: ``Finding.cause``.
        op: a regular expression that the op's name matches; empty where none is to blame.
        cure: a regular expression that the advice matches, or ``"paste"``.
    """

    def register(run):
        BROKEN.append(Program(run, cause, op, cure))
        return run

    return register


def healthy(module: dict[str, object]) -> None:
    """Register the public functions of a module that take no arguments."""
    for name, run in module.items():
        is_own = inspect.isfunction(run) and run.__module__ == module["__name__"]
        if is_own and not name.startswith("_") and not inspect.signature(run).parameters:
            HEALTHY.append(run)


def healthy_losses(losses: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Register healthy programs that are a backward pass each, by name."""
    for name, loss in losses.items():

        def run(loss=loss):
            loss().sum().backward()

        run.__name__ = name
        HEALTHY.append(run)


FP16 = {"device_type": "cpu", "dtype": torch.float16}


def train(model: nn.Module, loss_of, batches, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Take a step for each batch."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(*batch).backward()
        optimizer.step()


def train_in(block, loss_of, optimizer: torch.optim.Optimizer, scaler=None, *, steps: int) -> None:
    """Take steps whose losses are computed in an autocast block."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(**block):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def findings_of(run: Callable[[], object]) -> list:
    """Run a program under diagnose as the command does, and return what it found."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(NonFiniteError), amp_plugin.diagnose() as diagnosis:
            run()
    return diagnosis.findings


def wrong_verdict(program: Program) -> str:
    """Return what is wrong with the finding about a broken program, or "" if nothing is."""
    found = findings_of(lambda: program.run(Fix()))
    if not found:
        return "nothing was found"
    finding = found[0]
    wrong = []
    if finding.cause != program.cause:
        wrong.append(f"cause {finding.cause!r}, not {program.cause!r}")
    if not re.search(program.op, f"{finding.op} {finding.forward_op}"):
        wrong.append(f"op {finding.op}, not {program.op}")
    lines = [place.line for place in (finding.place, finding.caller) if place is not None]
    if program.line is not None and program.line not in lines:
        wrong.append(f"lines {lines}, not {program.line}")
    return "; ".join(wrong)


def wrong_cure(program: Program) -> str:
    """Return why the cure that a finding names does not work, or "" if it works."""
    found = findings_of(lambda: program.run(Fix()))
    if not found:
        return "nothing was found"
    finding = found[0]
    if program.cure == "paste":
        if not finding.cures:
            return f"nothing to paste: {finding.advice}"
        codes = [cure.code for cure in finding.cures]
    else:
        if finding.cures:
            return f"lines to paste though they do not help: {finding.cures[0].code}"
        if not re.search(program.cure, finding.advice):
            return f"advice: {finding.advice}"
        codes = [""]
    for code in codes:
        try:
            left = findings_of(lambda code=code: program.run(Fix(wanted=True, code=code)))
        finally:
            amp_plugin.set_default_rules(None)
        if left:
            return f"cured by {code!r} it still has: {left[0].headline}"
    return ""
