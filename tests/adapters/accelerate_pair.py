"""Stock Accelerate and AmpAccelerator, both in real fp16 on the CPU, for comparison in tests.

Stock Accelerate has no scaler and no autocast on the CPU. Here it is given torch's own before anything is
prepared. From then on only Accelerate's code runs.
"""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.session import Session


def reset():
    """Reset Accelerate's process-wide state and our default rules."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    Session.forget_rules()


def stock(*, steps=1, **scaling):
    reset()
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, gradient_accumulation_steps=steps)
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", **scaling)
    return accelerator


def ours(*, steps=1, precision="fp16", cpu=True, compiler=None, **options):
    reset()
    return AmpAccelerator(
        mixed_precision=precision,
        cpu=cpu,
        dynamo_backend=compiler,
        gradient_accumulation_steps=steps,
        kwargs_handlers=[AmpKwargs(**options)],
    )


class Weights(torch.nn.Module):
    """Returns ``factor * sum(weight)``: the gradient of each element is the factor."""

    def __init__(self, elements=4, value=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((elements,), value))

    def forward(self, factor):
        return factor * self.weight.sum()


class GradientKeeper(torch.optim.SGD):
    """SGD that keeps a copy of the gradients of each step it takes."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr=lr)
        self.seen = []

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        self.seen.append([None if p.grad is None else p.grad.clone() for p in params])
        for param in params:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-self.param_groups[0]["lr"])
        return loss


def prepared(accelerator, count=1, **kwargs):
    """Return ``count`` prepared models and their prepared optimizers."""
    models = [Weights(**kwargs) for _ in range(count)]
    optimizers = [GradientKeeper(model.parameters()) for model in models]
    out = accelerator.prepare(*models, *optimizers)
    return out[:count], out[count:]


def last_gradient(optimizer):
    """Return the first element of the gradient of the last step that was taken."""
    return optimizer.optimizer.seen[-1][0].flatten()[0].item()
