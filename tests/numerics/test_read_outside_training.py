"""A nan that reaches no gradient but is read by Python or NumPy is listed, but is not a finding."""

import json

import pytest
import torch
from scipy.special import logsumexp
from torch import nn
from torch.nn import functional

from amp_plugin import GradScaler, diagnose
from tests.commands import diagnose as amp


def trained_then(read, *, rounds=2):
    """Train, then read fp16 numbers outside of training. Return the diagnosis."""
    torch.manual_seed(0)
    net, x = nn.Linear(8, 1), torch.randn(2000, 8)
    with diagnose() as diagnosis:
        for _ in range(rounds):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.mse_loss(net(x), x.sum(1, keepdim=True))
            loss.backward()
            with torch.no_grad():
                read(300 * net(x).half())
    assert diagnosis.findings == []
    return diagnosis


READS = {
    "item": lambda p: (p**2).sum().item(),
    "float": lambda p: float((p**2).sum()),
    "numpy": lambda p: (p**2).float().numpy().max(),
    "tolist": lambda p: (p**2).tolist(),
    "argmin": lambda p: (p**2).argmin(),
    "topk": lambda p: (p**2).flatten().topk(2),
    "sort": lambda p: (p**2).sort(0),
    "median": lambda p: (p**2).median(),
    "scipy": lambda p: logsumexp((p**2).float()),
    "print": lambda p: str(p**2),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # by scipy 1.15
@pytest.mark.parametrize("name", READS)
def test_a_read_is_listed_once_with_op_and_line(name):
    diagnosis = trained_then(READS[name])
    (read,) = diagnosis.read
    assert read.op == "aten::pow.Tensor_Scalar"
    assert read.place.text == READS_LINES[name]
    report = diagnosis.report()
    assert report.startswith("no nan or inf reached a loss, a gradient or a weight\n")
    assert "`amp-plugin diagnose --strict train.py`" in report


READS_LINES = {
    name: f'"{name}": lambda p: {text},'
    for name, text in {
        "item": "(p**2).sum().item()",
        "float": "float((p**2).sum())",
        "numpy": "(p**2).float().numpy().max()",
        "tolist": "(p**2).tolist()",
        "argmin": "(p**2).argmin()",
        "topk": "(p**2).flatten().topk(2)",
        "sort": "(p**2).sort(0)",
        "median": "(p**2).median()",
        "scipy": "logsumexp((p**2).float())",
        "print": "str(p**2)",
    }.items()
}


@pytest.mark.parametrize(
    "read",
    [
        lambda p: (p * 0).max().item(),
        lambda p: torch.isfinite(p**2).all().item(),  # the program itself checks for infinities
        lambda p: p.masked_fill(p > 0, -float("inf")).argmax(),
        lambda p: torch.full((3,), float("inf")).min().item(),
    ],
    ids=["finite", "isfinite", "mask", "best"],
)
def test_what_is_finite_looked_for_or_on_purpose_is_not_listed(read):
    diagnosis = trained_then(read)
    assert diagnosis.read == []
    assert diagnosis.report() == "no harmful nan or inf was found"


def test_a_loss_scale_that_comes_down_is_not_listed_though_its_norms_are_logged():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**20)
    with diagnose() as diagnosis:
        for _ in range(10):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(3, 4)).float().sum()
            scaler.scale(loss).backward()
            print(float(scaler.clip_grad_norm_(optimizer, 1.0)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert (diagnosis.findings, diagnosis.read) == ([], [])


def test_the_methods_that_are_followed_are_torchs_own_again():
    before = torch.Tensor.numpy, torch.Tensor.tolist
    with diagnose():
        assert torch.Tensor.numpy is not before[0]
    assert (torch.Tensor.numpy, torch.Tensor.tolist) == before


SCRIPT = """\
import torch
w = torch.ones(4, requires_grad=True)
for _ in range(2):
    w.sum().backward()
    score = (w.detach().half() * 300) ** 2
    if score.isinf().any().item():
        print("score", score.mean().item())
END
"""


@pytest.mark.parametrize("end", ["", "raise ValueError('matrix contains invalid entries')"])
def test_the_command_lists_them_after_an_error_of_the_program_too(end, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("END", end))
    result = amp(str(script))
    assert result.exit_code == bool(end)
    assert "  aten::pow.Tensor_Scalar made inf in forward, in fp16, at " in result.stdout
    assert ("before this error" in result.stdout) is bool(end)
    (read,) = json.loads(amp("--json", str(script)).stdout)["read"]
    assert read["place"]["line"] == 5
    assert amp("--strict", str(script)).exit_code == 1


def test_a_program_that_does_not_train_is_not_called_healthy_without_a_word():
    """A run that resumes at its last step, say, or one that evaluates."""
    with diagnose() as diagnosis:
        torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum()
    said = "no backward pass and no optimizer step was seen: only forward passes were checked"
    assert diagnosis.report().splitlines()[1] == said
