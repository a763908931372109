"""Time an accumulation window of a launch-bound GPT under AmpAccelerator and under stock Accelerate.

    python benchmarks/accelerate.py [--device cpu] [--precision fp16] [--window 1] [--runs 5]

Runs of the two are interleaved in one process; reported is the median over the runs of each run's
median window: forward, backward, clipping, step. On the CPU, with its one thread, the time is the
process's own (time.process_time), which other programs on the machine do not lengthen; on a GPU it
is wall time, device work included. Stock Accelerate does no fp16 on the CPU, so there it is given
torch's own scaler and told to use autocast.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

# As a script, this file must not be found as `accelerate`.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from amp_plugin import set_default_rules  # noqa: E402
from amp_plugin.adapters.accelerate import AmpAccelerator  # noqa: E402

WARM_UP = 8
WINDOWS = 40


class TinyGPT(nn.Module):
    """A GPT whose ops are far smaller than the cost of starting them; returns the loss."""

    def __init__(self, layers: int = 4, width: int = 64, length: int = 16, vocabulary: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, norm_first=True, **block) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before and itself, int64 ``[B, L]``."""
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def make_accelerator(kind: str, arguments: argparse.Namespace) -> Accelerator:
    """Return a fresh accelerator of one kind: ``"stock"`` or ``"ours"``."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    set_default_rules(None)
    options = {
        "mixed_precision": arguments.precision,
        "cpu": arguments.device == "cpu",
        "gradient_accumulation_steps": arguments.window,
    }
    if kind == "ours":
        return AmpAccelerator(**options)
    accelerator = Accelerator(**options)
    if arguments.device == "cpu" and arguments.precision == "fp16":
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    return accelerator


def run(kind: str, arguments: argparse.Namespace) -> float:
    """Return the median time of a window, in seconds."""
    torch.manual_seed(0)
    accelerator = make_accelerator(kind, arguments)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(0, 64, (4, 16), device=accelerator.device)
    on_cpu = accelerator.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    times = []
    for _ in range(WARM_UP + WINDOWS):
        start = clock()
        for _ in range(arguments.window):
            with accelerator.accumulate(model):
                accelerator.backward(model(tokens))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if not on_cpu:
            torch.cuda.synchronize()
        times.append(clock() - start)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    """Run both kinds in turn and print their times."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp16", choices=["fp16", "bf16"])
    parser.add_argument("--window", type=int, default=1, help="micro-batches an optimizer step")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(arguments.runs):
        for kind, found in times.items():
            found.append(run(kind, arguments))
    table = Table(title=f"{arguments.precision} on {arguments.device}, torch {torch.__version__}")
    for column in ("accelerator", f"ms a window of {arguments.window}", "ours / stock"):
        table.add_column(column)
    stock, ours = (statistics.median(times[kind]) for kind in ("stock", "ours"))
    table.add_row("stock", f"{1e3 * stock:.2f}", "")
    table.add_row("AmpAccelerator", f"{1e3 * ours:.2f}", f"{ours / stock:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
