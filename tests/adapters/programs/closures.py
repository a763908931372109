"""A training program whose scaler steps with closures, and which splits a batch when memory runs out.

``ClosureScaler`` replaces torch's per-optimizer records after each update, and sets the stage itself. The
second part steps as usual, and clears the records before it tries a batch again.
"""

from collections import defaultdict

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state


class ClosureScaler(GradScaler):
    def step(self, optimizer, *args, **kwargs):
        closure = kwargs.pop("closure")

        def scaled_closure(**options):
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
            optimizer.zero_grad()
            loss = closure(**options)
            record = self._per_optimizer_states[id(optimizer)]
            if record["stage"] is OptState.STEPPED:
                raise RuntimeError("stepped before")
            if record["stage"] is OptState.READY:
                self.unscale_(optimizer)
            overflowed = sum(found.item() for found in record["found_inf_per_device"].values())
            return None if overflowed else loss

        return optimizer.step(*args, closure=scaled_closure, **kwargs)

    def update(self, new_scale=None):
        scale, tracker = self._check_scale_growth_tracker("update")
        found = [
            flag.to(scale.device)
            for record in self._per_optimizer_states.values()
            for flag in record["found_inf_per_device"].values()
        ]
        assert found, "no checks"
        together = found[0]
        for flag in found[1:]:
            together += flag
        torch._amp_update_scale_(
            scale, tracker, together, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


class Ascending(torch.optim.Optimizer):
    """SAM with a closure. If the closure returns None, the step ends."""

    def __init__(self, base, rho=0.05):
        self.base = base
        super().__init__(base.param_groups, {"rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        if loss is None:
            return None
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        climbed = [param.grad * (0.05 / (norm + 1e-12)) for param in params]
        for param, step in zip(params, climbed, strict=True):
            param.add_(step)
        second = closure()
        for param, step in zip(params, climbed, strict=True):
            param.sub_(step)
        if second is not None:
            self.base.step()
        return loss


def model_and_data():
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    data = torch.randn(10, 4, 8, generator=torch.Generator().manual_seed(1))
    data[6] *= 1e4  # overflows in float16
    return model, data


def show(*words, model):
    total = sum(param.double().sum().item() for param in model.parameters())
    print(*words, total.hex())


def forward(model, batch):
    with torch.autocast("cpu", torch.float16):
        return (model(batch).float() - batch.mean(1, keepdim=True)).square().mean()


def by_closures():
    model, data = model_and_data()
    optimizer = Ascending(torch.optim.SGD(model.parameters(), lr=0.05))
    scaler = ClosureScaler("cpu", init_scale=2.0**20, growth_interval=3)
    for number, batch in enumerate(data):

        def closure():
            loss = forward(model, batch)
            scaler.scale(loss).backward()
            return loss.item()

        loss = scaler.step(optimizer, closure=closure)
        scaler.update()
        show("closure", number, loss, scaler.get_scale(), model=model)


class OutOfMemory(RuntimeError):
    pass


def with_retries():
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    pieces = 1
    for number, batch in enumerate(data):
        while True:
            try:
                optimizer.zero_grad()
                for piece in batch.chunk(pieces):
                    loss = forward(model, piece)
                    scaler.scale(loss / pieces).backward()
                scaler.unscale_(optimizer)
                if number in (2, 6) and pieces < 4:
                    raise OutOfMemory
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                break
            except OutOfMemory:
                pieces *= 2
                if number == 2:
                    scaler._per_optimizer_states.pop(id(optimizer))
                else:
                    scaler._per_optimizer_states[id(optimizer)] = _refresh_per_optimizer_state()
        show("retry", number, pieces, loss.item(), scaler.get_scale(), model=model)
        pieces = 1


if __name__ == "__main__":
    by_closures()
    with_retries()
