"""TRL's unmodified trainers resume exactly, and fp16 rollouts are closer to training than bf16 rollouts."""

import os

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from recipes.trl_rollouts import KINDS, PRECISIONS, STEPS, main, train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("precision", ["fp16", "bf16-true"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_losses_of_an_unbroken_one(kind, precision, tmp_path):
    def seen(trainer):
        names = ("loss", "grad_norm", "reward", "step")
        return [{n: line[n] for n in names if n in line} for line in trainer.state.log_history[:-1]]

    unbroken = train(kind, precision, tmp_path / "unbroken")
    train(kind, precision, tmp_path / "broken", stop=STEPS // 2)
    resumed = train(kind, precision, tmp_path / "broken", resume=True)
    assert len(seen(unbroken)) == STEPS
    assert seen(resumed)[STEPS // 2 :][-5:] == seen(unbroken)[-5:]
    if precision == "fp16":
        assert resumed.accelerator.scaler.get_scale() == unbroken.accelerator.scaler.get_scale() == 2.0**12


def test_fp16_has_the_smaller_gap_in_each_kind_of_training(tmp_path):
    told = []
    gaps = main(tmp_path, told.append)
    for sixteen, *others in zip(*(gaps[precision] for precision in PRECISIONS), strict=True):
        assert all(0 < 10 * sixteen < other for other in others)
    assert (tmp_path / "gap.png").stat().st_size > 10_000
    assert len(told) == len(KINDS) * len(PRECISIONS)
    for line in told:
        first, last = (float(number) for number in line.split(", KL")[0].split(": ")[1].split()[1::2])
        assert last > first if "reward" in line else last < first, line
