"""The purpose of each recipe: if its one important line is written naively, the result is measurably wrong.

Each naive version replaces one name in the recipe by code that a program without this package would contain.
It is compared with the recipe itself, both in fp16, and with the recipe in fp32.

``PYTHONPATH=. python tests/recipes/test_naive_versions.py FOLDER`` draws two of these comparisons for
docs/lab/recipes.md.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from amp_plugin import GradScaler
from recipes import clipping, gradient_penalty, several_losses, several_models
from recipes.config import ROOT, load_config


def run(recipe, precision="fp16", *overrides):
    path = ROOT / f"configs/{recipe.__name__.rpartition('.')[2]}.yaml"
    return recipe.train(load_config(recipe.Config, path, [f"precision={precision}", *overrides]))


def mean_of_last(values, count=10):
    return sum(values[-count:]) / count


def compared(recipe, options, measure, name, naive):
    """Measure the recipe in fp32, in fp16, and in fp16 with one of its names replaced."""
    fp32, right = (measure(run(recipe, precision, *options)) for precision in ("fp32", "fp16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, name, naive)
        return fp32, right, measure(run(recipe, "fp16", *options))


class TorchScaler(torch.amp.GradScaler):
    """torch's scaler, extended by the methods of ours that the recorder calls."""

    def __init__(self, device, *, losses=(), **options):
        super().__init__(device, **options)

    def register(self, *optimizers):
        pass

    def skipped_steps(self):
        return 0

    def last_step(self, optimizer):
        return SimpleNamespace(scale_before=self._get_scale_async().item())


# -- a penalty on scaled gradients --------------------------------------------------------------


def scaled_penalty(outputs, inputs, *, scaler):
    (grads,) = torch.autograd.grad(scaler.scale(outputs.float().sum()), inputs, create_graph=True)
    return grads.square().sum()


PENALTY_OPTIONS = ("steps=60", "loss_scale.init_scale=64", "loss_scale.growth_interval=1000")


@pytest.mark.whole_run
def test_a_penalty_on_scaled_gradients_stops_the_learning():
    options = PENALTY_OPTIONS
    measured = (lambda record: mean_of_last(record.losses), "gradient_penalty", scaled_penalty)
    fp32, right, naive = compared(gradient_penalty, options, *measured)
    assert right == pytest.approx(fp32, rel=0.02)
    assert naive > 1.5 * fp32


# -- clipping scaled gradients ------------------------------------------------------------------


def clip_scaled(self, optimizer, max_norm):
    """Clip ``.grad`` after the backward pass without unscaling it first."""
    return torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)


@pytest.mark.parametrize("kind", [TorchScaler, GradScaler])
def test_clipping_scaled_gradients_stops_the_learning(kind):
    options = ("steps=60", "width=4")
    naive_scaler = type("ClipsScaled", (kind,), {"clip_grad_norm_": clip_scaled})
    fp32, right, naive = compared(clipping, options, lambda record: record.losses, "GradScaler", naive_scaler)
    assert mean_of_last(right) == pytest.approx(mean_of_last(fp32), rel=0.1)
    assert mean_of_last(fp32) < 0.6 * fp32[0]
    assert mean_of_last(naive) > 0.95 * fp32[0]


# -- one division for gradients of two scales ---------------------------------------------------


class TwoScalesOneDivision(TorchScaler):
    """Scales the small loss by 256 times more, but divides the sum of gradients by the other loss's scale."""

    def scale(self, loss, *, name):
        return super().scale(loss) * (256 if name == "drawing" else 1)

    def get_scale(self, name="naming"):
        return super().get_scale() * (256 if name == "drawing" else 1)


SCALES_OPTIONS = ("steps=60", "loss_scale.init_scale=256", "loss_scale.growth_interval=8")
DRAWING = "drawing loss (squared ink)"


def test_two_scales_divided_by_one_weight_the_losses_anew():
    options = SCALES_OPTIONS
    drawing = lambda record: mean_of_last(record.curves[DRAWING])  # noqa: E731
    fp32, right, naive = compared(several_losses, options, drawing, "GradScaler", TwoScalesOneDivision)
    assert right == pytest.approx(fp32, rel=0.02)
    assert naive < 0.8 * fp32  # the loss had 256 times the intended weight


# -- an update after each optimizer -------------------------------------------------------------


class UpdatesEachTime(TorchScaler):
    """Updates the scale after each optimizer's step."""

    def step(self, optimizer):
        super().step(optimizer)
        super().update()

    def update(self):
        pass


def test_an_update_for_each_optimizer_halves_the_gradients_of_the_second():
    options = ("steps=6", "loss_scale.init_scale=16", "loss_scale.growth_interval=1")
    losses = lambda record: record.losses  # noqa: E731
    fp32, right, naive = compared(several_models, options, losses, "GradScaler", UpdatesEachTime)
    assert right == pytest.approx(fp32, rel=2e-3)
    assert max(abs(a - b) for a, b in zip(naive, fp32, strict=True)) > 0.03 * fp32[0]


# -- the pictures -------------------------------------------------------------------------------


def draw(path, label, runs):
    """Draw one line each for fp32, for fp16 with the recipe, and for fp16 with the naive version."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3), dpi=100, layout="constrained")
    names = ("fp32", "fp16, this recipe", "fp16, naive")
    for name, values, style in zip(names, runs, ("-", "--", "-"), strict=True):
        axis.plot(values, style, label=name, linewidth=1.5)
    axis.set_xlabel("optimizer steps")
    axis.set_ylabel(label)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    penalties = compared(
        gradient_penalty, PENALTY_OPTIONS, lambda record: record.losses, "gradient_penalty", scaled_penalty
    )
    draw(folder / "gradient_penalty_naive.png", "cross-entropy (nats)", penalties)
    drawings = compared(
        several_losses,
        SCALES_OPTIONS,
        lambda record: record.curves[DRAWING],
        "GradScaler",
        TwoScalesOneDivision,
    )
    draw(folder / "several_losses_naive.png", DRAWING, drawings)
