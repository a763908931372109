"""Prepared models: what they return, and whether they can be unwrapped, copied, pickled, compiled and cached."""

import copy
import gc
import inspect
import itertools
import pickle
import weakref

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, extract_model_from_parallel

from amp_plugin import AmpAccelerator, AmpKwargs, OpRules
from amp_plugin.adapters.accelerate.settings import refuse_other_engine
from tests.adapters.accelerate_pair import ours, prepared


class Pair(torch.nn.Module):
    """Returns a dict of half-precision and other tensors, and records the dtype that its layer returned."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.dtype = None

    def forward(self, x, *, scale=1.0):
        y = self.layer(x) * scale
        self.dtype = y.dtype
        return {"logits": y, "ids": torch.arange(2), "both": (y, y.double())}


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_outputs_are_fp32_by_default_and_can_be_kept(precision, dtype):
    for fp32_outputs in (True, False):
        model = ours(precision=precision, fp32_outputs=fp32_outputs).prepare(Pair())
        output = model(torch.ones(1, 3), scale=2.0)
        assert model.dtype is dtype
        assert output["logits"].dtype is (torch.float32 if fp32_outputs else dtype)
        assert output["both"][0].dtype is (torch.float32 if fp32_outputs else dtype)
        assert output["both"][1].dtype is torch.float64
        assert output["ids"].dtype is torch.int64


def test_preparing_twice_wraps_once():
    accelerator = ours()
    model = accelerator.prepare(accelerator.prepare(Pair()))
    assert vars(model)["forward"].own is None


class TestUnwrapping:
    @pytest.fixture(params=["method", "function"])
    def unwrap(self, request):
        """Unwrap a model with the accelerator's method, or with Accelerate's function, which needs no
        accelerator.
        """
        if request.param == "function":
            return lambda _, model: extract_model_from_parallel(model, keep_fp32_wrapper=False)
        return lambda accelerator, model: accelerator.unwrap_model(model, keep_fp32_wrapper=False)

    def test_it_can_be_taken_off(self, unwrap):
        accelerator = ours()
        model = accelerator.prepare(Pair())
        unwrap(accelerator, model)
        assert model(torch.ones(1, 3))["logits"].shape == (1, 2)
        assert model.dtype is torch.float32
        assert "_original_forward" not in model.__dict__

    def test_a_forward_set_on_the_instance_comes_back(self, unwrap):
        accelerator, model, dtypes = ours(), torch.nn.Linear(2, 2), []

        def own(x):
            dtypes.append((x @ x).dtype)
            return 2 * x

        model.forward = own
        model = accelerator.prepare(model)
        assert model(torch.ones(1)).item() == 2.0
        unwrap(accelerator, model)
        assert model(torch.ones(1)).item() == 2.0
        assert dtypes == [torch.float16, torch.float32]

    def test_hooks_of_accelerate_run_before_and_after(self, unwrap):
        """Stock Accelerate calls forward with the module passed twice after unwrapping (accelerate#4255)."""
        calls = []

        class Noted(ModelHook):
            def post_forward(self, module, output):
                calls.append(output.dtype)
                return output

        accelerator, model = ours(), torch.nn.Linear(2, 2)
        add_hook_to_module(model, Noted())
        model = accelerator.prepare(model)
        assert model(torch.ones(1, 2)).dtype is torch.float32
        unwrap(accelerator, model)
        model(torch.ones(1, 2))
        assert calls == [torch.float16, torch.float32]

    def test_the_class_and_the_signature_stay_the_programs_own(self):
        """Programs rely on this: they test ``isinstance(model, type(accelerator.unwrap_model(other)))``."""
        accelerator = ours()
        model = accelerator.prepare(Pair())
        assert type(model) is type(accelerator.unwrap_model(model)) is Pair
        assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]


@pytest.mark.parametrize("way", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
def test_a_copy_computes_in_half_precision_on_its_own_weights(way):
    model = ours(steps=2).prepare(Pair())
    twin = way(model)
    with torch.no_grad():
        twin.layer.bias += 1
    before, after = model(torch.ones(1, 3))["logits"], twin(torch.ones(1, 3))["logits"]
    assert twin.dtype is torch.float16
    assert torch.allclose(after, before + 1, atol=2e-3)
    assert twin.forward.module is twin


@pytest.mark.one_graph
def test_compiled_by_the_program_or_by_accelerate_it_gives_the_same():
    model, inputs = torch.nn.Linear(3, 2), torch.randn(4, 3)
    eager = ours().prepare(copy.deepcopy(model))
    compiled = torch.compile(eager, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs), eager(inputs))
    assert compiled(inputs).dtype is torch.float32
    accelerator = ours(compiler="eager")
    model = accelerator.prepare(model)
    assert isinstance(model, torch._dynamo.eval_frame.OptimizedModule)
    assert torch.equal(model(inputs), eager(inputs))
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert type(plain) is torch.nn.Linear
    assert not torch.equal(plain(inputs), eager(inputs))


@pytest.mark.native
def test_rules_and_stored_weights_hold_until_training_ends():
    rules = OpRules.default("cpu").with_rule("aten::matmul", "fp32")
    accelerator = ours(precision="bf16", rules=rules, weights="bf16")
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert model.weight.dtype is torch.bfloat16
    a = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.float32
    accelerator.end_training()
    assert model.weight.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16


@pytest.mark.native
def test_accelerators_of_each_precision_one_after_another():
    """In each precision, the first accelerator has its own rules and is never ended.

    The next one must not inherit them.
    """
    net, x, seen = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.ones(1, 2), []
    net[0].register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    rules = OpRules.default("cpu").with_rule("aten::linear", "fp32")
    for precision, options in itertools.product(("fp16", "bf16", "no"), ({"rules": rules}, {})):
        AcceleratorState._reset_state(reset_partial_state=True)  # not ours(), which would reset the rules too
        handlers = [AmpKwargs(**options)]
        accelerator = AmpAccelerator(mixed_precision=precision, cpu=True, kwargs_handlers=handlers)
        accelerator.prepare(copy.deepcopy(net))(x)
    single = torch.float32
    assert seen == [single, torch.float16, single, torch.bfloat16, single, single]


def test_backward_may_run_in_the_region():
    accelerator = ours(init_scale=8.0)
    (model,), (optimizer,) = prepared(accelerator)
    with accelerator.autocast():
        accelerator.backward(model(3.0))
        optimizer.step()
    assert optimizer.optimizer.seen[-1][0][0].item() == 3.0


@pytest.mark.parametrize("kind", ["MEGATRON_LM", "XLA", "fp8"])
def test_other_engines_are_refused(kind):
    values = (DistributedType.NO, "fp8") if kind == "fp8" else (DistributedType[kind], "fp16")
    remedy = r"use accelerate\.Accelerator, and start .* without amp-plugin run or install\(\)"
    remedy += r"; or AORecipeKwargs\(\) in kwargs_handlers: torchao's fp8$" if kind == "fp8" else "$"
    with pytest.raises(ValueError, match=rf"casts and scales losses by itself.*{remedy}"):
        refuse_other_engine(*values, None, {})
    assert not refuse_other_engine(DistributedType.NO, "fp8", "torchao's", {})


def test_without_mixed_precision_another_engine_is_left_alone(monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.XLA)
    (model,), (optimizer,) = prepared(ours(precision="no"))
    assert (type(optimizer).__name__, "forward" in vars(model)) == ("AcceleratedOptimizer", False)
    with pytest.raises(ValueError, match="use accelerate.Accelerator, leave out state, and start"):
        ours(precision="no", state="bf16")


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_parameters_may_be_prepared(precision):
    accelerator = ours(precision=precision, init_scale=8.0)
    model = torch.nn.Sequential(torch.nn.LazyLinear(1, bias=False))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = model(torch.full((1, 2), 3.0)).sum()
    before = model[0].weight.detach().clone()
    accelerator.backward(loss)
    optimizer.step()
    assert torch.equal(model[0].weight, before - 3.0)


@pytest.mark.parametrize("precision", ["fp16", "no"])
def test_freed_memory_is_free_of_parameters(precision):
    accelerator = ours(precision=precision)
    (model,), (optimizer,) = prepared(accelerator)
    accelerator.backward(model(3.0))
    optimizer.step()
    accelerator.log({})
    param = weakref.ref(model.weight)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert param() is None
