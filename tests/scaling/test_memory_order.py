"""Gradients whose memory order differs from their parameters', for optimizers that assume the same order."""

import pytest
import torch
from torch import nn

from amp_plugin import GradScaler, store_weights


def without_amp_support(params, fused):
    """Make an optimizer that has no support for loss scales, like Adagrad in torch 2.11."""
    optimizer = torch.optim.Adagrad(params, lr=0.1, fused=fused)
    optimizer._step_supports_amp_scaling = False
    return optimizer


OPTIMIZERS = {
    "without AMP support": without_amp_support,
    "adamw": lambda params, fused: torch.optim.AdamW(params, lr=0.01, fused=fused),
    "amsgrad": lambda params, fused: torch.optim.Adam(params, lr=0.01, amsgrad=True, fused=fused),
    "sgd": lambda params, fused: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=fused),
    "adagrad": lambda params, fused: torch.optim.Adagrad(params, lr=0.1, fused=fused),
}
SCALERS = {"scaled": {}, "written": {"one_pass": False}, "guard": {"enabled": False}}
SCALERS["guard, written"] = {"enabled": False, "one_pass": False}
LAYOUTS = {
    "transposed": lambda grad: grad.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda grad: grad.contiguous(memory_format=torch.channels_last),
    "expanded": lambda grad: grad[:1, :1, :1, :1].expand_as(grad),
}


def trained(make, *, fused, steps=4, lay_out=None, convert_at=None, closure=False, **options):
    """Return a weight after some steps.

    ``lay_out`` changes the memory order of each gradient. Before step ``convert_at``, the layer becomes
    channels_last.
    """
    torch.manual_seed(0)
    conv, shift = nn.Conv2d(5, 6, 3), nn.Parameter(torch.tensor(2.0))
    optimizer = make([shift, *conv.parameters()], fused)
    scaler = GradScaler("cpu", init_scale=256.0, **options)
    scaler.register(optimizer)
    for step in range(steps):
        if step == convert_at:
            conv.to(memory_format=torch.channels_last)

        batch = torch.randn(2, 5, 7, 7)

        def backward(batch=batch):
            optimizer.zero_grad()
            scaler.scale((shift * conv(batch)).square().mean()).backward()
            if lay_out is not None:
                conv.weight.grad = lay_out(conv.weight.grad)
            return torch.zeros(())

        if closure:
            scaler.step(optimizer, backward)
        else:
            backward()
            scaler.step(optimizer)
        scaler.update()
    return conv.weight.detach().contiguous()


@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fused_step_takes_gradients_and_state_in_any_order(optimizer, scaler, closure):
    """The first parameter has no dimensions."""
    make, options = OPTIMIZERS[optimizer], {**SCALERS[scaler], "closure": closure}
    supports_amp = getattr(make([nn.Parameter(torch.ones(1))], True), "_step_supports_amp_scaling", False)
    for name, lay_out in LAYOUTS.items():
        if name == "expanded" and (closure or not supports_amp):
            continue  # an expanded gradient cannot be unscaled in place
        right = trained(make, fused=False, lay_out=lambda grad, f=lay_out: f(grad).clone(), **options)
        found = trained(make, fused=True, lay_out=lay_out, **options)
        torch.testing.assert_close(
            found, right, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    found, right = (trained(make, fused=fused, convert_at=2, **options) for fused in (True, False))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_a_parameter_with_gaps_is_refused():
    """torch's fused step would write to the memory between its elements."""
    memory = torch.zeros(6, 8)
    param = nn.Parameter(memory[:, :4])
    optimizer, scaler = OPTIMIZERS["sgd"]([param], True), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    with pytest.raises(ValueError, match=r"SGD: a parameter of shape \(6, 4\) and strides \(8, 1\) has gaps"):
        scaler.step(optimizer)
    assert not memory.any()


def test_the_state_of_stored_weights_keeps_its_dtype():
    conv = nn.Conv2d(5, 6, 3)
    optimizer, scaler = OPTIMIZERS["adamw"](conv.parameters(), True), GradScaler("cpu", one_pass=False)
    store_weights(conv, optimizer, weights="bf16")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(conv(torch.randn(2, 5, 7, 7).bfloat16()).float().sum()).backward()
        state = optimizer.state.get(conv.weight, {})
        for name, value in state.items():
            state[name] = value.to(memory_format=torch.channels_last) if value.dim() == 4 else value
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[conv.weight]["exp_avg"].dtype is torch.float32
    assert optimizer.state[conv.weight]["exp_avg"].is_contiguous()
