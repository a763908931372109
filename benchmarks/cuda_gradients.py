"""The gradient path on a GPU: kernels against copy_, unscale + check + clip and whole steps against torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import amp_plugin
import amp_plugin.kernels.ops
from benchmarks.cuda_timing import device_work, side_by_side

AMP = torch.ops.amp_plugin
MAX_NORM = 1.0
SCALE = 2.0**10


def resnet50() -> list[tuple[int, ...]]:
    """Shapes of the 161 parameters of ResNet-50."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inner, outer = 64, 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            inner, before = width, outer
            outer = 4 * width
            convolutions = [(inner, before, 1, 1), (inner, inner, 3, 3), (outer, inner, 1, 1)]
            if block == 0:
                convolutions.append((outer, before, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
    return [*shapes, (1000, 2048), (1000,)]


def gpt2() -> list[tuple[int, ...]]:
    """Shapes of the 148 parameters of GPT-2 124M."""
    d = 768
    block = [
        (d,),
        (d,),
        (3 * d, d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (4 * d, d),
        (4 * d,),
        (d, 4 * d),
        (d,),
    ]
    return [(50257, d), (1024, d), *block * 12, (d,), (d,)]


SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "ResNet-50": resnet50,
    "GPT-2 124M": gpt2,
    "1000 x 1 KB": lambda: [(256,)] * 1000,
    "2000 x 16 KB": lambda: [(4096,)] * 2000,
    "1 x 1 GB": lambda: [(2**28,)],
}


def random_set(name: str) -> list[Tensor]:
    """fp32 gradients of a set, random, on the GPU."""
    return [torch.randn(shape, device="cuda") for shape in SETS[name]()]


def check(grads: list[Tensor]) -> None:
    """Stop if a kernel is wrong on these gradients: a fast wrong kernel is not worth timing."""
    inverse = torch.tensor(1 / SCALE, device="cuda")
    exact = math.sqrt(sum(g.double().square().sum().item() for g in grads)) / SCALE
    mine = [g.clone() for g in grads]
    half = [torch.empty_like(g, dtype=torch.bfloat16) for g in grads]
    AMP.cast(mine, half)
    for norm, found, flags in (AMP.norm_check(mine, inverse), AMP.unscale_(mine, inverse)):
        wrong = abs(norm.item() / exact - 1) > 1e-6 or found.item() != 0 or bool(flags.any())
        if wrong:
            sys.exit(f"the norm is {norm.item()}, exactly {exact}; found_inf {found.item()}")
    AMP.multiply_(mine, torch.tensor(SCALE, device="cuda"))
    for one, other, cast in zip(mine, grads, half, strict=True):
        if not torch.equal(one, other) or not torch.equal(cast, other.bfloat16()):
            sys.exit("unscale_, multiply_ or cast wrote wrong numbers")


def kernels(name: str) -> dict[str, str]:
    """Bandwidth of each kernel, as a share of copy_ on as many bytes in one flat tensor."""
    grads = random_set(name)
    check(grads)
    bytes_ = 4 * sum(g.numel() for g in grads)
    flat = torch.randn(bytes_ // 4, device="cuda")
    target, half = torch.empty_like(flat), [torch.empty_like(g, dtype=torch.bfloat16) for g in grads]
    down, up = (torch.tensor(value, device="cuda") for value in (1 / SCALE, SCALE))

    def idle() -> None:
        pass

    calls = {
        "copy_": (lambda: target.copy_(flat), 2.0),
        "norm_check": (lambda: AMP.norm_check(grads, down), 1.0),
        "unscale_": (lambda: AMP.unscale_(grads, down), 2.0),
        "multiply_": (lambda: AMP.multiply_(grads, up), 2.0),
        "cast": (lambda: AMP.cast(grads, half), 1.5),
    }
    times = side_by_side({key: (idle, call) for key, (call, _) in calls.items()})
    rate = {key: calls[key][1] * bytes_ / times[key] / 1e6 for key in calls}  # GB/s
    row = {"set": name, "MB": f"{bytes_ / 1e6:.1f}", "copy_ GB/s": f"{rate['copy_']:.0f}"}
    for key in list(calls)[1:]:
        row[key] = f"{times[key]:.3f} ms {100 * rate[key] / rate['copy_']:.0f} %"
    return row


class Setting:
    """Parameters with gradients, an optimizer and a scaler of torch or of ours."""

    def __init__(self, name: str, scaler_class: type[torch.amp.GradScaler]) -> None:
        self.params = [torch.nn.Parameter(0.02 * values) for values in random_set(name)]
        self.grads = [SCALE * torch.randn_like(param) for param in self.params]
        self.optimizer = torch.optim.AdamW(self.params, fused=True)
        self.scaler = scaler_class("cuda", init_scale=SCALE, growth_interval=10**6)
        self.loss = torch.ones((), device="cuda")

    def prepare(self) -> None:
        """Give the parameters new scaled gradients, as a backward pass does."""
        self.scaler.scale(self.loss)
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad.clone()

    def clip(self) -> None:
        """What a careful user writes between backward and step."""
        if isinstance(self.scaler, amp_plugin.GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        else:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)

    def step(self) -> None:
        """Clip, step and update."""
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def in_place(grads: list[Tensor], inverse: Tensor) -> None:
    """Unscale, check and clip .grad itself: 4B bytes where torch moves 5B."""
    norm, _, _ = AMP.unscale_(grads, inverse)
    AMP.multiply_(grads, AMP.clip_factor(norm, MAX_NORM))


def unscale_check_clip(name: str) -> list[dict[str, str]]:
    """Unscale + check + clip: torch, ours folded (one read), ours in place."""
    stock, grads = Setting(name, torch.amp.GradScaler), random_set(name)
    inverse, scale = torch.tensor(1 / SCALE, device="cuda"), torch.tensor(SCALE, device="cuda")

    def folded() -> Tensor:
        return AMP.clip_factor(AMP.norm_check(grads, inverse)[0], MAX_NORM, scale)

    def prepare_stock() -> None:
        stock.scaler.update() if stock.scaler._per_optimizer_states else None
        stock.prepare()

    variants = {
        "torch: unscale_ + clip_grad_norm_": (prepare_stock, stock.clip),
        "norm_check (check alone)": (lambda: None, lambda: AMP.norm_check(grads, inverse)),
        "norm_check + factor, folded": (lambda: None, folded),
        "unscale_ + multiply_, in place": (lambda: None, lambda: in_place(grads, inverse)),
    }
    return _rows(name, variants)


def optimizer_step(name: str) -> list[dict[str, str]]:
    """The whole of unscale, clip, fused AdamW and update."""
    variants = {}
    for label, scaler_class in (("torch.amp", torch.amp.GradScaler), ("amp_plugin", amp_plugin.GradScaler)):
        setting = Setting(name, scaler_class)
        variants[f"{label}: clip + AdamW(fused) + update"] = (setting.prepare, setting.step)
    return _rows(name, variants)


def _rows(
    name: str, variants: dict[str, tuple[Callable[[], object], Callable[[], object]]]
) -> list[dict[str, str]]:
    times = side_by_side(variants)
    first = next(iter(times.values()))
    rows = []
    for label, (prepare, call) in variants.items():

        def prepared(prepare: Callable[[], object] = prepare, call: Callable[[], object] = call) -> None:
            prepare()
            call()

        both, prepare_only = device_work(prepared), device_work(prepare)
        rows.append(
            {
                "set": name,
                "variant": label,
                "ms": f"{times[label]:.3f}",
                "speed-up": f"{first / times[label]:.2f}x",
                "launches": str(both[0] - prepare_only[0]),
                "syncs": str(both[1] - prepare_only[1]),
            }
        )
    return rows
