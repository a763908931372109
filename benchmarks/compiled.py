"""Time amp_plugin and torch under torch.compile, in autocast regions and in a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from amp_plugin import GradScaler, OpRules, autocast
from benchmarks.autocast import BF16, torch_region
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.models import GPT, launch_bound_gpt
from benchmarks.setting import Section, Setting

Region = Callable[[], AbstractContextManager[object]]
MAX_NORM = 0.1


class Compiled(Section):
    """Time a compiled GPT under amp_plugin.autocast and torch.autocast, and a compiled training step."""

    key = "compiled"

    def comparisons(self, setting: Setting) -> Iterator[Comparison]:
        """Time a compiled model with an autocast region around or inside it, then a whole training step."""
        own = OpRules.default(setting.device).with_rule("aten::softmax.int", "fp32")
        regions: dict[str, Region] = {
            "default rules": lambda: autocast(setting.device, BF16),
            "own rules": lambda: autocast(setting.device, BF16, rules=own),
        }
        for rules, ours in regions.items():
            for inside in (False, True):
                yield forward_backward(
                    setting, f"{rules}, {'inside' if inside else 'around'}", ours, inside=inside
                )
        yield training_step(setting)


def forward_backward(setting: Setting, name: str, ours: Region, *, inside: bool) -> Comparison:
    """Time a forward and backward pass with an amp_plugin region and with a torch region.

    The region is inside the compiled function if ``inside`` is True, else around it.
    """
    calls = {
        OURS: _one_batch(setting, ours, inside=inside),
        "torch": _one_batch(setting, lambda: torch_region(setting.device), inside=inside),
    }
    return Comparison(
        name=name,
        table="Forward + backward of a compiled GPT 6 x 64, with the region around or inside it",
        samples={
            label: setting.host_clock(call, repeat=setting.sized(5, 1), prepare=call)
            for label, call in calls.items()
        },
        rounds=setting.rounds(51),
        gates=(Gate(limit=1.01),) if setting.device == "cpu" else (),
    )


def _compile(setting: Setting, function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=setting.sized("inductor", "eager"))


def _one_batch(setting: Setting, region: Region, *, inside: bool) -> Callable[[], None]:
    model = launch_bound_gpt(setting)
    (batch,) = model.batches(1, setting.device)

    def forward(tokens: Tensor) -> Tensor:
        with region() if inside else nullcontext():
            return model(tokens)  # type: ignore[no-any-return]

    compiled = _compile(setting, forward)

    def call() -> None:
        with nullcontext() if inside else region():
            loss = compiled(batch)
        loss.backward()
        model.zero_grad()

    return call


def training_step(setting: Setting) -> Comparison:
    """Compare amp_plugin and torch on a training step that is compiled as one function.

    The compiled function contains the forward pass, the backward pass, clipping, the optimizer step and the
    update of the loss scale.
    """
    ours = GradScaler(setting.device, init_scale=2.0**10)
    theirs = torch.amp.GradScaler(setting.device, init_scale=2.0**10)

    def clip_ours(optimizer: torch.optim.Optimizer, _: GPT) -> None:
        ours.clip_grad_norm_(optimizer, MAX_NORM)

    def clip_theirs(optimizer: torch.optim.Optimizer, model: GPT) -> None:
        theirs.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    calls = {
        OURS: _whole_step(setting, lambda: autocast(setting.device, BF16), ours, clip_ours),
        "torch": _whole_step(setting, lambda: torch_region(setting.device), theirs, clip_theirs),
    }
    return Comparison(
        name="GPT 6 x 64, fused AdamW",
        table="A training step, compiled as a whole",
        samples={
            # The first call creates the optimizer state, and the second call compiles for this state.
            label: setting.host_clock(
                call, repeat=setting.sized(5, 1), prepare=lambda call=call: [call(), call()]
            )
            for label, call in calls.items()
        },
        rounds=setting.rounds(51),
        gates=(Gate(limit=1.0),) if setting.device == "cpu" else (),
    )


def _whole_step(
    setting: Setting, region: Region, scaler: Any, clip: Callable[..., None]
) -> Callable[[], None]:
    model = launch_bound_gpt(setting)
    (batch,) = model.batches(1, setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        with region():
            loss = model(tokens)
        scaler.scale(loss).backward()
        clip(optimizer, model)
        scaler.step(optimizer)
        scaler.update()

    compiled = _compile(setting, step)

    return lambda: compiled(batch)


SECTIONS = (Compiled(),)
