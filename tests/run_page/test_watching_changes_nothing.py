"""A watched run equals an unwatched one bit for bit: entry points x programs with side effects x watchers.

A step of these programs cannot be repeated: it draws random numbers outside torch, counts, keeps state, reads
other data or writes weights. In each program one batch is bad, so a step is skipped and watching begins.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import amp_plugin
from amp_plugin import GradScaler
from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.lightning import AmpMonitor, AmpPrecision, FabricAmpPrecision
from amp_plugin.numerics.first_module import ModuleWatch
from amp_plugin.run_page import report as run_report
from tests.adapters.accelerate_pair import reset
from tests.adapters.lightning_models import QUIET, fit

FIRST_SKIP = "ignore:step . of AdamW was skipped, and nothing is scaled"
pytestmark = [*QUIET, pytest.mark.native, pytest.mark.filterwarnings(FIRST_SKIP)]

STEPS, BAD = 14, (4, 5)


class Pure(nn.Module):
    """Two layers. The programs below add side effects to a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.begin()

    def begin(self) -> None:
        """Make the objects that the program keeps between steps."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        return self.last(torch.tanh(self.first(x)))


class Dropout(Pure):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.3))


class BatchNorm(Pure):
    def begin(self):
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return super().forward(self.norm(x.nan_to_num())) + x.sum(-1, keepdim=True)


class NumpyNumbers(Pure):
    def forward(self, x):
        return super().forward(x * (np.random.rand() + 0.5))


class PythonNumbers(Pure):
    def forward(self, x):
        return super().forward(x * (random.random() + 0.5))


class OwnGenerator(Pure):
    def begin(self):
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x * (torch.rand(x.shape, generator=self.generator) + 0.5))


class HiddenState(Pure):
    def begin(self):
        self.state = torch.zeros(4)

    def forward(self, x):
        out = torch.tanh(self.first(x + self.state))
        self.state = out.detach().mean(0).nan_to_num() + 0.5 * self.state
        return self.last(out)


class Counter(Pure):
    def begin(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Queue(Pure):
    def begin(self):
        self.queue = deque([torch.zeros(3, 4)], maxlen=3)

    def forward(self, x):
        self.queue.append(x.detach().nan_to_num())
        return super().forward(x + sum(self.queue))


class SecondLoader(Pure):
    def begin(self):
        self.other = itertools.count()

    def forward(self, x):
        return super().forward(x + next(self.other) % 7)


class MomentumEncoder(Pure):
    def begin(self):
        self.slow = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return super().forward(x) + self.slow(x.nan_to_num()).mean(-1, keepdim=True)


class ForwardHook(Pure):
    def begin(self):
        self.calls = [0]

        def count(_, __, out):
            self.calls[0] += 1
            return out * (1 + 0.1 * self.calls[0])

        self.first.register_forward_hook(count)


class BackwardHook(Pure):
    def begin(self):
        self.norms = []
        self.last.register_full_backward_hook(lambda _, __, grads: self.norms.append(float(grads[0].norm())))

    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * len(self.norms))


PROGRAMS = {
    kind.__name__: kind
    for kind in (
        *(Dropout, BatchNorm, NumpyNumbers, PythonNumbers, OwnGenerator, HiddenState),
        *(Counter, Queue, SecondLoader, MomentumEncoder, ForwardHook, BackwardHook),
    )
}


def batches() -> Iterator[Tensor]:
    for step in range(STEPS):
        x = torch.randn(3, 4)
        yield x * torch.nan if step in BAD else x


class FromModel(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def watch_of(watcher: str, steps: object, net: nn.Module, path: Path):
    """Return a context in which steps are watched."""
    if watcher == "page":
        return amp_plugin.report(steps, net, path)
    log = steps.core.log if isinstance(steps, GradScaler) else getattr(steps, "step_log", None)
    if watcher == "log":
        return log.watched(lambda step: step.overflow_report(), torch.Tensor.detach)
    if watcher == "monitor":
        return ModuleWatch(log, [net])
    return nullcontext()


def plain(net: nn.Module, watcher: str, path: Path) -> None:
    optimizer, scaler = torch.optim.AdamW(net.parameters(), 1e-2), GradScaler("cpu", init_scale=256.0)
    with watch_of(watcher, scaler, net, path):
        for x in batches():
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def trainer(net: nn.Module, watcher: str, path: Path) -> None:
    plugin, module = AmpPrecision("bf16"), FromModel(net)
    kinds = {"page": {"report": path}, "monitor": {}}
    callbacks = [AmpMonitor(**kinds[watcher])] if watcher in kinds else []
    with watch_of("log", plugin, net, path) if watcher == "log" else nullcontext():
        fit(
            module,
            plugin,
            STEPS,
            torch.utils.data.DataLoader([*batches()], batch_size=None),
            callbacks=callbacks,
        )


def fabric(net: nn.Module, watcher: str, path: Path) -> None:
    plugin = FabricAmpPrecision("bf16")
    door = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = door.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    with watch_of(watcher, plugin, net, path):
        for x in batches():
            door.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()


def accelerate(net: nn.Module, watcher: str, path: Path) -> None:
    reset()
    options = AmpKwargs(report=path if watcher == "page" else None)
    door = AmpAccelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=[options])
    model, optimizer = door.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
    with watch_of("" if watcher == "page" else watcher, door, net, path):
        for x in batches():
            door.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    door.end_training()
    reset()


DOORS: dict[str, Callable[[nn.Module, str, Path], None]] = {
    "plain": plain, "trainer": trainer, "fabric": fabric, "accelerate": accelerate
}  # fmt: skip
WATCHERS = ("page", "monitor", "log")


def everything(net: nn.Module) -> list[object]:
    """Return the state after a run: weights, random states, and objects that the program keeps."""
    kept = [getattr(net, name, None) for name in ("calls", "queue", "norms", "state")] + [
        net.generator.get_state() if hasattr(net, "generator") else None
    ]
    own = [str(next(net.other))] if hasattr(net, "other") else []
    drawn = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    return [*net.state_dict().values(), *drawn, *kept, *own]


def equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, deque | list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other or (one != one and other != other)


def run(door: str, program: str, watcher: str, path: Path) -> list[object]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = PROGRAMS[program]()
    DOORS[door](net, watcher, path)
    return everything(net)


def cases():
    for number, (door, program) in enumerate(itertools.product(DOORS, PROGRAMS)):
        sampled = door == "plain" or number % 4 == 0
        yield pytest.param(door, program, marks=() if sampled else pytest.mark.whole_run)


@pytest.mark.parametrize(("door", "program"), list(cases()))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_watched_run_trains_as_one_that_is_not(door, program, tmp_path, monkeypatch):
    alone = run(door, program, "", tmp_path)
    for watcher in WATCHERS:
        with monkeypatch.context() as patch:
            if (door, program) != ("plain", "PythonNumbers"):  # drawing the page takes most of the time
                patch.setattr(run_report, "render", lambda *_, **__: "")
            watched = run(door, program, watcher, tmp_path / "run.html")
        assert equal(watched, alone), f"{door}, {program}: a {watcher} changes the run"
