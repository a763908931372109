import pytest
import torch

from tests.adapters.accelerate_pair import ours, prepared, stock


def trained(accelerator, steps=3):
    models, optimizers = prepared(accelerator)
    for _ in range(steps):
        with accelerator.accumulate(models[0]):
            accelerator.backward(models[0](1.0))
            optimizers[0].step()
            optimizers[0].zero_grad()
    return models[0], optimizers[0]


@pytest.mark.parametrize(("saver", "loader"), [(stock, ours), (ours, stock)])
def test_checkpoints_are_exchanged_with_stock_accelerate(saver, loader, tmp_path):
    first = saver(init_scale=8.0, growth_interval=2)
    trained(first)
    first.save_state(tmp_path)
    second = loader(init_scale=4.0, growth_interval=2)
    trained(second, steps=1)
    second.load_state(tmp_path)
    assert second.scaler.get_scale() == 16.0


def test_a_checkpoint_without_a_loss_scale(tmp_path):
    first = ours(precision="bf16")
    trained(first)
    first.save_state(tmp_path)
    assert not (tmp_path / "scaler.pt").exists()

    plain = stock()
    trained(plain, steps=0)
    with pytest.raises(FileNotFoundError):
        plain.load_state(tmp_path)

    resumed = ours(init_scale=32.0)
    model, optimizer = trained(resumed, steps=0)
    with pytest.warns(UserWarning, match=r"has no scaler.pt.*the loss scale stays at 32") as told:
        resumed.load_state(tmp_path)
    assert told[0].filename == __file__
    resumed.backward(model(3.0))
    optimizer.step()
    assert optimizer.optimizer.seen[-1][0][0].item() == 3.0


@pytest.mark.parametrize("call", ["save_state", "load_state"])
def test_optimizers_step_unscaled_while_state_is_saved_or_loaded(call, tmp_path):
    """FSDP creates an optimizer's state with a step whose gradients are zero.

    That step must not be scaled.
    """
    accelerator = ours(init_scale=8.0)
    model, optimizer = trained(accelerator)
    tracker = accelerator.scaler.state_dict()["_growth_tracker"]
    accelerator.save_state(tmp_path)

    def step(*_):
        model.weight.grad = torch.zeros(4)
        optimizer.step()

    getattr(accelerator, f"register_{call}_pre_hook")(step)
    getattr(accelerator, call)(tmp_path)
    assert optimizer.optimizer.seen[-1][0].tolist() == [0.0] * 4
    assert accelerator.scaler.state_dict()["_growth_tracker"] == tracker
    accelerator.backward(model(3.0))
    optimizer.step()
    assert optimizer.optimizer.seen[-1][0][0].item() == 3.0
