"""The contents of a report of overflowed gradients."""

import math
import re
from dataclasses import replace

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling import OverflowReport
from amp_plugin.scaling.overflows import FirstModules
from tests.scaling.runs import scaler_of

MANY = OverflowReport(inf=tuple(f"p{i}" for i in range(9)), checked=12)
ALL = OverflowReport(nan=("a", "b"), checked=2)
TEXTS = [
    (MANY, "inf in 9 gradients: p8, p7, p6, p5, p4 and 4 more", "^The other gradients are finite. Look at the batch, and at the ba"),
    (replace(MANY, scaled=True), "inf in 9", "a few more skipped steps lower it enough, or the module of the first one named needs fp32"),
    (replace(MANY, named=False), "inf in 9", r"call scaler.register\(optimizer, names=model\)"),
    (ALL, "nan in 2 gradients: b, a", r"^All gradients overflowed at once. Probably the loss .* is not finite: `amp-plugin diagnose train.py` finds"),
    (replace(ALL, scaled=True), "nan in 2", "^All gradients overflowed at once. Either the loss scale is still too high, .*`amp-plugin diagnose train.py` finds"),
    (OverflowReport(elsewhere=True), "overflow on another rank", "look at that rank's batch"),
    (OverflowReport(unattributed=True), "the norm of the gradients is not finite", "`amp-plugin diagnose train.py` finds"),
    (OverflowReport(checked=3), "no overflow", "^$"),
]  # fmt: skip


@pytest.mark.parametrize(("report", "summary", "meaning"), TEXTS)
def test_what_it_says(report, summary, meaning):
    """It stays short if there are many parameters, and lists those near the loss first.

    If all overflowed, it points to the forward pass.
    """
    assert report.summary().startswith(summary)
    assert re.search(meaning, report.meaning())
    assert str(report) == f"{report.summary()}\n{report.meaning()}".strip()
    assert bool(report) is (summary != "no overflow")


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"inf": ("a",), "scaled": True}, "so the loss scale was probably too high for them"),
        ({"inf": ("a",)}, "look at the backward pass of the modules that own these parameters"),
        ({"elsewhere": True}, "modules were finite on this rank.$"),
        ({"spike": "9 above the limit 2"}, "^$"),
    ],
)
def test_it_says_what_finite_modules_mean(options, where):
    report = OverflowReport(**options, modules=FirstModules(numbers=3))
    assert re.search(where, report.where())


def test_modules_that_were_not_looked_into_may_have_overflowed():
    modules = FirstModules(numbers=3, unseen=("1 (compiled)",))
    where = OverflowReport(inf=("1.0.weight",), scaled=True, modules=modules).where()
    assert "came from inside these modules, or from" in where
    assert where.endswith("Not looked into: 1 (compiled).")
    assert "Only gradients of parameters" not in where


def test_it_names_parameters_without_the_wrapper_of_a_compiled_model():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model = torch.compile(net, backend="eager")
    for params, names in ((model.parameters(), model), (model.named_parameters(), None)):
        optimizer, scaler = torch.optim.SGD(params, lr=0.1), GradScaler("cpu")
        scaler.register(optimizer, names=names)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        net[1].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        optimizer.zero_grad()
        assert scaler.last_step(optimizer).overflow_report().inf == ("1.weight",)


@pytest.mark.parametrize("init_scale", [1.0, 8.0, None])
def test_it_knows_whether_a_scale_may_be_the_cause(init_scale):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=init_scale is not None, init_scale=init_scale or 1.0)
    scaler.register(optimizer, names=model)
    scaler.scale(model(torch.full((1, 2), math.nan)).sum() * math.nan).backward()
    scaler.step(optimizer)
    report = scaler.last_step(optimizer).overflow_report()
    assert (report.inf, report.nan, report.checked, report.named) == ((), ("weight", "bias"), 2, True)
    assert report.scaled is (init_scale == 8.0)


def test_no_overflow_is_never_said_beside_a_norm_that_is_nan(weights):
    one, scaler = weights(), GradScaler("cpu", enabled=False, on_nonfinite="ignore")
    one.backward(scaler, math.nan)
    assert math.isnan(scaler.clip_grad_norm_(one.optimizer, 1.0).item())
    scaler.step(one.optimizer)
    result = scaler.last_step(one.optimizer)
    assert math.isnan(result.norm.item())
    assert str(result.overflow_report()).startswith("the norm of the gradients is not")


@pytest.mark.parametrize("names", ["module", "pairs", "mapping", "of the optimizer", "none"])
def test_the_report_names_the_parameters(fused, names):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    params = model.named_parameters() if names == "of the optimizer" else model.parameters()
    optimizer, scaler = torch.optim.SGD(params, lr=0.1, fused=fused), GradScaler("cpu")
    given = {"module": model, "pairs": model.named_parameters(), "mapping": dict(model.named_parameters())}
    scaler.register(optimizer, names=given.get(names))
    model[0].bias.requires_grad_(False)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model[0].weight.grad[0, 0] = math.inf
    model[1].bias.grad[0] = math.nan
    model[1].bias.grad[1] = math.inf
    scaler.step(optimizer)
    optimizer.zero_grad()
    report = scaler.last_step(optimizer).overflow_report()
    places = ("param_groups[0]['params'][0]", "param_groups[0]['params'][3]")
    first, last = places if names == "none" else ("0.weight", "1.bias")
    assert report == OverflowReport(inf=(first, last), nan=(last,))
    assert report.summary() == f"inf in 2 gradients: {last}, {first}; nan in 1 gradient: {last}"
    assert report.named is (names != "none")


@pytest.mark.parametrize(
    ("bad", "of"), [(math.inf, "wave"), (complex(1.0, math.nan), "wave"), (math.nan, "table")]
)
def test_complex_and_sparse_gradients_are_named_after_a_skip(bad, of, scale):
    wave, table = torch.zeros(2, dtype=torch.complex64), torch.zeros(4, 2)
    params = {"wave": torch.nn.Parameter(wave), "table": torch.nn.Parameter(table)}
    optimizer, scaler = torch.optim.SGD(params.values(), lr=1.0), scaler_of(scale)
    scaler.register(optimizer, names=params)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1]), params["table"], sparse=True)
    scaler.scale(params["wave"].real.sum() + rows.sum()).backward()
    gradient = params[of].grad
    (gradient._values()[0] if gradient.is_sparse else gradient)[1] = bad
    scaler.step(optimizer)
    report = scaler.last_step(optimizer).overflow_report()
    assert (report.inf, report.nan) == ((of,) * (bad == math.inf), (of,) * (bad != math.inf))
    assert not any(param.any() for param in params.values())


def test_the_report_knows_what_has_been_overwritten(weights, fused):
    one = weights(fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.register(one.optimizer)
    scaler.scale(one.loss(1.0) + one.params[1].sum() * math.inf).backward()
    scaler.clip_grad_value_(one.optimizer, 1.0)
    one.params[2].grad[0] = math.nan
    scaler.step(one.optimizer)
    report = scaler.last_step(one.optimizer).overflow_report()
    inf, nan = (f"param_groups[0]['params'][{i}]" for i in (1, 2))
    assert report == OverflowReport(inf=(inf,), nan=(nan,))
    scaler.update()
    one.train(scaler, 1.0)
    assert not scaler.last_step(one.optimizer).overflow_report()


def test_names_outlive_a_change_of_the_parameters():
    """Layers that are unfrozen later already belong to the registered module."""
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
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    with pytest.raises(TypeError, match="expected an optimizer with param_groups, got Linear"):
        scaler.register(model)
    scaler.register(optimizer, names=model)
    for names in (["a"], 3, {"a": 1}):
        with pytest.raises(TypeError, match=r"names=\.\.\.\): a module, .* is wanted, got (list|int|dict)"):
            scaler.register(optimizer, names=names)
    with pytest.raises(ValueError, match="none of the 2 names is of a parameter of this SGD"):
        scaler.register(optimizer, names=torch.nn.Linear(3, 3))
