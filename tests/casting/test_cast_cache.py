"""Cast weights kept over an accumulation window: as exact as without, and never stale."""

from __future__ import annotations

import copy
import ctypes
import gc
import time

import pytest
import torch
from torch import nn

import amp_plugin
from amp_plugin.casting.cast_cache import CastCache
from tests.warm_processes import run_program

pytestmark = pytest.mark.native
BF16 = torch.bfloat16


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


BATCHES = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def window(model, cache, batches=BATCHES):
    """Accumulate gradients over micro-batches; one region each."""
    for batch in batches:
        with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
            loss = model(batch).float().square().mean()
        loss.backward()


def train(cache, make_optimizer, *, steps=3, between=lambda model: None):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for _ in range(steps):
        window(model, cache)
        optimizer.step()
        optimizer.zero_grad()
        between(model)
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same_bit_for_bit(name):
    cache = CastCache()
    assert_same(train(cache, OPTIMIZERS[name]), train(None, OPTIMIZERS[name]))
    assert len(cache) == 4
    # each weight once per window, after the first window with one multi-tensor cast
    assert cache.casts == 4 * 3
    assert cache.refreshes == 4 + 2


def test_one_shared_node_would_change_gradients():
    """Why each region hangs its own node on the buffer: bf16 sums of micro-batch gradients differ."""
    model, shared = make_model(), make_model()
    window(model, CastCache())
    total = 0
    with amp_plugin.autocast("cpu", dtype=BF16):
        for batch in BATCHES:
            total = total + shared(batch).float().square().mean()
    total.backward()
    assert not torch.equal(model[0].weight.grad, shared[0].weight.grad)
    assert torch.allclose(model[0].weight.grad, shared[0].weight.grad, rtol=0.05, atol=1e-3)


def test_micro_batches_after_the_first_cast_no_weight():
    model, cache = make_model(), CastCache()
    window(model, cache, BATCHES[:1])
    assert cache.casts == 4
    window(model, cache, BATCHES[1:])
    assert cache.casts == 4


def test_memory_is_half_of_the_weights_and_freed():
    model, cache = make_model(), CastCache()
    window(model, cache)
    elements = sum(p.numel() for p in model.parameters())
    assert cache.nbytes == 2 * elements
    for _ in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        window(model, cache)
        assert cache.nbytes == 2 * elements
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_dead_models_are_dropped():
    cache = CastCache()
    for _ in range(5):
        window(make_model(), cache)
        gc.collect()
    assert len(cache) <= 8


def allocated_bytes():
    """Bytes that C's allocator has given out."""
    kind = type(
        "Mallinfo", (ctypes.Structure,), {"_fields_": [(f"f{i}", ctypes.c_size_t) for i in range(10)]}
    )
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = kind
    return ask().f7


def test_only_parameters_are_kept_over_regions():
    """An input that requires grad, as of an attack or a penalty, is cast once per region and then forgotten."""
    model, cache = make_model(), CastCache()
    for batch in BATCHES:
        x = batch.clone().requires_grad_()
        with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
            model(x).float().sum().backward()
            assert torch.ops.amp_plugin._kept_cast_count() == 5
    assert len(cache) == 4


def test_a_new_model_each_step_leaves_nothing_behind():
    cache = CastCache()

    def step():
        with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

    def bytes_after(steps):
        for _ in range(steps):
            step()
        gc.collect()
        return allocated_bytes()

    before = bytes_after(1000)
    assert bytes_after(2000) - before < 2000 * 50


@pytest.mark.parametrize("where", ["region", "cache", "open region"])
def test_weights_can_be_swapped(where):
    """``swap_tensors`` takes no tensor that somebody refers to; conversions of modules use it."""
    model, cache = make_model(), None if where == "region" else CastCache()
    window(model, cache)
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if where == "open region":
            with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
                model(BATCHES[0])
                model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
                ours = model(BATCHES[0])
        else:
            model.double()
            model.float().load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
            with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
                ours = model(BATCHES[0])
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(ours, model(BATCHES[0]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracer asks for it
def test_compiled_autograd():
    def gradients(cache, *, compiled):
        model = make_model()
        with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
            loss = model(BATCHES[0]).float().square().mean()
        if compiled:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        else:
            loss.backward()
        return [param.grad for param in model.parameters()]

    assert_same(gradients(CastCache(), compiled=True), gradients(None, compiled=False))


def test_many_weights_cost_no_more_each():
    """Keeping another cast looks at no other one: 2000 weights take about as long each as 200."""
    x = torch.ones(1, 2)

    def seconds_each(count):
        weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(count)]
        with amp_plugin.autocast("cpu", dtype=torch.bfloat16, cache=CastCache()):
            start = time.thread_time()
            for weight in weights:
                torch.nn.functional.linear(x, weight)
            return (time.thread_time() - start) / count

    assert min(seconds_each(4000) for _ in range(3)) < 3 * min(seconds_each(200) for _ in range(3))


def updates():
    def in_place(model):
        with torch.no_grad():
            model[0].weight.mul_(2)

    def data(model):
        model[0].weight.data = model[0].weight.data * 2

    def load(model):
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})

    def assign(model):
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)

    def ema_through_data(model):
        model[0].weight.data.lerp_(torch.ones(16, 8), 0.5)
        amp_plugin.invalidate()  # outside a region no one sees that write

    def move(model):
        model.double().float()

    def freeze_and_unfreeze(model):
        model[0].weight.requires_grad_(False)
        with torch.no_grad():
            model[0].weight.mul_(2)
        model[0].weight.requires_grad_(True)

    return [in_place, data, load, assign, ema_through_data, move, freeze_and_unfreeze]


@pytest.mark.parametrize("update", updates(), ids=lambda u: u.__name__)
def test_follows_every_update(update):
    cache, model = CastCache(), make_model()
    window(model, cache, BATCHES[:1])
    update(model)
    with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
        ours = model(BATCHES[0])
    with amp_plugin.autocast("cpu", dtype=BF16, cache_enabled=False):
        assert torch.equal(ours, model(BATCHES[0]))


def test_every_use_has_a_node_of_its_own_without_the_regions_cache():
    """Where the stock plugin of Lightning's Trainer shares no cast, gradients add up in fp32."""

    def gradients(**options):
        model = make_model()
        with amp_plugin.autocast("cpu", dtype=BF16, **options):
            loss = sum(model(batch).float().square().mean() for batch in BATCHES)
        loss.backward()
        return [param.grad for param in model.parameters()]

    cache = CastCache()
    separate = gradients(cache_enabled=False)
    assert_same(gradients(cache_enabled=False, cache=cache), separate)
    assert cache.casts == 4
    assert not torch.equal(gradients(cache=CastCache())[0], separate[0])


def test_the_node_of_a_kept_cast_is_torchs_own():
    cache, weight = CastCache(), nn.Parameter(torch.randn(4, 3))
    seen = []
    for _ in range(2):  # cast, then kept
        with amp_plugin.autocast("cpu", dtype=BF16, cache=cache, cache_enabled=False):
            product = torch.mm(torch.randn(2, 4), weight)
        node = product.grad_fn.next_functions[1][0]
        assert node.name() == "ToCopyBackward0"
        assert node.next_functions[0][0].variable is weight
        grad = node(torch.ones(4, 3, dtype=BF16))
        seen.append((grad.dtype, grad.device, grad.layout))
    assert seen == [(torch.float32, weight.device, torch.strided)] * 2
    assert (cache.casts, cache.refreshes) == (1, 1)


def test_other_casts_are_computed_beside_kept_ones():
    """Torch's kernel takes the kept cast in place of a computation only when it is told to."""
    cache, weight = CastCache(), nn.Parameter(torch.randn(4, 3))
    with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
        torch.mm(torch.randn(2, 4), weight)
        other = torch.randn(4, 3, requires_grad=True)
        assert torch.equal(other.to(BF16), other.detach().to(BF16))
        assert torch.equal(weight.to(torch.float16), weight.detach().to(torch.float16))


def test_update_inside_a_region():
    cache, model = CastCache(), make_model()
    with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
        model(BATCHES[0])
        model[0].weight.data.clamp_(-0.01, 0.01)
        ours = model(BATCHES[0])
    with amp_plugin.autocast("cpu", dtype=BF16, cache_enabled=False):
        assert torch.equal(ours, model(BATCHES[0]))


def test_an_older_graph_keeps_its_weights():
    """A buffer that a live graph saved is replaced, not overwritten."""
    cache, model = CastCache(), make_model()
    expected = copy.deepcopy(model)
    with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
        old = model(BATCHES[0]).float().sum()
    with torch.no_grad():
        model[2].weight.data = model[2].weight.data * 5
    with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
        model(BATCHES[0])
    old.backward()
    with amp_plugin.autocast("cpu", dtype=BF16, cache_enabled=False):
        expected(BATCHES[0]).float().sum().backward()
    assert torch.equal(model[0].weight.grad, expected[0].weight.grad)


def test_validation_in_mid_window():
    def run(cache):
        model = make_model()
        window(model, cache, BATCHES[:2])
        with torch.no_grad(), amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
            model.eval()(BATCHES[3])
        with torch.inference_mode(), amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
            model(BATCHES[3])
        window(model.train(), cache, BATCHES[2:])
        return [p.grad for p in model.parameters()]

    assert_same(run(CastCache()), run(None))


def test_first_use_under_no_grad_then_with_grad():
    cache, model = CastCache(), make_model()
    with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
        with torch.no_grad():
            model(BATCHES[0])
        model(BATCHES[0]).float().sum().backward()
    assert model[0].weight.grad is not None


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return nn.functional.linear(nn.functional.linear(x, self.weight), self.weight)

    def run(cache):
        model = Tied()
        window(model, cache)
        return [model.weight.grad]

    cache = CastCache()
    assert_same(run(cache), run(None))
    assert cache.casts == 1


def test_several_models_and_dtypes():
    cache, first, second = CastCache(), make_model(), make_model()
    for model in (first, second):
        window(model, cache, BATCHES[:1])
    with amp_plugin.autocast("cpu", dtype=torch.float16, cache=cache):
        first(BATCHES[0])
    assert len(cache) == 12


def test_double_backward():
    cache, model, x = CastCache(), make_model(), BATCHES[0].clone().requires_grad_()

    def run(cache):
        model.zero_grad()
        with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
            y = model(x).float().square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.float().square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert_same(run(cache), run(None))


def test_compiled_code_goes_on_without():
    cache, model = CastCache(), make_model()
    compiled = torch.compile(model, backend="aot_eager")
    with amp_plugin.autocast("cpu", dtype=BF16, cache=cache):
        ours = compiled(BATCHES[0])
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(ours, compiled(BATCHES[0]))
    assert len(cache) == 0


COUNTED_WHILE_CASTING = """
import threading, time, torch, amp_plugin
from amp_plugin.casting.cast_cache import CastCache
inside = threading.Event()

def cast_in_python(src, out):  # as on CUDA
    inside.set()
    time.sleep(0.5)
    for one, other in zip(src, out):
        other.copy_(one.detach())

cache, model = CastCache(), torch.nn.Linear(4, 4, bias=False)
library = torch.library.Library("amp_plugin", "IMPL")
library.impl("cast", cast_in_python, "CPU")  # over the native one

def forward():
    with amp_plugin.autocast("cpu", dtype=torch.bfloat16, cache=cache):
        model(torch.ones(1, 4))

thread = threading.Thread(target=forward)
thread.start()
inside.wait()
print(len(cache), cache.nbytes, cache.casts)
cache.clear()
thread.join()
"""


def test_a_cache_may_be_asked_while_another_thread_casts(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(COUNTED_WHILE_CASTING)
    run = run_program(program)
    assert run.stdout == "1 32 1\n", run.stderr


def test_repr():
    assert repr(CastCache()) == "CastCache(0 weights, 0 bytes, 0 casts)"


def test_a_write_in_a_region_without_the_cache_is_seen_by_it():
    weight, data, cache = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(1, 4), CastCache()
    with amp_plugin.autocast("cpu", torch.bfloat16, cache=cache):
        assert (data @ weight)[0, 0].item() == 4.0
    with amp_plugin.autocast("cpu", torch.bfloat16):
        weight.data.mul_(0.5)
    with amp_plugin.autocast("cpu", torch.bfloat16, cache=cache):
        assert (data @ weight)[0, 0].item() == 2.0
