"""Subclasses of the plugin, and a module's methods around the step, see the same as under the stock plugin."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision

from amp_plugin import AmpPrecision, FabricAmpPrecision
from tests.adapters.lightning_models import QUIET, Linear, fit, regression, stock

pytestmark = QUIET
CLIP = 0.5
PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


def plugin_of(cls, precision):
    """Return the stock plugin or ours, or a subclass of one."""
    if issubclass(cls, AmpPrecision):
        return cls(precision, **({"init_scale": 2.0**10} if precision == "fp16" else {}))
    return stock(2.0**10, cls=cls) if precision == "fp16" else cls("bf16-mixed", "cpu")


def norm(params):
    return torch.stack([param.grad.norm() for param in params]).norm().item()


class Looks:
    """Records gradients before and after Lightning's clipping, and after the step."""

    def clip_gradients(self, optimizer, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), norm(self.main_params(optimizer))]
        super().clip_gradients(optimizer, *args, **kwargs)
        self.seen.append(norm(self.main_params(optimizer)))

    def optimizer_step(self, optimizer, model, closure, **kwargs):
        output = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        self.seen.append(norm(model.parameters()))
        return output


class ClipsByItself:
    def clip_grad_by_norm(self, optimizer, clip_val):
        self.clip_by(torch.nn.utils.clip_grad_norm_, optimizer, clip_val)

    def clip_grad_by_value(self, optimizer, clip_val):
        self.clip_by(torch.nn.utils.clip_grad_value_, optimizer, clip_val)

    def clip_by(self, clip, optimizer, clip_val):
        self.seen = [*getattr(self, "seen", []), norm(self.main_params(optimizer))]
        clip([*self.main_params(optimizer)], clip_val)


class ClipsByAnotherFunction:
    """A plugin whose clipping method is replaced on the instance."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []
        self.clip_grad_by_norm = lambda optimizer, _: self.seen.append(norm(self.main_params(optimizer)))


class EditsAfterwards:
    def _after_closure(self, model, optimizer):
        super()._after_closure(model, optimizer)
        self.seen = [*getattr(self, "seen", []), norm(model.parameters())]
        for param in self.main_params(optimizer):
            param.grad.add_(param.detach(), alpha=0.1)


class ClipsWeightsOnly:
    seen = ()

    def main_params(self, optimizer):
        return (param for param in super().main_params(optimizer) if param.ndim == 2)


def trained(plugin, module=None, **options):
    module = module or Linear(optimizer=torch.optim.SGD)
    fit(module, plugin, steps=3, data=regression(), gradient_clip_val=CLIP, **options)
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize(
    ("mixin", "algorithm"),
    [
        (Looks, "norm"),
        (Looks, "value"),
        (ClipsByItself, "norm"),
        (ClipsByItself, "value"),
        (ClipsByAnotherFunction, "norm"),
        (EditsAfterwards, "norm"),
        (ClipsWeightsOnly, "norm"),
        (ClipsWeightsOnly, "value"),
    ],
)
def test_a_subclass_sees_and_clips_unscaled_gradients(mixin, algorithm, precision):
    runs = []
    for base in (AmpPrecision, MixedPrecision):
        plugin = plugin_of(type("Extended", (mixin, base), {}), precision)
        runs.append((trained(plugin, gradient_clip_algorithm=algorithm), [*plugin.seen]))
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)
    assert runs[0][1] or mixin is ClipsWeightsOnly


class StepsByItself(Linear):
    """A module that warms up its learning rate, and reads gradients after the step."""

    def __init__(self):
        super().__init__(optimizer=torch.optim.SGD)
        self.seen = []

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.param_groups[0]["lr"] = 0.01 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)
        self.seen.append(norm(self.parameters()))


class Clears(StepsByItself):
    optimizer_step = Linear.optimizer_step

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if self.net[0].weight.grad is not None:
            self.seen.append(norm(self.parameters()))
        optimizer.zero_grad()


@pytest.mark.parametrize("cls", [StepsByItself, Clears])
def test_a_module_sees_them_around_its_step(cls, precision):
    runs = []
    for base in (AmpPrecision, MixedPrecision):
        module = cls()
        runs.append((trained(plugin_of(base, precision), module), module.seen))
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)
    assert runs[0][1][0] == pytest.approx(CLIP, rel=1e-5)


class OwnRegion(AmpPrecision):
    def autocast_context_manager(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)


def test_a_subclass_may_change_the_region_of_all_stages():
    class Evaluated(Linear):
        def training_step(self, batch, batch_idx):
            seen.append(self.net(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append(self.net(batch[0]).dtype)

    module, seen = Evaluated(), []
    module.val_dataloader = lambda: regression(1)
    fit(module, OwnRegion("fp16"), steps=2, data=regression(2), max_epochs=1)
    assert seen == [torch.bfloat16] * 3


# -- Fabric -------------------------------------------------------------------------------------

FABRIC_METHODS = (
    "convert_module", "tensor_init_context", "module_init_context", "forward_context", "convert_input",
    "convert_output", "pre_backward", "backward", "post_backward", "optimizer_step", "main_params",
    "unscale_gradients", "state_dict", "load_state_dict",
)  # fmt: skip


def noting_calls(base):
    """Return a subclass that overrides every method to record its arguments and the gradients."""

    def noting(name):
        def method(self, *args, **kwargs):
            before = self.norm()
            result = getattr(base, name)(self, *args, **kwargs)
            self.calls.append(
                (name, [type(given).__name__ for given in args], [*kwargs], before, self.norm())
            )
            return result

        return method

    return type(base.__name__, (base,), {name: noting(name) for name in FABRIC_METHODS})


def fabric_run(plugin, optimizer_class, folder):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    plugin.calls = []
    plugin.norm = lambda: 0.0 if net.weight.grad is None else norm(net.parameters())
    fabric = Fabric(accelerator="cpu", plugins=[plugin])
    with fabric.init_module(), fabric.init_tensor():
        inputs = torch.ones(2, 4)
    model, optimizer = fabric.setup(net, optimizer_class(net.parameters(), lr=0.1))
    for step in range(4):
        fabric.backward(model(inputs).square().mean())
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "precision": plugin}
    fabric.save(folder / "run.ckpt", state)
    fabric.load(folder / "run.ckpt", state)
    return [*net.parameters()]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.RMSprop])
def test_methods_of_a_subclass_for_fabric_are_called_as_under_the_stock_plugin(
    precision, optimizer_class, tmp_path
):
    options = {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)} if precision == "fp16" else {}
    theirs = noting_calls(FabricMixedPrecision)(PRECISIONS[precision], "cpu", **options)
    mine = noting_calls(FabricAmpPrecision)(
        precision, **({"init_scale": 2.0**10} if precision == "fp16" else {})
    )
    weights = [fabric_run(plugin, optimizer_class, tmp_path) for plugin in (theirs, mine)]
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)
    assert {call[0] for call in mine.calls} == {*FABRIC_METHODS}
    for seen, expected in zip(mine.calls, theirs.calls, strict=True):
        assert seen[:3] == expected[:3]
        assert seen[3:] == pytest.approx(expected[3:], rel=1e-4, abs=1e-6), seen[0]
