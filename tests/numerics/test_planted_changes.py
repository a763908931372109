"""compare_runs on a model of twelve blocks: a 5 % change in a branch is found at any depth, and rounding is
not reported.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_plugin.numerics.compare import compare_runs, record_run
from tests.samples import sampled

BLOCKS = 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.change, self.dtype = 1.0, None
        self.where = "branch"

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scale = q.shape[-1] ** -0.5 * (self.change if self.where == "scores" else 1.0)
        branch = self.out((q @ k.transpose(-1, -2) * scale).softmax(-1) @ v)
        x = x + (branch * self.change if self.where == "branch" else branch)
        hidden = self.down(functional.gelu(self.up(self.mixer(x))))
        return x + (hidden * self.change if self.where == "mlp" and self.change != 1.0 else hidden)


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, width), nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def record(path: Path, *, dtype=torch.bfloat16, enabled=True, at=-1, where="branch", train=True) -> Path:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, block in enumerate(model.blocks):
        block.where = where
        block.change = 0.95 if number == at else 1.0
    tokens = torch.randint(20, (2, 8))
    with record_run(path, model, steps=1):
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        if train:
            loss.backward()
            optimizer.step()
    return path


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(name, marks=[pytest.mark.whole_run] * (name != "mlp"))
        for name in ("branch", "mlp", "scores")
    ],
)
def test_five_per_cent_in_a_branch_are_found_at_any_depth(tmp_path: Path, where: str) -> None:
    plain = record(tmp_path / "fp32.pt", enabled=False, where=where, train=False)
    for at in (0, BLOCKS // 2, BLOCKS - 1):
        found = compare_runs(record(tmp_path / "bf16.pt", at=at, where=where, train=False), plain).unexplained
        assert found is not None, at
        assert found.module == f"blocks.{at}", (at, str(found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole_run)])
def test_rounding_passes(tmp_path: Path, dtype) -> None:
    plain = record(tmp_path / "fp32.pt", enabled=False)
    found = compare_runs(record(tmp_path / "narrow.pt", dtype=dtype), plain)
    assert found.unexplained is None, found.report()
    assert "cannot be told from rounding" in found.report()


class Experts(nn.Module):
    """A layer that uses the best of four experts for each row, which is a discrete choice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        scores = self.gate(x).float().softmax(-1)
        best, chosen = scores.max(-1)
        y = torch.stack([expert(x) for expert in self.experts], 1)
        return y[torch.arange(len(x)), chosen] * best[:, None]


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.cell, self.head = kind(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's LSTM in bf16 needs AVX512
            return self.head(self.cell(x.unflatten(0, (4, 4)))[0][:, -1])


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y / (1 + (y > 0).sum(-1, keepdim=True)) + y.argmax(-1, keepdim=True)


small = nn.Sequential
MODELS = {
    "linear": lambda: nn.Linear(8, 2),
    "gelu": lambda: small(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)),
    "relu": lambda: small(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)),
    "tanh": lambda: small(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)),
    "layer norm": lambda: small(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)),
    "batch norm": lambda: small(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)),
    "dropout": lambda: small(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 2)),
    "softmax": lambda: small(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 2)),
    "experts": Experts,
    "counts": Counted,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": lambda: small(
        nn.Unflatten(0, (4, 4)), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    ),
    "convolution": lambda: small(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()
    ),
    "pooling": lambda: small(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.MaxPool1d(2), nn.Flatten()),
}
PAIRS = [
    *((name, torch.bfloat16, torch.optim.SGD) for name in MODELS),
    ("relu", torch.float16, torch.optim.SGD),
    ("attention", torch.float16, torch.optim.SGD),
    ("gelu", torch.bfloat16, torch.optim.AdamW),
    ("tanh", torch.float16, torch.optim.SGD),
    ("experts", torch.float16, torch.optim.AdamW),
    ("layer norm", torch.bfloat16, torch.optim.AdamW),
    ("batch norm", torch.bfloat16, torch.optim.AdamW),
]


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # of mkldnn.flags
@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    sampled(PAIRS, range(0, len(PAIRS), 3)),
    ids=[f"{p[0]} {p[1]} {p[2].__name__}" for p in PAIRS],
)
def test_healthy_pairs_pass(tmp_path: Path, name: str, dtype, kind) -> None:
    def run(path: Path, enabled: bool) -> Path:
        torch.manual_seed(0)
        model = MODELS[name]()
        optimizer = kind(model.parameters(), lr=1e-2)
        with record_run(path, model, steps=2):
            for _ in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                    loss = model(torch.randn(16, 8)).float().square().mean()
                loss.backward()
                optimizer.step()
        return path

    found = compare_runs(run(tmp_path / "narrow.pt", True), run(tmp_path / "fp32.pt", False))
    assert found.differing > 0
    assert found.unexplained is None, found.report()
