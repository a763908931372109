"""Shapes of public training loops that the rules were wrong about once, or did not see; each with its opposite."""

from __future__ import annotations

from pathlib import Path

import pytest

from amp_plugin.check.checker import check_source
from amp_plugin.check.settings import Settings
from amp_plugin.check.sources import Source
from tests.check.test_rules import codes

OLD_NAME = "from torch.cuda.amp import GradScaler"
SWITCHED = """
import torch
scaler = torch.amp.GradScaler("cuda", enabled=half)
def train(data, half, other):
    for batch in data:
        with torch.autocast("cuda", enabled=half):
            loss = model(batch)
            if TEST:
                scaler.scale(loss.detach())
            else:
                loss.backward()
"""
EACH_EPOCH = """
import torch
def train(model, optimizer, data):
    MADE
    for batch in data:
        scaler.scale(model(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
def main(model, optimizer, data, scaler):
    for epoch in range(9):
        train(model, optimizer, data)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
BF16 = """
import torch
scaler = torch.amp.GradScaler("cuda", enabled=args.mixed)
for batch in data:
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.OTHER):
        loss = model(batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
TWO_WAYS = """
import torch
scaler = torch.amp.GradScaler("cuda")
for batch in data:
    loss = model(batch)
    if mixed:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
    AFTER
"""
SAVED = """
import torch
def train(model, optimizer, data, scaler):
    for batch in data:
        scaler.scale(model(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
SAVE
"""
BY_ITEM = """def save(model, optimizer=None):
    states = {"model": model.state_dict()}
    if optimizer is not None:
        states["KEY"] = VALUE.state_dict()
    torch.save(states, "last.pt")"""
NAMED = """def save(model, optimizer):
    states = optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": states}, "last.pt")"""
RETURNED = """class Loop:
    def NAME(self):
        states = {}
        states["model"] = self.model.state_dict()
        states["optimizer"] = self.optimizer.state_dict()
        return states"""
WRAPPED = """class Clipped:
    def state_dict(self):
        return {"inner": self.optimizer.state_dict(), "steps": self.steps}"""
ACCELERATE = """
import torch
from accelerate import Accelerator
def train(model, data, make):
    accelerator = Accelerator(OPTIONS)
    optimizer, scheduler = make(model)
    PREPARE
    for batch in data:
        loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        STEP
        optimizer.zero_grad()
"""
PREPARE = "model, optimizer, data = accelerator.prepare(model, optimizer, data)"
PREPARE_ALL = PREPARE.replace("optimizer", "optimizer, scheduler")
PREPARE_LATER = (
    "parts = accelerator.prepare(model, optimizer, scheduler)\n    model, optimizer, scheduler = parts"
)
METHODS = """
import torch
class Loop:
    def update(self, loss, number=0):
        self.scaler.scale(loss).backward()
        BEFOREself.scaler.step(self.optimizer)
        self.scaler.update()
    def epoch(self):
        for batch in self.data:
            self.update(self.model(batch))
    def run(self):
        for batch in self.data:
            self.CALL
            self.next_rate()
    def next_rate(self):
        self.scheduler.step()
"""
WINDOWS = """
import torch
scaler = torch.amp.GradScaler("cuda")
for number, batch in enumerate(data):
    scaler.scale(judge(batch)).backward()
    if WHEN:
        scaler.step(first)
        FIRST
        first.zero_grad()
    if SECOND:
        scaler.scale(painter(batch)).backward()
    if number % 4 == 3:
        scaler.step(second)
        scaler.update()
        second.zero_grad()
"""


def change(text: str, **words: str) -> str:
    """Return a text with each word in capitals replaced."""
    for word, new in words.items():
        text = text.replace(word, new)
    return text


PROGRAMS = {
    "a backward pass where the region is off": (change(SWITCHED, TEST="half"), []),
    "a backward pass on another condition": (change(SWITCHED, TEST="other"), ["AMP008"]),
    "the scaler is new in each epoch": (change(EACH_EPOCH, MADE='scaler = torch.amp.GradScaler("cuda")'), []),
    "the scaler lives longer than an epoch": (change(EACH_EPOCH, MADE="global scaler"), ["AMP015"]),
    "an old name, and a class in its place": (f"try:\n    {OLD_NAME}\nexcept ImportError:\n    class GradScaler:\n        pass\n", ["AMP013"]),
    "an old name, and the new one": (f"try:\n    from torch.amp import GradScaler\nexcept ImportError:\n    {OLD_NAME}\n", []),
    "an old name, and the new one of torch itself": (f"try:\n    from torch import GradScaler\nexcept ImportError:\n    {OLD_NAME}\n", []),
    "an old name in a run that logs its errors": ("import torch\ntry:\n    with torch.cuda.amp.autocast():\n        model(batch)\nexcept Exception as error:\n    log(error)\n", ["AMP013"]),
    "a scaler on the switch of its bfloat16 regions": (change(BF16, OTHER="mixed"), ["AMP012"]),
    "a scaler on another switch": (change(BF16, OTHER="bf16"), []),
    "a step for both ways, after the scaler's own": (change(TWO_WAYS, AFTER="optimizer.step()"), ["AMP002"]),
    "a step for the other way": (change(TWO_WAYS, AFTER="if not mixed:\n        optimizer.step()"), []),
    "a step of a second loss": (change(TWO_WAYS, AFTER="optimizer.zero_grad()\n    penalty(model).backward()\n    optimizer.step()"), []),
    "a step of another optimizer": (change(TWO_WAYS, AFTER="average.step()"), []),
    "a checkpoint is filled item by item": (change(SAVED, SAVE=change(BY_ITEM, KEY="optimizer", VALUE="optimizer")), ["AMP015"]),
    "a checkpoint of states that have names": (change(SAVED, SAVE=NAMED), ["AMP015"]),
    "a checkpoint is filled with other items": (change(SAVED, SAVE=change(BY_ITEM, KEY="average", VALUE="average")), []),
    "a method returns the checkpoint": (change(SAVED, SAVE=change(RETURNED, NAME="_state_dict")), ["AMP015"]),
    "a method returns something else": (change(SAVED, SAVE=change(RETURNED, NAME="summary")), []),
    "an optimizer around an optimizer": (change(SAVED, SAVE=WRAPPED), []),
    "a scheduler that Accelerate does not know": (change(ACCELERATE, OPTIONS="", PREPARE=PREPARE, STEP="scheduler.step()"), ["AMP016"]),
    "a scheduler that Accelerate prepares": (change(ACCELERATE, OPTIONS="", PREPARE=PREPARE_ALL, STEP="scheduler.step()"), []),
    "a scheduler among prepared parts": (change(ACCELERATE, OPTIONS="", PREPARE=PREPARE_LATER, STEP="scheduler.step()"), []),
    "a scheduler in bf16": (change(ACCELERATE, OPTIONS="mixed_precision='bf16'", PREPARE=PREPARE, STEP="scheduler.step()"), []),
    "a scheduler that asks Accelerate": (change(ACCELERATE, OPTIONS="", PREPARE=PREPARE, STEP="if not accelerator.optimizer_step_was_skipped:\n            scheduler.step()"), []),
    "a scheduler's step in another method": (change(METHODS, BEFORE="", CALL="update(loss)"), ["AMP016"]),
    "a scheduler's step after each epoch": (change(METHODS, BEFORE="", CALL="epoch()"), []),
    "a scheduler's step beside a window": (change(METHODS, BEFORE="if number % 4 != 3:\n            return\n        ", CALL="update(loss, number)"), []),
    "an update inside another optimizer's window": (change(WINDOWS, FIRST="scaler.update()", SECOND="True", WHEN="number % 4 == 3"), ["AMP006"]),
    "an update at the end of both windows": (change(WINDOWS, FIRST="pass", SECOND="True", WHEN="number % 4 == 3"), []),
    "an update in each iteration of another optimizer's window": (change(WINDOWS, FIRST="scaler.update()", SECOND="True", WHEN="True"), ["AMP006"]),
    "two windows of different lengths": (change(WINDOWS, FIRST="scaler.update()", SECOND="True", WHEN="number % 2 == 1"), []),
    "gradients that are cleared in each iteration": (change(WINDOWS, FIRST="scaler.update()", SECOND="second.zero_grad() is None", WHEN="True"), []),
    "two optimizers, one of them without a window": (change(WINDOWS, FIRST="scaler.update()", SECOND="number % 4 == 3", WHEN="number % 2 == 1"), []),
    "two packages of one name": ("from apex import amp\nimport torch.cuda.amp as amp\nscaler = amp.GradScaler()\n", ["AMP013"]),
    "a package in reserve": ("import torch.cuda.amp as amp\nfrom apex import amp\nscaler = amp.GradScaler()\n", []),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_found_or_left_alone(name):
    text, expected = PROGRAMS[name]
    assert codes(text) == expected


def test_the_text_says_once_what_to_do():
    text = change(ACCELERATE, OPTIONS="", PREPARE=PREPARE, STEP="scheduler.step()")
    source = Source(Path("program.py"), text, tuple(text.split("\n")))
    (found,) = check_source(source, Settings())
    assert found.text == (
        "the learning rate scheduler advances although Accelerate may have skipped the step; pass the "
        "scheduler to prepare(), or step it only if accelerator.optimizer_step_was_skipped is False"
    )
