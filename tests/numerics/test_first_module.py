"""The module at which a step went wrong is named, and nothing else notices the watcher."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from amp_plugin import GradScaler, autocast
from amp_plugin.numerics.first_module import ModuleWatch

pytestmark = pytest.mark.filterwarnings("ignore:step . of SGD was skipped, and nothing is scaled")


class LogOf(nn.Module):
    """A layer that computes a logarithm, and the logarithm of 0 if the loop asks for it."""

    factor = 1.0

    def forward(self, x):
        return (x.abs() * self.factor + (self.factor > 0)).log()


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), LogOf()), nn.Linear(4, 1))


class Loop:
    """Runs a plain loop with a watcher. Steps 3 and 4 fail in the given way."""

    def __init__(self, net, *, call=None, enabled=False, dtype=torch.float32):
        self.net, self.call, self.dtype = net, call or net, dtype
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", enabled=enabled, init_scale=256.0)
        self.scaler.register(self.optimizer, names=net)
        self.watch = ModuleWatch(self.scaler.core.log, [net])
        self.watch.open()

    def step(self, x=None, *, factor=1.0):
        x = torch.ones(3, 4) if x is None else x
        with autocast("cpu", dtype=torch.float16, enabled=self.dtype is torch.float16):
            out = self.call(x)
        self.scaler.scale(out.float().mean() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.last_step(self.optimizer)

    def hooks(self):
        return sum(len(module._forward_hooks) for module in self.net.modules())


def found(loop, **wrong):
    for _ in range(2):
        loop.step()
    loop.step(**wrong)
    result = loop.step(**wrong)
    assert result.skipped
    return result.overflow_report()


def test_a_module_whose_output_is_not_finite():
    loop = Loop(make_net())
    loop.step()
    loop.net[1][1].factor = 0.0
    loop.step()
    report = loop.step().overflow_report()
    assert "the output of 1.1 (LogOf) was the first with inf; the largest magnitude before" in str(report)
    assert report.modules.backward


def test_a_batch_that_is_not_finite():
    report = found(Loop(make_net()), x=torch.full((3, 4), torch.nan))
    assert "In the forward pass the input of 0 (Linear) was the first with nan." in str(report)


@pytest.mark.parametrize(("factor", "value"), [(torch.inf, "inf"), (1e6, "inf")])
def test_a_gradient_that_is_not_finite(factor, value):
    report = found(Loop(make_net(), enabled=True, dtype=torch.float16), factor=factor)
    assert not report.modules.forward
    assert f"In the backward pass the gradient of the output of 2 (Linear) was the first with {value}" in str(
        report
    )


def test_a_gradient_within_the_model():
    class Steep(nn.Module):
        def forward(self, x):
            return (x - x.detach()).abs().sqrt()

    net = nn.Sequential(nn.Linear(4, 4), Steep(), nn.Linear(4, 1))
    report = found(Loop(net))
    assert not report.modules.forward
    assert "the gradient of the output of 0 (Linear) was the first with nan" in str(report)


def test_a_parameter_used_outside_of_the_modules_is_not_blamed_on_one():
    net = make_net()
    net.scale = nn.Parameter(torch.ones(()))
    loop = Loop(net, call=lambda x: net(x).detach() * net.scale)
    assert "and at what is computed outside of modules" in str(found(loop, factor=torch.nan))


@pytest.mark.parametrize("enabled", [True, False])
def test_an_overflow_of_only_weight_gradients_is_blamed_on_the_loss_scale_if_there_is_one(enabled):
    """The weight gradient is the product of large inputs and finite output gradients."""
    net = nn.Sequential(nn.Linear(4, 1))
    nn.init.constant_(net[0].weight, 1e-3)
    loop = Loop(net, enabled=enabled, dtype=torch.float16)
    report = found(loop, x=torch.full((3, 4), 3e4), factor=1.0 if enabled else 256.0)
    assert report.inf == ("0.weight",)
    assert "inputs, outputs and output gradients of all modules were finite" in report.where()
    blames_scale = "the loss scale was probably too high for them" in report.where()
    blames_modules = "look at the backward pass of the modules that own these parameters" in report.where()
    assert (blames_scale, blames_modules) == (enabled, not enabled)
    assert str(report).endswith(report.where())


def test_each_of_two_optimizers_that_step_after_one_backward_pass_names_it():
    net = make_net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (net[0], net[2])]
    scaler = GradScaler("cpu", enabled=False)
    with ModuleWatch(scaler.core.log, [net]):
        for number in range(5):
            (net(torch.ones(3, 4)).mean() * (1.0 if number == 3 else torch.inf)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            modules = [scaler.last_step(optimizer).overflow_report().modules for optimizer in optimizers]
            if number in {0, 3}:  # the hooks come after the first skipped step
                assert modules == [None, None]
            else:
                assert all("output of 2 (Linear) was the first with inf" in str(told) for told in modules)


def test_the_run_that_only_skips_and_the_error_name_it():
    loop = Loop(make_net())
    loop.scaler = GradScaler("cpu", enabled=False, on_nonfinite="raise")
    loop.watch.close()
    loop.watch = ModuleWatch(loop.scaler.core.log, [loop.net])
    loop.watch.open()
    with pytest.raises(FloatingPointError):
        loop.step(torch.full((3, 4), torch.nan))
    with pytest.raises(FloatingPointError, match=r"the input of 0 \(Linear\) was the first with nan"):
        loop.step(torch.full((3, 4), torch.nan))


def test_hooks_are_on_from_the_first_skip_and_for_some_steps():
    loop = Loop(make_net())
    told = []
    for number in range(14):
        loop.step(factor=torch.nan if number == 2 else 1.0)
        told.append(loop.hooks() > 0)
    assert told == [2 <= number < 10 for number in range(14)]


@pytest.mark.filterwarnings("ignore:50 steps of SGD in a row")
def test_a_run_has_hooks_for_a_bounded_number_of_steps():
    loop = Loop(make_net())
    seen = 0
    for _ in range(100):
        loop.step(factor=torch.nan)
        seen += loop.hooks() > 0
    assert seen == 64
    assert not loop.scaler.core.log._hearers


def test_no_op_waits_and_no_mode_is_used():
    """Measurements stay on the device until a step is skipped."""
    loop, seen = Loop(make_net()), []
    for is_watched in (False, True):
        assert (loop.hooks() > 0) is is_watched
        with torch.profiler.profile() as profile:
            loop.net(torch.ones(3, 4)).mean().backward()
        loop.optimizer.zero_grad()
        seen.append({event.key for event in profile.key_averages()})
        loop.step(factor=torch.nan)
    assert "aten::aminmax" in seen[1] - seen[0]
    assert not (seen[1] - seen[0]) & {
        "aten::item",
        "aten::_local_scalar_dense",
        "aten::copy_",
        "aten::is_nonzero",
    }


def test_hooked_models_are_copied_and_pickled_without_the_hooks():
    loop = Loop(make_net())
    loop.step(factor=torch.nan)
    assert loop.hooks()
    x = torch.ones(3, 4)
    torch.save(loop.net, file := io.BytesIO())
    file.seek(0)
    for other in (
        copy.deepcopy(loop.net),
        pickle.loads(pickle.dumps(loop.net)),
        torch.load(file, weights_only=False),
    ):
        before = len(loop.watch._numbers)
        assert torch.equal(other(x), loop.net(x))
        assert len(loop.watch._numbers) > before
        now = len(loop.watch._numbers)
        other(x).sum().backward()
        assert len(loop.watch._numbers) == now
        assert not loop.net[0].weight.grad


def test_a_pickle_loads_where_this_package_is_not_installed(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2))
    loop = Loop(net)
    loop.step(torch.full((3, 2), torch.nan))
    assert loop.hooks()
    (tmp_path / "net.pickle").write_bytes(pickle.dumps(net))
    program = (
        "import sys; sys.modules['amp_plugin'] = None\n"
        "import pickle, torch; net = pickle.load(open('net.pickle', 'rb')); print(net(torch.ones(1, 2)).shape)"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch.Size([1, 2])" in done.stdout


NOT_A_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo finds hooks there


@pytest.mark.filterwarnings(NOT_A_LEAF)
@pytest.mark.parametrize("how", ["compile(net)", "function", "net.compile()"])
@pytest.mark.parametrize("is_new", [False, True])
def test_nothing_is_compiled_again(how, is_new):
    """Graphs that are compiled while hooks are registered equal those compiled without hooks."""
    assert compiled_frames(how, is_new=is_new, is_watched=True) == compiled_frames(how, is_new=is_new)


def compiled_frames(how, *, is_new, is_watched=False):
    torch._dynamo.reset()
    net, counter = make_net(), CompileCounter()
    if how == "compile(net)":
        call = torch.compile(net, backend=counter)
    elif how == "function":
        call = torch.compile(lambda x: net(x) + 1, backend=counter)
    else:
        net.compile(backend=counter)
        call = net
    loop = Loop(net, call=call)
    if not is_watched:
        loop.watch.close()
    if is_new:
        loop.call = net[0]
        loop.step(factor=torch.nan)
        loop.call = call
        assert (loop.watch._left > 0) is is_watched
    for number in range(20):
        loop.step(factor=torch.nan if number == 2 else 1.0)
    assert not loop.hooks()
    return counter.frame_count


@pytest.mark.filterwarnings(NOT_A_LEAF)
def test_of_compiled_modules_the_outermost_is_seen_and_the_rest_is_named_as_unseen():
    torch._dynamo.reset()
    net = make_net()
    net[1].compile(backend="eager")
    loop = Loop(net)
    loop.step()
    net[1][1].factor = 0.0
    loop.step()
    report = loop.step().overflow_report()
    assert "the output of 1 (Sequential) was the first with inf" in str(report)
    assert "Not looked into: 1 (compiled)." in str(report)
    net[1][1].factor = 1.0
    for _ in range(9):
        loop.step()
    assert loop.watch._left == 0
    assert "_compiled_call_impl" in vars(net[1])


def test_a_whole_compiled_step_says_that_nothing_was_seen():
    torch._dynamo.reset()
    net = make_net()
    loop = Loop(net, call=torch.compile(net, backend="eager"))
    assert "No call of a module was seen: they ran in compiled code" in str(found(loop, factor=torch.nan))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_left_alone():
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1))
    report = found(Loop(net), x=torch.full((3, 4), torch.nan))
    assert "the input of 1 (Linear) was the first with nan" in str(report)
    assert "Not looked into: 0 (scripted)." in str(report)


def test_a_failure_within_is_one_warning(monkeypatch):
    loop = Loop(make_net())
    loop.step(factor=torch.nan)
    monkeypatch.setattr(torch, "aminmax", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="the watch of modules has ended: ZeroDivisionError") as warned:
        loop.step()
    loop.step()
    assert len(warned) == 1
    assert not loop.hooks()


def test_nothing_is_kept_afterwards():
    loop = Loop(make_net())
    for _ in range(3):
        loop.step(factor=torch.nan)
    loop.watch.close()
    net = weakref.ref(loop.net)
    del loop
    gc.collect()
    assert net() is None


def test_transforms_and_checkpoints_go_on():
    net = make_net()

    def call(x):
        torch.func.vmap(net)(x)
        torch.func.grad(lambda x: net(x).sum())(x)
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)

    report = found(Loop(net, call=call), x=torch.full((3, 4), torch.nan))
    assert "the input of 0 (Linear) was the first with nan" in str(report)
