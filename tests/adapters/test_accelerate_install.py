import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from amp_plugin import OpRules
from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs, install, uninstall
from tests.adapters.accelerate_pair import last_gradient, prepared


class Verbose(Accelerator):
    """A subclass of Accelerator, as other libraries define them."""

    def __init__(self, *args, note="", **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note

    def backward(self, loss, **kwargs):
        self.note += "b"
        super().backward(loss, **kwargs)


def test_a_subclass_keeps_its_methods_and_gets_ours():
    install()
    accelerator = Verbose(mixed_precision="fp16", cpu=True, note="a")
    assert isinstance(accelerator, Verbose)
    assert isinstance(accelerator, AmpAccelerator)
    (model,), (optimizer,) = prepared(accelerator)
    accelerator.backward(model(3.0))
    for _ in range(2):
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    assert accelerator.note == "ab"
    assert last_gradient(optimizer) == 3.0
    again = Verbose(mixed_precision="fp16", cpu=True)
    assert type(again) is type(accelerator)


def test_options_hold_where_the_program_has_none():
    for scale in (2.0, 8.0):  # the options of the last install() apply
        install(AmpKwargs(init_scale=scale))
        accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
        assert type(accelerator) is AmpAccelerator
        assert accelerator.scaler.get_scale() == scale
    own = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[AmpKwargs(init_scale=4.0)])
    assert own.scaler.get_scale() == 4.0


@pytest.mark.native
def test_rules_are_those_of_the_last_accelerator_and_uninstall_leaves_all_as_it_was():
    def product():
        with torch.autocast("cpu", torch.bfloat16):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    original = Accelerator.__init__
    install(AmpKwargs(rules=OpRules.default("cpu").with_rule("aten::matmul", "fp32")))
    first = Accelerator(mixed_precision="bf16", cpu=True)
    assert product() is torch.float32
    AmpAccelerator(cpu=True)
    assert product() is torch.bfloat16
    Accelerator(cpu=True)
    first.end_training()  # the rules of the last accelerator stay in force
    assert product() is torch.float32
    AcceleratorState._reset_state()
    AmpAccelerator(mixed_precision="no")
    assert product() is torch.bfloat16
    AcceleratorState._reset_state()
    Accelerator(mixed_precision="bf16")
    uninstall()
    uninstall()
    assert product() is torch.bfloat16
    assert Accelerator.__init__ is original
    assert type(Accelerator(mixed_precision="bf16", cpu=True)) is Accelerator


def test_install_after_an_accelerator_was_made_warns():
    AmpAccelerator(cpu=True)
    install()  # no warning, because that accelerator was already ours
    uninstall()
    stock = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="no effect on the Accelerator that was made before"):
        install()
    assert type(stock) is Accelerator
