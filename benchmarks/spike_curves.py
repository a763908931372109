"""Measure how gradient spikes affect the loss, and how large a spike must be to be detected.

``python -m benchmarks.spike_curves`` draws the plot, and prints the table of detection rates.
``python -m benchmarks.spike_curves --quick`` trains with one seed instead of five, as a quick test.

A character model is trained in bf16 on the source code of this package. In one of every fifty steps, all
gradients are multiplied by a factor, which imitates the effect of a corrupt training example.

The table shows what share of spikes would be detected if each spike made the gradient norm k times as large.
This share is computed from runs without spikes. A step with gradient norm n counts as detected if k * n is
above the spike limit of that step.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from amp_plugin import GradScaler, Spike, StepRecord, autocast

ROOT = Path(__file__).parents[1]
FACTORS = (2, 2.5, 3, 4, 5, 7, 10, 20, 50, 100)
STEPS, FIRST, EVERY = 400, 150, 50
CONTEXT, BATCH = 32, 16


class Characters(nn.Module):
    """A small character model with an embedding, a GRU and an output layer."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, 32)
        self.mix = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, symbols)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits, float32 ``[batch, length, symbols]``."""
        return self.head(self.mix(self.embedding(text))[0])  # type: ignore[no-any-return]


@functools.cache
def corpus() -> tuple[Tensor, int]:
    """Return the text as an array of character codes, and the number of distinct characters."""
    text = "".join(path.read_text() for path in sorted((ROOT / "amp_plugin" / "scaling").glob("*.py")))
    symbols = sorted(set(text))
    place = {symbol: number for number, symbol in enumerate(symbols)}
    return torch.tensor([place[symbol] for symbol in text]), len(symbols)


def train(seed: int, *, factor: float, on_spike: Spike | None) -> tuple[list[float], list[StepRecord]]:
    """Train, and multiply the gradients of every fiftieth step by ``factor``.

    Returns:
        The losses and the step records.
    """
    text, symbols = corpus()
    torch.manual_seed(seed)
    model = Characters(symbols)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    records: list[StepRecord] = []
    scaler = GradScaler("cpu", enabled=False, on_spike=on_spike, log=records.append)
    losses = []
    for step in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        with autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        spiked = step >= FIRST and (step - FIRST) % EVERY == 0
        optimizer.zero_grad()
        (loss * (factor if spiked else 1.0)).backward()
        scaler.step(optimizer)
        losses.append(loss.item())
    return losses, records


def detection(records: list[StepRecord]) -> str:
    """Return a table that shows, for each factor, the fraction of steps that would be detected as spikes."""
    judged = [(record.norm, record.limit) for record in records if record.norm and record.limit]
    alarms = sum(record.verdict == "spike" for record in records)
    rows = [f"| times its norm | caught of {len(judged)} steps |", "|---|---|"]
    for factor in FACTORS:
        caught = sum(factor * norm > limit for norm, limit in judged)
        rows.append(f"| {factor:g} | {100 * caught / len(judged):.1f} % |")
    return "\n".join([*rows, f"false alarms: {alarms} of {len(judged)}"])


def curves(seeds: int, path: Path) -> list[StepRecord]:
    """Plot the losses of runs without spikes, with spikes, and with spikes that are skipped or clipped.

    Returns:
        The records of the runs without spikes.
    """
    import matplotlib as mpl  # noqa: PLC0415 - for the plot only

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    ways = {
        'no spikes, on_spike="skip"': (1.0, Spike()),
        "spikes of 1000 times, on_spike=None": (1000.0, None),
        'the same, on_spike="skip"': (1000.0, Spike()),
        'the same, on_spike="clip"': (1000.0, Spike(action="clip")),
    }
    figure, axes = plt.subplots(1, len(ways), figsize=(13, 3.2), sharey=True)
    ends, quiet = {}, list[StepRecord]()
    for axis, (name, (factor, rule)) in zip(axes, ways.items(), strict=True):
        runs = []
        for seed in range(seeds):
            losses, records = train(seed, factor=factor, on_spike=rule)
            runs.append(torch.tensor(losses))
            quiet += records if factor == 1.0 else []
            axis.plot(runs[-1].unfold(0, 8, 1).mean(1), linewidth=0.9)
        ends[name] = [round(losses[-25:].mean().item(), 4) for losses in runs]
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss, mean of 8 steps")
    figure.tight_layout()
    figure.savefig(path)
    print(json.dumps(ends, indent=1), flush=True)
    return quiet


def main() -> None:
    """Measure the effect of spikes, and plot the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "spikes.svg")
    given = parser.parse_args()
    print(detection(curves(1 if given.quick else 5, given.plot)))


if __name__ == "__main__":
    main()
