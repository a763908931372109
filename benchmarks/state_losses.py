"""Train models with several seeds and each format of optimizer state, and compare the final losses.

``python -m benchmarks.state_losses FILE`` does all training runs that are not in FILE yet.
``python -m benchmarks.state_losses FILE --seconds 100`` starts no further run after 100 seconds.
``python -m benchmarks.state_losses FILE --draw PLOT`` plots the runs in FILE.

A character GPT, a ViT and a ResNet for digits have about 65,000 parameters each. A second GPT has 10 million
parameters. A single op computes each optimizer step. Weights are stored in bfloat16, together with the other
16 bits of each float32 weight. The runs shown in docs/lab/stored_weights.md are saved in
benchmarks/results/state_losses.jsonl, one line per run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, autocast, store_weights
from benchmarks.models import ResidualBlock
from recipes.char_gpt import CharGPT, Config
from recipes.shared import digits_batches, digits_loaders

STATES = ("fp32", "bf16", "8bit")
RATES = (1.0, 0.1, 10.0)
WARM_UP = 50
FINAL_STEPS = 20  # the final loss is the mean loss of the last 20 steps
DIVERGED = 10.0
T_95 = 2.776  # Student's t for the 95 % confidence interval of five runs
Batches = Iterator[tuple[Tensor, Tensor]]


class DigitsTransformer(nn.Module):
    """A vision transformer for 8x8 images, with 2x2 patches."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches, self.position = nn.Conv2d(1, width, 2, 2), nn.Parameter(torch.zeros(16, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, ``[B, 10]``, of images ``[B, 1, 8, 8]``."""
        x = self.patches(images).flatten(2).mT + self.position
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


def residual_net(width: int) -> nn.Module:
    """Make a ResNet for 8x8 images."""
    stages = (width, width, 2 * width, 2 * width)
    blocks = [ResidualBlock(a, b) for a, b in zip((width, *stages[:-1]), stages, strict=True)]
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def gpt(**size: int) -> tuple[nn.Module, Batches]:
    """Make a GPT and its training batches, which start at random positions in a text."""
    config = Config(**size)
    text = "".join(topics[key] for key in sorted(topics))
    characters = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([characters[character] for character in text])

    def batches() -> Batches:
        while True:
            starts = torch.randint(len(codes) - config.context, (config.batch_size, 1))
            window = codes[starts + torch.arange(config.context + 1)]
            yield window[:, :-1], window[:, 1:].flatten()

    return CharGPT(len(characters), config), batches()


def digits(model: nn.Module, seed: int) -> tuple[nn.Module, Batches]:
    """Return a classifier and its training batches of digits."""
    return model, digits_batches(digits_loaders(batch_size=32, seed=seed), steps=10**6)


# Each case starts with a function that takes a seed and returns a model and its training batches.
# The second entry is the number of training steps.
# The third entry is the learning rate for AdamW and Adam, and the fourth is the learning rate for SGD.
Case = tuple[Callable[[int], tuple[nn.Module, Batches]], int, float, float]
CASES: dict[str, Case] = {
    "GPT": (lambda _: gpt(batch_size=8), 300, 3e-3, 0.1),
    "ViT": (lambda seed: digits(DigitsTransformer(40, 3), seed), 300, 2e-3, 0.05),
    "ResNet": (lambda seed: digits(residual_net(16), seed), 300, 3e-3, 0.1),
    "GPT, 10 M": (lambda _: gpt(batch_size=4, context=32, width=400, layers=5), 100, 5e-4, 0.05),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr, fused=True),
    "Adam": lambda params, lr: torch.optim.Adam(params, lr, weight_decay=1e-4, fused=True),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, fused=True),
}


def train(case: str, optimizer_name: str, rate: float, state: str, seed: int) -> list[float]:
    """Train one model. Return the loss of each step."""
    make, steps, adam_rate, sgd_rate = CASES[case]
    torch.manual_seed(seed)
    model, batches = make(seed)
    peak = rate * (sgd_rate if optimizer_name == "SGD" else adam_rate)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), peak)
    store_weights(model, optimizer, weights="bf16", state=state)  # type: ignore[arg-type]
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - WARM_UP)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [WARM_UP])
    scaler, losses = GradScaler("cpu", enabled=False), []
    for inputs, labels in islice(batches, steps):
        optimizer.zero_grad()
        with autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(inputs).float().flatten(0, -2), labels)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(loss.item())
    return losses


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Plot how much each state format changes the final loss, relative to the spread between float32 runs.

    The bars are 95 % confidence intervals.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(len(RATES), 1, sharex=True)
    names = [f"{case}\n{optimizer}" for case, optimizer in product(CASES, OPTIMIZERS)]
    for axes, rate in zip(panels, sorted(RATES), strict=True):
        axes.axhspan(-1, 1, color="0.9", label="spread of the float32 runs")
        for offset, state, colour in ((-0.12, "bf16", "#2f81f7"), (0.12, "8bit", "#bf8700")):
            for place, (case, optimizer) in enumerate(product(CASES, OPTIMIZERS)):
                moved = difference(runs, case, optimizer, rate, state)
                if moved is None:
                    axes.text(
                        place, 0, "diverges", rotation=90, ha="center", va="center", color="0.4", size=8
                    )
                else:
                    axes.errorbar(
                        place + offset, moved[0], moved[1], fmt="o", color=colour, label=state, capsize=2
                    )
        axes.set(ylabel=f"learning rate x {rate:g}", ylim=(-5, 5))
        axes.set_xticks(range(len(names)), names, fontsize=7)
    handles, labels = panels[0].get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    panels[0].legend(known.values(), known, ncols=3, fontsize=8, loc="upper left")
    figure.suptitle("Final loss with compressed state less that with float32 state, in spreads of the latter")
    figure.savefig(file)


def difference(
    runs: list[dict[str, Any]], case: str, optimizer: str, rate: float, state: str
) -> tuple[float, float] | None:
    """Compare the final losses of runs with compressed optimizer state and with float32 state.

    The result is the mean over seeds of the difference between the two final losses, and half the width of
    the 95 % confidence interval of this mean. Both numbers are divided by the standard deviation of the
    float32 losses. The result is None if a run with float32 state diverges.
    """
    by_seed: dict[int, dict[str, float]] = {}
    for run in runs:
        if (run["case"], run["optimizer"], run["rate"]) == (case, optimizer, rate):
            by_seed.setdefault(run["seed"], {})[run["state"]] = run["loss"]
    exact = [losses["fp32"] for losses in by_seed.values()]
    if not all(loss < DIVERGED for loss in exact):  # the comparison is False for nan
        return None
    spread = statistics.stdev(exact)
    moved = [(losses[state] - losses["fp32"]) / spread for losses in by_seed.values()]
    return statistics.mean(moved), T_95 * statistics.stdev(moved) / len(moved) ** 0.5


def main() -> None:
    """Do the training runs that are missing from the file, or plot the runs in the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_losses")
    parser.add_argument("file", type=Path, help="of JSON lines, a run each")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draw", type=Path, metavar="PLOT", help="draw what FILE holds")
    options = parser.parse_args()
    kept = (
        [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []
    )
    there = {(run["case"], run["optimizer"], run["rate"], run["seed"], run["state"]) for run in kept}
    if options.draw:
        draw(kept, options.draw)
        return
    end = time.monotonic() + options.seconds
    torch.set_num_threads(1)
    asked = list(product(CASES, OPTIMIZERS, RATES, range(options.seeds), STATES))
    # Train with the base learning rate first. With each learning rate, train the small models first.
    for key in sorted(asked, key=lambda key: (key[2] != 1, "M" in key[0])):
        if key in there:
            continue
        if time.monotonic() > end:
            return
        case, optimizer, rate, seed, state = key
        losses = train(case, optimizer, rate, state, seed)
        final = statistics.mean(losses[-FINAL_STEPS:])
        with options.file.open("a") as file:
            row: dict[str, Any] = dict(zip(("case", "optimizer", "rate", "seed", "state"), key, strict=True))
            file.write(json.dumps({**row, "loss": final}) + "\n")


if __name__ == "__main__":
    main()
