"""The runner for the library of broken and healthy programs.

A broken program is a function under ``@broken`` with one argument, ``fix``. If ``fix`` is false, the program
fails. The line that the finding must name ends in ``# <-``; there is none if no single line is to blame. If
``fix`` is true, the program is cured as the finding advises. The cure is either written in an ``if fix:``, or
it is the lines that the finding prints, which ``fix(model)`` pastes right after the model is made
(``cure="paste"``).

A healthy program is a public function without arguments in a file that ends in ``healthy(globals())``, or a
loss in ``healthy_losses``. It looks odd, and no finding may come.
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
    """A broken program and the true facts about it."""

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
    """The suggested lines, and whether the program uses them."""

    wanted: bool = False
    code: str = ""

    def __bool__(self) -> bool:
        return self.wanted

    def __call__(self, model: nn.Module | None = None) -> None:
        if self.code:
            exec(self.code, {"model": model, "torch": torch})


def broken(cause: str, *, op: str = "", cure: str):
    """Register a broken program: its cause, the name of the op to blame, and what the advice must say.

    Args:
        cause: ``Finding.cause``.
        op: A regular expression that matches the op's name; empty if no op is to blame.
        cure: A regular expression that matches the advice, or ``"paste"``.
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
    """Register healthy programs by name. Each is the backward pass of one loss."""
    for name, loss in losses.items():

        def run(loss=loss):
            loss().sum().backward()

        run.__name__ = name
        HEALTHY.append(run)


FP16 = {"device_type": "cpu", "dtype": torch.float16}


def train(model: nn.Module, loss_of, batches, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Take one step for each batch."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(*batch).backward()
        optimizer.step()


def train_in(block, loss_of, optimizer: torch.optim.Optimizer, scaler=None, *, steps: int) -> None:
    """Take steps whose losses are computed inside an autocast block."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(**block):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def findings_of(run: Callable[[], object]) -> list:
    """Run a program under diagnose as the command does. Return the findings."""
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
    """Return why the cure that a finding names does not work, or "" if it does."""
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
