"""The config keys that recipes share: precision, device, seed, loss scale ..."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core
from recipes.bounds import number
from recipes.config import ConfigError


class Precision(Enum):
    """Precisions a config may name."""

    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that matrix products run in."""
        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[self.value]

    @property
    def mixed(self) -> bool:
        """Whether autocast is on."""
        return self is not Precision.fp32

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: many gradients are too small for fp16."""
        return self is Precision.fp16


@dataclass
class LossScaleConfig:
    """How the loss scale changes; fp16 only."""

    init_scale: float = number(2.0**16, above=0, most=torch.finfo(torch.float32).max)
    growth_factor: float = number(2.0, above=1)
    backoff_factor: float = number(0.5, above=0, below=1)
    growth_interval: int = number(40, least=1)


@dataclass
class DigitsProgramConfig:
    """The keys that ``train_digits.py`` and ``train_digits_accelerate.py`` share."""

    name: str = "digits"
    precision: Precision = Precision.fp16
    threads: int = number(1, least=1)
    seed: int = number(0, least=0, most=2**32 - 1)
    epochs: int = number(20, least=1)
    batch_size: int = number(64, least=1)
    accumulate: int = number(1, least=1)
    learning_rate: float = number(1e-2, above=0)
    weight_decay: float = number(1e-2, least=0)
    clip_norm: float = number(1.0, above=0)
    width: int = number(16, least=4, multiple_of=4)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    output: str = "runs"


@dataclass
class RecipeConfig:
    """The keys of every recipe; the ``Config`` of a recipe adds its own."""

    precision: Precision = Precision.fp16
    device: str = "cpu"
    threads: int = number(1, least=1)
    seed: int = number(0, least=0, most=2**32 - 1)
    steps: int = number(200, least=1)
    batch_size: int = number(64, least=1)
    learning_rate: float = number(3e-3, above=0)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    output: str = "runs"

    def start(self) -> None:
        """Set the number of threads and the seed, and load the native core.

        Called before the training is timed, since the core may have to be compiled first.

        Raises:
            ConfigError: this machine does not have the device.
        """
        kind = self.device.partition(":")[0]
        if kind != "cpu" and not getattr(getattr(torch, kind, None), "is_available", bool)():
            found = f"torch {torch.__version__} finds no such device here"
            msg = f"device={self.device}, but {found}; use device=cpu"
            raise ConfigError(msg)
        if kind == "cuda":
            cuda_core()
        native_core()
        torch.set_num_threads(self.threads)
        torch.manual_seed(self.seed)
