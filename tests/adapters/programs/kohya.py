"""Train a low-rank adapter with accumulation, a patched scaler, clipping, a schedule and float16 weights.

The program does not know amp_plugin. Accelerate has no scaler on the CPU, so the program adds one.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader


class Addition(torch.nn.Module):
    """A low-rank adapter that replaces the forward of a frozen layer."""

    def __init__(self, frozen):
        super().__init__()
        self.original = frozen.forward
        frozen.forward = self.forward
        self.down = torch.nn.Linear(frozen.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, frozen.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.original(x) + self.up(self.down(x)) * 0.5


def allow_float16_gradients(scaler):
    original = scaler._unscale_grads_

    def unscale(optimizer, inv_scale, found_inf, allow_fp16):
        return original(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = unscale


def made(dtype):
    set_seed(7)
    layers = torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16)
    model = torch.nn.Sequential(*layers).to(torch.float16).requires_grad_(False)
    additions = torch.nn.ModuleList(Addition(layers[place]) for place in (0, 2)).to(dtype)
    optimizer = torch.optim.SGD(additions.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 6)
    return model, additions, optimizer, scheduler


def loss_of(model, batch, number):
    noise = torch.randn(batch.shape, generator=torch.Generator().manual_seed(number))
    with torch.autocast("cpu", torch.float16):
        prediction = model((batch + noise).to(torch.float16))
    loss = torch.nn.functional.mse_loss(prediction.float(), noise)
    return loss * float("inf") if number == 5 else loss


def show(number, loss, scaler, additions, scheduler):
    total = sum(param.double().sum().item() for param in additions.parameters())
    print(number, loss.item(), scaler.get_scale(), total.hex(), scheduler.get_last_lr())


def by_accelerate(batches):
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="fp16")
    if accelerator.scaler is None:
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    model, *parts = made(torch.float32)
    loader = DataLoader(batches, batch_size=2)
    additions, optimizer, scheduler, loader = accelerator.prepare(*parts, loader)
    allow_float16_gradients(accelerator.scaler)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(additions):
            loss = loss_of(model, batch, number)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(additions.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        show(number, loss, accelerator.scaler, additions, scheduler)


def by_hand_in_float16(batches):
    model, additions, optimizer, scheduler = made(torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    allow_float16_gradients(scaler)
    for number, batch in enumerate(batches.split(2)):
        loss = loss_of(model, batch, number)
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(additions.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        show(number, loss, scaler, additions, scheduler)


if __name__ == "__main__":
    latents = torch.randn(24, 16, generator=torch.Generator().manual_seed(3))
    by_accelerate(latents)
    by_hand_in_float16(latents)
