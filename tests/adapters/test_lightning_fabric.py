"""FabricAmpPrecision: what the stock Fabric plugin refuses or does wrongly, and ordinary training."""

import copy
import pickle
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.utilities.throughput import _plugin_to_compute_dtype
from torch import nn

from amp_plugin.adapters.lightning import AmpPrecision, FabricAmpPrecision, classes_for
from amp_plugin.scaling.penalty import grad, gradient_penalty
from tests.adapters import lightning_models
from tests.adapters.lightning_models import QUIET

pytestmark = QUIET
stock = partial(lightning_models.stock, cls=MixedPrecision)


class Weights(nn.Module):
    """A module with two weights. The gradient of each is the number that it is multiplied by."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.a + x * self.b


def set_up(plugin, lr=1.0, optimizers=1, **options):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    module = Weights()
    split = [module.parameters()] if optimizers == 1 else [[module.a], [module.b]]
    model, *steppers = fabric.setup(module, *(torch.optim.SGD(params, lr=lr, **options) for params in split))
    return fabric, model, steppers


X = torch.tensor(3.0)


def test_inputs_keep_their_dtypes():
    seen = {}

    class Module(nn.Linear):
        def forward(self, x, labels, wide):
            seen.update(x=x.dtype, labels=labels.dtype, wide=wide.dtype)
            return super().forward(x), wide

    def run(plugin):
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        model = fabric.setup(Module(2, 1))
        return model(torch.ones(1, 2), torch.zeros(1), torch.ones(1, dtype=torch.float64))

    run(stock())
    assert set(seen.values()) == {torch.float16}
    out, wide = run(FabricAmpPrecision("fp16"))
    assert seen == {"x": torch.float32, "labels": torch.float32, "wide": torch.float64}
    assert (out.dtype, wide.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_clipping_as_often_as_one_likes(precision, fused):
    def clipped(plugin):
        fabric, model, (optimizer,) = set_up(plugin, fused=fused)
        fabric.backward(model(X))
        fabric.clip_gradients(model, optimizer, clip_val=2.0)
        return model, optimizer, fabric.clip_gradients(model, optimizer, max_norm=1.0)

    with pytest.raises((RuntimeError, NotImplementedError)):
        clipped(stock())
    model, optimizer, norm = clipped(plugin := FabricAmpPrecision(precision))
    assert norm.item() == pytest.approx(8**0.5)
    assert plugin.clip_grad_norm_(optimizer, 10.0).item() == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(RuntimeError, match="has not stepped"):
        plugin.last_step(optimizer)
    optimizer.step()
    assert model.a.item() == pytest.approx(1 - 0.5**0.5, rel=1e-5)
    result, scale = plugin.last_step(optimizer), 2.0**16 if precision == "fp16" else 1.0
    assert (result.skipped, result.scale_before, result.scale_after) == (False, scale, scale)
    assert result.norm.isfinite()
    assert _plugin_to_compute_dtype(plugin) is plugin.dtype_plan.compute_dtype


def test_clipping_an_overflow_skips_the_step():
    fabric, model, (optimizer,) = set_up(stock())
    fabric.backward(model(X) * torch.inf)
    with pytest.raises(RuntimeError):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    plugin = FabricAmpPrecision(init_scale=8.0)
    fabric, model, (optimizer,) = set_up(plugin)
    for clip in (
        lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False),
        lambda: plugin.clip_grad_norm_(optimizer, 1.0),
    ):
        optimizer.zero_grad()
        fabric.backward(model(X) * torch.inf)
        assert not torch.isfinite(clip())
        optimizer.step()
    assert (model.a.item(), plugin.skipped_steps, plugin.scaler.get_scale()) == (1.0, 2, 2.0)


def test_a_closure_may_be_the_first_thing_a_plugin_sees(fused):
    def run(plugin):
        fabric, model, (optimizer,) = set_up(plugin, fused=fused)

        def closure():
            optimizer.zero_grad()
            loss = model(X)
            fabric.backward(loss)
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        return losses, model.a.item()

    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        run(stock(8.0))
    assert run(FabricAmpPrecision(init_scale=8.0)) == ([6.0, -12.0], -5.0)


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_gradient_penalties_pass_the_guard(package):
    plugin = classes_for(package).FabricAmpPrecision(init_scale=1024.0)
    fabric = plugin.package.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = fabric.setup(module := Weights(), torch.optim.SGD(module.parameters(), lr=1.0))
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        torch.autograd.grad(model(x), x)
    assert grad(model(x), x, scaler=plugin.scaler)[0].item() == 2.0  # a + b
    assert gradient_penalty(model(x), x, scaler=plugin.scaler).item() == 4.0
    (derivative,) = plugin.grad(model(x), x, create_graph=True)
    fabric.backward(derivative.square() + plugin.gradient_penalty(model(x), x))
    assert plugin.package.wrappers._in_fabric_backward is False
    optimizer.step()
    # two terms, each with the gradient d/da (a + b)^2 = 4
    assert (model.a.item(), model.b.item()) == (-7.0, -7.0)


def test_the_loss_scale_is_saved_with_fabric(tmp_path):
    plugin = FabricAmpPrecision(init_scale=8.0)
    fabric, model, (optimizer,) = set_up(plugin)
    fabric.backward(model(X) * torch.inf)
    optimizer.step()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "precision": plugin})

    fabric.save(tmp_path / "bf16.ckpt", {"precision": FabricAmpPrecision("bf16")})
    with pytest.warns(UserWarning, match=r"FabricAmpPrecision\('fp16'\): .*the scale stays at 4"):
        fabric.load(tmp_path / "bf16.ckpt", {"precision": plugin})
    for other in (FabricAmpPrecision(), stock()):
        fabric, model, _ = set_up(other)
        state = {"model": model, "precision": other}
        fabric.load(tmp_path / "a.ckpt", state)
        fabric.backward(model(X))
        assert other.scaler.get_scale() == 4.0


def test_backward_inside_fabric_autocast_runs_without_it():
    on = []
    fabric, model, _ = set_up(FabricAmpPrecision("bf16"))
    model.a.register_hook(lambda _: on.append(torch.is_autocast_enabled("cpu")))
    with fabric.autocast():
        assert torch.is_autocast_enabled("cpu")
        fabric.backward(model(X))
    assert on == [False]
    with torch.autocast("cpu", torch.bfloat16):  # before any module is set up
        Fabric(accelerator="cpu", plugins=[FabricAmpPrecision("bf16")]).backward(model.a * 2.0)
    assert on == [False, False]


@pytest.mark.parametrize("order", ["model first", "optimizers first"])
def test_an_optimizer_that_accumulates_before_its_first_step(order):
    """Fabric knows the optimizer from set-up.

    So its gradients are converted when steps of the other one change the scale.
    """
    fabric = Fabric(
        accelerator="cpu", devices=1, plugins=[FabricAmpPrecision(init_scale=4.0, growth_interval=1)]
    )
    module = Weights()
    optimizers = [torch.optim.SGD([param], lr=1.0) for param in (module.a, module.b)]
    if order == "model first":
        model, first, second = fabric.setup(module, *optimizers)
    else:
        first, second = fabric.setup_optimizers(*optimizers)
        model = fabric.setup_module(module)
    for x in (2.0, 4.0, 9.0):
        fabric.backward(model(torch.tensor(x)))
        first.step()
        first.zero_grad()
    second.step()
    assert (model.a.item(), model.b.item()) == (1.0 - 15.0, 1.0 - 15.0)


@pytest.mark.parametrize(
    ("make", "first"),
    [(stock, torch.bfloat16), (lambda: FabricAmpPrecision("fp16"), torch.float16)],
    ids=["stock", "ours"],
)
def test_a_thread_gets_the_dtype_of_the_plugin(make, first):
    """nn.DataParallel runs replicas in threads. There autocast is on, but with torch's default dtype."""
    plugin, module, dtypes = make(), nn.Linear(2, 2), []
    model = Fabric(accelerator="cpu", devices=1, plugins=[plugin]).setup(module)
    assert model(torch.ones(1, 2)).dtype is torch.float32

    def worker(replica, autocast):
        with torch.autocast("cpu", enabled=autocast):
            dtypes.append(replica(torch.ones(1, 2)).dtype)
            dtypes.append(torch.get_autocast_dtype("cpu"))

    for autocast in (True, False):  # the replica is made inside a region, or outside of one
        with plugin.forward_context() if autocast else nullcontext():
            replica = module._replicate_for_data_parallel()
        replica.weight, replica.bias = module.weight, module.bias
        thread = threading.Thread(target=worker, args=(replica, autocast))
        thread.start()
        thread.join()
    assert dtypes == [first, torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_plugin_can_be_pickled_as_spawned_processes_need_it(precision):
    plugin = FabricAmpPrecision(precision, init_scale=64.0)
    for copied in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        fabric = Fabric(plugins=[copied], accelerator="cpu")
        net = torch.nn.Linear(4, 1)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        assert copied.settings == plugin.settings
        assert copied.optimizer_steps == 1
    assert plugin.optimizer_steps == 0


def test_a_module_set_up_can_be_copied_and_pickled():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FabricAmpPrecision("bf16")])
    module = nn.Linear(2, 2)
    model = fabric.setup(module)
    x = torch.ones(1, 2)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


def test_a_module_set_up_compiles_without_graph_breaks():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FabricAmpPrecision("bf16")])
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    plain = fabric.setup(copy.deepcopy(module))(x)
    compiled = fabric.setup(torch.compile(module, backend="eager", fullgraph=True))
    assert torch.equal(compiled(x), plain)


def test_an_optimizer_that_was_not_set_up_takes_no_scaled_gradients():
    fabric = Fabric(accelerator="cpu", plugins=[plugin := FabricAmpPrecision("fp16", one_pass=False)])
    optimizer = torch.optim.SGD((module := Weights()).parameters(), lr=1.0, fused=True)
    fabric.backward(fabric.setup(module)(X))
    with pytest.raises(RuntimeError, match=r"2 gradients are multiplied.*fabric\.setup_optimizers"):
        optimizer.step()
    plugin.scaler.step(optimizer)
    assert module.a.item() == 1.0 - 3.0


def test_errors():
    for plugin in (FabricAmpPrecision(), AmpPrecision()):
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        with pytest.raises(
            RuntimeError, match=r"does not know its device before.*fabric\.setup with a FabricA"
        ):
            fabric.autocast()
    with pytest.raises(ValueError, match=r"delete precision=\.\.\. and keep this plugin"):
        Fabric(accelerator="cpu", precision="16-mixed", plugins=[FabricAmpPrecision()])
    with pytest.raises(TypeError, match=r"in Fabric use FabricAmpPrecision\('fp16'\)"):
        fabric.setup(nn.Linear(1, 1))

    strategy = type("DeepSpeedStrategy", (SingleDeviceStrategy,), {})("cpu")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FabricAmpPrecision()], strategy=strategy)
    with pytest.raises(TypeError, match="does not work under DeepSpeedStrategy"):
        fabric.setup(nn.Linear(1, 1))
