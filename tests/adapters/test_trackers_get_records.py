"""The lines of docs/how/log_steps.md that pass each record to a tracker."""

import csv
from types import SimpleNamespace

import pytest
import torch
from accelerate.tracking import GeneralTracker
from lightning.pytorch.loggers import CSVLogger

from amp_plugin import GradScaler
from amp_plugin.adapters.accelerate import AmpAccelerator
from tests.adapters.accelerate_pair import reset
from tests.test_documents import ROOT


def line_of(tracker, **names):
    """Return the function that the page gives for a tracker."""
    page = (ROOT / "docs/how/log_steps.md").read_text(encoding="utf-8")
    row = next(row for row in page.splitlines() if row.startswith(f"| {tracker} |"))
    return eval(row.split("`log=")[1].split("` |")[0], names)


def train(log):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=8.0, log=log)
    for factor in (1.0, float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


SKIPPED = [0.0, 1.0, 0.0]


def test_lightnings_loggers(tmp_path):
    logger = CSVLogger(tmp_path, name="run", version=0)
    train(line_of("Lightning's loggers", logger=logger))
    logger.save()
    rows = list(csv.DictReader((tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()))
    assert [float(row["amp/skipped"]) for row in rows] == SKIPPED
    assert [float(row["amp/loss_scale"]) for row in rows] == [8.0, 8.0, 4.0]
    assert [int(row["step"]) for row in rows] == [1, 2, 3]


def test_accelerates_trackers():
    seen = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **_):
            seen.append((step, values["amp/skipped"]))

    reset()
    accelerator = AmpAccelerator(cpu=True, log_with=[Tracker()])
    accelerator.init_trackers("run")
    train(line_of("Accelerate's trackers", accelerator=accelerator))
    reset()
    assert seen == [*zip((1, 2, 3), SKIPPED, strict=True)]


def test_tensorboard_mlflow_and_wandb():
    seen = {"tensorboard": [], "mlflow": [], "wandb": []}
    writer = SimpleNamespace(add_scalar=lambda name, x, step: seen["tensorboard"].append((name, x, step)))
    mlflow = SimpleNamespace(
        log_metrics=lambda numbers, step: seen["mlflow"].append((step, numbers["amp/skipped"]))
    )
    wandb = SimpleNamespace(log=lambda numbers: seen["wandb"].append(numbers["amp/skipped"]))
    train(line_of("TensorBoard", writer=writer))
    train(line_of("MLflow", mlflow=mlflow))
    train(line_of("W&B", wandb=wandb))
    assert [x for name, x, _ in seen["tensorboard"] if name == "amp/skipped"] == SKIPPED
    assert seen["mlflow"] == [*zip((1, 2, 3), SKIPPED, strict=True)]
    assert seen["wandb"] == SKIPPED


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboards_own_writer_takes_the_line(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        train(line_of("TensorBoard", writer=writer))
    assert any(tmp_path.iterdir())
