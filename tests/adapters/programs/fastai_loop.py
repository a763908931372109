"""fastai trains in fp16 with its own callback, which passes itself to ``scaler.step`` as the optimizer.

The callback requires CUDA. The two replacements below let it train on the CPU.
"""

import random

import fastai.callback.fp16
import numpy as np
import torch
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD, Adam
from torch.utils.data import TensorDataset

fastai.callback.fp16.GradScaler = lambda device, **options: torch.amp.GradScaler("cpu", **options)
fastai.callback.fp16.autocast = lambda device, dtype: torch.autocast("cpu", dtype=dtype)


def train(precision, optimizer, callbacks):
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    y = x.mean(1, keepdim=True)
    loaders = DataLoaders(
        *(DataLoader(TensorDataset(x, y), bs=8, shuffle=False) for _ in range(2)), device=torch.device("cpu")
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    cbs = [MixedPrecision(amp_mode=precision, init_scale=2.0**22, growth_interval=3), *callbacks]
    learner = Learner(
        loaders, model, loss_func=torch.nn.functional.mse_loss, opt_func=optimizer, lr=0.1, cbs=cbs
    )
    scales = []
    learner.add_cb(Watching(scales))
    with learner.no_bar(), learner.no_logging():
        learner.fit(3)
    total = sum(param.double().sum().item() for param in model.parameters())
    print(precision, optimizer.__name__, len(callbacks), total.hex(), learner.recorder.log[1:3], scales)


class Watching(fastai.callback.fp16.Callback):
    def __init__(self, scales):
        self.scales = scales

    def after_batch(self):
        self.scales.append(self.learn.scaler.get_scale())


if __name__ == "__main__":
    for mode in ("fp16", "bf16"):
        for kind in (SGD, Adam):
            for callbacks in ([], [GradientClip(0.1)], [GradientAccumulation(16)]):
                train(mode, kind, callbacks)
