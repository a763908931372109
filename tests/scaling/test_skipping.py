"""Invariant 2: a step with a gradient that is not finite changes nothing. And what is said of it."""

import math
import weakref

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling import OverflowReport, step_result

OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "fused": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
]


def build(cls, options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, cls(model.parameters(), lr=0.1, **options)


def step(model, optimizer, scaler, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def everything(model, optimizer):
    """All numbers of a model and its optimizer, missing state being zero."""
    state = [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return [p.detach().clone() for p in model.parameters()], state


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_skip_changes_nothing(cls, options, poison):
    model, optimizer = build(cls, options)
    scaler = GradScaler("cpu", init_scale=8.0)
    good, bad = torch.ones(2, 4), torch.full((2, 4), poison)
    step(model, optimizer, scaler, good)
    before = everything(model, optimizer)
    step(model, optimizer, scaler, bad)
    after = everything(model, optimizer)
    assert all(map(torch.equal, before[0] + before[1], after[0] + after[1]))
    assert scaler.last_step(optimizer).skipped
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_a_skipped_first_step_leaves_no_trace(cls, options):
    """torch's fused SGD allocates its momentum with empty_like and returns before writing it."""
    bad = torch.full((2, 4), math.inf)
    results = []
    for first in ([bad], []):
        model, optimizer = build(cls, options)
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for x in [*first, torch.ones(2, 4), torch.ones(2, 4) * 2]:
            step(model, optimizer, scaler, x)
        results.append(everything(model, optimizer))
    assert all(map(torch.equal, results[0][0] + results[0][1], results[1][0] + results[1][1]))


def test_torchs_skipped_first_step_leaves_momentum_behind():
    """Memory that was never written: the next good step multiplies it by the momentum and adds it."""
    state = {}
    for cls in (torch.amp.GradScaler, GradScaler):
        model, optimizer = build(torch.optim.SGD, {"momentum": 0.9, "fused": True})
        step(model, optimizer, cls("cpu", init_scale=8.0), torch.full((2, 4), math.inf))
        state[cls] = [s for s in optimizer.state.values() if s.get("momentum_buffer") is not None]
    assert state[torch.amp.GradScaler]
    assert not state[GradScaler]


def test_torchs_sum_of_flags_makes_the_fused_kernel_step():
    """What two devices that both overflow give: 2.0."""
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([param], lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((param * math.inf).sum()).backward()
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    found["another device"] = torch.ones(())
    scaler.step(optimizer)
    assert param.isnan().any()


@pytest.mark.parametrize("fused", [False, True])
def test_each_optimizer_decides_for_itself(weights, fused):
    a, b = weights(fused=fused), weights(fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(a.optimizer, b.optimizer)
    scaler.scale(a.loss(math.inf) + b.loss(5.0)).backward()
    scaler.step(a.optimizer)
    scaler.step(b.optimizer)
    scaler.update()
    assert (a.value, b.value) == (0.0, -5.0)
    assert scaler.get_scale() == 4.0
    assert (scaler.skipped_steps(), scaler.skipped_steps(a.optimizer), scaler.skipped_steps(b.optimizer)) == (
        1,
        1,
        0,
    )


@pytest.mark.parametrize("fused", [False, True])
def test_the_result_of_a_step(weights, fused):
    one = weights(fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with pytest.raises(RuntimeError, match="has not stepped under this scaler"):
        scaler.last_step(one.optimizer)
    scaler.scale(one.loss(3.0)).backward()
    scaler.clip_grad_norm_(one.optimizer, 1.0)
    scaler.step(one.optimizer)
    first = scaler.last_step(one.optimizer)
    assert first.scale_before == first.scale_after == 8.0
    scaler.update()
    assert first.skipped is False
    assert first.skipped_if_known() is False
    assert first.norm.item() == pytest.approx(3.0 * 12**0.5, rel=1e-6)
    assert (first.scale_before, first.scale_after) == (8.0, 16.0)
    assert first.overflow_report() == OverflowReport()
    assert not first.overflow_report()
    assert str(first.overflow_report()) == "no overflow"
    one.optimizer.zero_grad()
    scaler.scale(one.loss(math.inf)).backward()
    scaler.step(one.optimizer)
    scaler.update()
    assert first.scale_after == 16.0
    assert not first.skipped
    second = scaler.last_step(one.optimizer)
    assert (second.skipped, second.scale_before, second.scale_after) == (True, 16.0, 8.0)
    assert repr(second) == "StepResult(skipped=True, norm=inf, scale_before=16.0, scale_after=8.0)"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("names", ["module", "pairs", "mapping", "none"])
def test_the_report_names_the_parameters(fused, names):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu")
    given = {
        "module": model,
        "pairs": model.named_parameters(),
        "mapping": dict(model.named_parameters()),
        "none": None,
    }[names]
    scaler.register(optimizer, names=given)
    model[0].bias.requires_grad_(False)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model[0].weight.grad[0, 0] = math.inf
    model[1].bias.grad[0] = math.nan
    model[1].bias.grad[1] = math.inf
    scaler.step(optimizer)
    optimizer.zero_grad()
    report = scaler.last_step(optimizer).overflow_report()
    first, last = ("group 0[0]", "group 0[3]") if names == "none" else ("0.weight", "1.bias")
    assert report == OverflowReport(inf=(first, last), nan=(last,))
    assert report.summary() == f"inf in 2 gradients: {last}, {first}; nan in 1 gradient: {last}"
    assert str(report).startswith(f"{report.summary()}\nOthers are finite: ")
    assert ("call scaler.register(optimizer, names=model)" in str(report)) is (names == "none")


@pytest.mark.parametrize("fused", [False, True])
def test_the_report_knows_what_has_been_overwritten(weights, fused):
    one = weights(fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(one.optimizer)
    scaler.scale(one.loss(1.0) + one.params[1].sum() * math.inf).backward()
    scaler.clip_grad_value_(one.optimizer, 1.0)
    one.params[2].grad[0] = math.nan
    scaler.step(one.optimizer)
    report = scaler.last_step(one.optimizer).overflow_report()
    assert report == OverflowReport(inf=("group 0[1]",), nan=("group 0[2]",))
    one.optimizer.zero_grad()
    scaler.update()
    scaler.scale(one.loss(1.0)).backward()
    scaler.step(one.optimizer)
    assert not scaler.last_step(one.optimizer).overflow_report()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("early", ["unscale", "clip", "fold"])
def test_the_norm_of_a_step_is_that_of_all_micro_batches(weights, fused, early):
    one, other = weights(fused=fused), weights()
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(one.optimizer, other.optimizer)
    calls = {
        "unscale": lambda: scaler.unscale_(one.optimizer),
        "clip": lambda: scaler.clip_grad_norm_(one.optimizer, 1e9),
        "fold": lambda: scaler.clip_grad_norm_(one.optimizer, 1e9, fold=True),
    }
    for gradient in (3.0, 4.0):
        scaler.scale(one.loss(gradient)).backward()
        calls[early]()
    scaler.clip_grad_norm_(one.optimizer, 0.5)
    scaler.scale(other.loss(1.0)).backward()  # adds nothing to the first one's
    scaler.step(one.optimizer)
    assert scaler.last_step(one.optimizer).norm.item() == pytest.approx(7.0 * 12**0.5, rel=1e-6)


def test_results_nobody_keeps_are_not_kept(weights):
    """A constant scale needs no update(): without one, results must not pile up."""
    one = weights()
    scaler = GradScaler("cpu", dynamic=False)
    results = []
    for _ in range(5):
        one.optimizer.zero_grad()
        scaler.scale(one.loss(1.0)).backward()
        scaler.step(one.optimizer)
        results.append(weakref.ref(scaler.last_step(one.optimizer)))
    assert [result() is None for result in results] == [True] * 4 + [False]


def test_names_outlive_a_change_of_the_parameters():
    """Layers that are unfrozen later are in the registered module already."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.register(optimizer, names=model)

    def overflow():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        for param in (model[0].weight, model[1].bias):
            param.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        return scaler.last_step(optimizer)

    first = overflow()
    optimizer.add_param_group({"params": [model[0].weight, torch.nn.Parameter(torch.zeros(1))]})
    assert overflow().overflow_report().inf == ("1.bias", "0.weight")
    optimizer.param_groups[:] = optimizer.param_groups[1:]
    assert overflow().overflow_report().inf == ("0.weight",)
    assert first.overflow_report().inf == ("1.bias",), "the parameters of then"


def test_what_cannot_be_registered():
    model, optimizer = build(torch.optim.SGD, {})
    scaler = GradScaler("cpu")
    with pytest.raises(TypeError, match="expected an optimizer with param_groups, got Sequential"):
        scaler.register(model)
    scaler.register(optimizer, names=model)
    with pytest.raises(TypeError, match="expected an optimizer with param_groups, got Sequential"):
        scaler.register(model)
    for names in (["a"], 3, {"a": 1}):
        with pytest.raises(TypeError, match=r"names=\.\.\.\): a module, .* is wanted, got (list|int|dict)"):
            scaler.register(optimizer, names=names)
    with pytest.raises(ValueError, match="none of the 2 names is of a parameter of this SGD"):
        scaler.register(optimizer, names=torch.nn.Linear(2, 2))


def test_names_from_the_optimizer():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.full((1, 2), math.inf)).sum()).backward()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).overflow_report().inf == ("weight",)


def test_found_inf_is_exactly_one_on_the_fused_path(weights):
    """torch adds the flags of several devices up; the CPU's fused AdamW steps on 2.0."""
    seen = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.found_inf.item())
            return super().step(closure)

    one = weights(optimizer=Spy, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(math.inf)).backward()
    scaler.update(4.0)  # overflow by rescaling and in the gradients themselves
    scaler.step(one.optimizer)
    assert seen == [1.0]
    assert not hasattr(one.optimizer, "found_inf")
    assert not hasattr(one.optimizer, "grad_scale")


def test_a_users_grad_scale_is_respected(weights):
    one = weights(fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(3.0)).backward()
    one.optimizer.grad_scale = torch.tensor(2.0)
    scaler.step(one.optimizer)
    assert one.value == -1.5


def test_the_older_contract_of_optimizers(weights):
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad / grad_scaler.get_scale())

    one = weights(optimizer=Older)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(one.loss(3.0)).backward()
    with pytest.warns(FutureWarning, match="Older.step takes grad_scaler, which is deprecated"):
        scaler.step(one.optimizer)
    assert one.value == -3.0


def test_the_value_of_step_is_returned(weights):
    class Returns(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            return 7.0

    one = weights(optimizer=Returns)
    scaler = GradScaler("cpu")
    scaler.scale(one.loss(3.0)).backward()
    assert scaler.step(one.optimizer) == 7.0
    one.optimizer.zero_grad()
    scaler.update()
    scaler.scale(one.loss(math.inf)).backward()
    assert scaler.step(one.optimizer, None) is None


def test_no_host_sync_before_somebody_asks(weights, forbid_host_syncs):
    """On the fused path nothing is read back."""
    one = weights(fused=True, optimizer=torch.optim.AdamW)
    scaler = GradScaler("cpu", init_scale=8.0)
    with forbid_host_syncs():
        for fold in (False, True, True):
            one.optimizer.zero_grad()
            scaler.scale(one.loss(3.0)).backward()
            scaler.clip_grad_norm_(one.optimizer, 1.0, fold=fold)
            if not fold:
                scaler.clip_grad_norm_(one.params, 0.5)
                scaler.clip_grad_value_(one.optimizer, 0.5)
            scaler.step(one.optimizer)
            scaler.update()
        assert scaler.last_step(one.optimizer).norm is not None
        scaler.clip_grad_norm_(one.optimizer, 1.0)
    assert not scaler.last_step(one.optimizer).skipped


def test_a_flag_comes_to_the_host_whatever_the_default_and_the_current_device(monkeypatch):
    class OnCuda:
        device, dtype = torch.device("cuda", 1), torch.float32

        def reshape(self, shape):
            return torch.ones(shape, device="cpu")

    class Event:
        def __init__(self, device):
            self.behind = None

        def record(self, stream=None):  # without a stream: that of the current device, cuda:0
            self.behind = stream

        def query(self):
            return self.behind == "the stream of cuda:1"

    empty = torch.empty
    with torch.device("meta"):
        assert empty(0).is_meta
    monkeypatch.setattr(step_result, "capturing", lambda device: False)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"the stream of {device}")

    def make(*size, pin_memory, **options):  # there is nothing to pin memory for
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", make)
    with torch.device("meta"):
        flag = step_result.HostFlag(OnCuda())
    assert flag.known() is True
