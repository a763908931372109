"""What Accelerate's users do besides training: copies, pickles, private names."""

import copy
import pickle

import accelerate
import pytest
import torch
from accelerate import Accelerator

from amp_plugin import AmpAccelerator, AmpPrecision, FabricAmpPrecision, hardware
from amp_plugin.adapters.accelerate import install
from tests.adapters.accelerate_pair import ours, reset
from tests.adapters.lightning_models import QUIET, OneWeight, fit

pytestmark = QUIET


class Subclass(Accelerator):
    """An accelerator class of a program, derived from Accelerate's."""


class SubclassOfOurs(AmpAccelerator):
    """An accelerator class of a program, derived from ours."""


def trained(accelerator):
    """Return the prepared objects of an accelerator after some steps."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.utils.data.DataLoader(torch.ones(4, 2))
    prepared = model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return prepared


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("way", [pickled, copy.deepcopy, copy.copy])
@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("subclass", [False, True])
def test_an_accelerator_and_what_it_prepared_are_copied(installed, subclass, way, precision):
    if installed:
        install()
        kind = Subclass if subclass else accelerate.Accelerator
    else:
        kind = SubclassOfOurs if subclass else AmpAccelerator
    accelerator = kind(mixed_precision=precision, cpu=True, gradient_accumulation_steps=2)
    for wrapped in trained(accelerator):
        way(wrapped)
    twin = way(accelerator)
    assert type(twin) is type(accelerator)
    assert isinstance(twin, AmpAccelerator)
    assert (twin.scaler is None) == (precision != "fp16")
    trained(twin)


def test_a_pickled_accelerator_trains_on_with_its_optimizer():
    accelerator = ours(init_scale=8.0, growth_interval=1, exact_schedulers=True)
    model, optimizer, scheduler, _ = trained(accelerator)
    twin, model, optimizer, scheduler = pickled((accelerator, model, optimizer, scheduler))
    assert optimizer.scaler is twin.scaler
    before = twin.scaler.get_scale(), model.weight.detach().clone()
    twin.backward(model(torch.ones(1, 2)).sum())
    assert twin.clip_grad_norm_(model.parameters(), 10.0) == pytest.approx(3**0.5)
    optimizer.step()
    twin.backward(model(torch.ones(1, 2)).sum())
    assert twin.scaler.get_scale() == 2 * before[0]
    torch.testing.assert_close(model.weight.detach(), before[1] - optimizer.param_groups[0]["lr"])
    assert twin.last_step(optimizer).skipped is False


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_who_sets_is_overflow_holds_the_scheduler_back(precision):
    accelerator = ours(precision=precision)
    model, optimizer, scheduler, _ = trained(accelerator)
    (rate,) = scheduler.get_last_lr()
    for overflow, expected in ((True, rate), (False, 0.9 * rate), (True, 0.9 * rate)):
        optimizer._is_overflow = overflow
        assert optimizer.step_was_skipped is overflow
        assert accelerator.optimizer_step_was_skipped is overflow
        scheduler.step()
        assert scheduler.get_last_lr() == pytest.approx([expected])
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()  # this step sets the flag again
    assert optimizer.step_was_skipped is False


# -- names of precisions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "names"),
    [
        ("fp32", ["32-true", "32", 32, "float32", torch.float32, "no"]),
        ("fp16", ["16-mixed", "fp16-mixed", "16", 16, "float16", torch.float16, "half"]),
        ("bf16", ["bf16-mixed", "bfloat16", torch.bfloat16]),
    ],
)
def test_names_of_other_projects_are_understood(mine, names, monkeypatch):
    for name in names:
        for plugin in (AmpPrecision(name, eval_precision=name), FabricAmpPrecision(name)):
            assert plugin.settings.precision == mine
        reset()
        accelerator = AmpAccelerator(mixed_precision=name, cpu=True)
        assert accelerator.mixed_precision == mine.replace("fp32", "no")
    reset()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", names[0])
    assert AmpAccelerator(cpu=True).mixed_precision == mine.replace("fp32", "no")


# -- options of AmpPrecision --------------------------------------------------------------------


class Dtypes(torch.nn.Module):
    """Two layers that record the dtype in which they computed."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.seen = {}

    def forward(self, batch):
        hidden = self.body(batch)
        scores = self.head(hidden)
        self.seen = {"body": hidden.dtype, "head": scores.dtype}
        return scores


@pytest.mark.parametrize("wanted", [["head"], ("h*d",), "head", ["Linear"]])
@pytest.mark.parametrize("way", ["prepare", "prepare_model"])
def test_modules_in_fp32(wanted, way, monkeypatch):
    options = {"fp32_modules": wanted}
    if isinstance(wanted, str):
        monkeypatch.setenv("AMP_PLUGIN_FP32_MODULES", wanted)
        options = {}
    model = getattr(ours(precision="bf16", **options), way)(Dtypes())
    model(torch.ones(1, 2))
    body = torch.float32 if "Linear" in wanted else torch.bfloat16
    assert model.seen == {"body": body, "head": torch.float32}


def test_each_name_of_a_module_must_be_found_in_one_of_the_models():
    accelerator = ours(precision="bf16", fp32_modules=["head", "0"])
    accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2)), Dtypes())
    accelerator.prepare(torch.nn.ReLU())
    text = "'haed' is not a name or class of a module in Dtypes, did you mean head"
    with pytest.raises(ValueError, match=text):
        ours(precision="bf16", fp32_modules=["head", "haed"]).prepare(Dtypes())


@pytest.mark.parametrize(
    ("training", "evaluation", "expected"),
    [
        ("fp16", None, (torch.float16, torch.float16)),
        ("fp16", "bf16", (torch.float16, torch.bfloat16)),
        ("bf16", "fp32", (torch.bfloat16, torch.float32)),
        ("no", "bf16-mixed", (torch.float32, torch.bfloat16)),
    ],
)
def test_evaluation_has_a_precision_of_its_own(training, evaluation, expected):
    accelerator = ours(precision=training, eval_precision=evaluation)
    model = accelerator.prepare(Dtypes())
    seen = []
    for mode in (True, False):
        assert model.train(mode)(torch.ones(1, 2)).dtype is torch.float32
        seen.append(model.seen["body"])
    assert tuple(seen) == expected
    twin = pickled(model)
    twin(torch.ones(1, 2))
    assert twin.seen["body"] is expected[1]
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    plain(torch.ones(1, 2))
    assert plain.seen["body"] is torch.float32


# -- messages at the start of a run --------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["accelerate", "lightning"])
def test_slow_fp16_is_told_once(adapter, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_capabilities", lambda: {"avx2": True, "avx512_bf16": True})
    reset()
    runs = {
        "accelerate": lambda: AmpAccelerator(mixed_precision="fp16", cpu=True),
        "lightning": lambda: fit(OneWeight(), AmpPrecision("fp16"), steps=2),
    }
    with pytest.warns(UserWarning, match="fp16 is not fast on this cpu; bf16 is. The results") as told:
        runs[adapter]()
    assert sum("not fast" in str(warning.message) for warning in told) == 1
