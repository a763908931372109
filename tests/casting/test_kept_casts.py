"""The casts of weights that a region keeps: those torch.autocast keeps, as many, and never stale."""

import contextlib
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import amp_plugin
from tests.process_groups import leave
from tests.warm_processes import call_on_ranks

pytestmark = pytest.mark.native
BF16 = torch.bfloat16
BATCHES = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def loss_of(model, batch):
    return model(batch).float().square().mean()


# -- as many casts as torch's ---------------------------------------------------------------------


def one_region(autocast, model, **options):
    with autocast("cpu", BF16, **options):
        sum(loss_of(model, batch) for batch in BATCHES).backward()


def without_cache(autocast, model):
    one_region(autocast, model, cache_enabled=False)


def nested(autocast, model):
    with autocast("cpu", BF16):
        for batch in BATCHES:
            with autocast("cpu", BF16):
                loss_of(model, batch)
        with autocast("cpu", enabled=False):
            model(BATCHES[0])
        assert autocast is torch.autocast or torch.ops.amp_plugin._kept_cast_count() == 4
        loss_of(model, BATCHES[1]).backward()
    assert torch.ops.amp_plugin._kept_cast_count() == 0


def torchs_block_inside(autocast, model):
    with autocast("cpu", BF16):
        loss_of(model, BATCHES[0])
        with torch.autocast("cpu", BF16):
            loss_of(model, BATCHES[0])
        loss_of(model, BATCHES[0]).backward()


def no_grad_first(autocast, model):
    with autocast("cpu", BF16):
        with torch.no_grad():
            model(BATCHES[0])
        loss_of(model, BATCHES[1]).backward()


def casts_and_gradients(program, autocast):
    model = make_model()
    program(autocast, model)  # what is done once per process
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        program(autocast, model)
    counts = {row.key: row.count for row in profiler.key_averages()}
    return counts.get("aten::_to_copy", 0), [param.grad for param in model.parameters()]


PROGRAMS = [
    one_region,
    without_cache,
    nested,
    torchs_block_inside,
    no_grad_first,
]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11's, once per process
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_many_casts_as_torch_and_the_same_gradients(program):
    theirs, expected = casts_and_gradients(program, torch.autocast)
    ours, gradients = casts_and_gradients(program, amp_plugin.autocast)
    assert ours == theirs
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient is other is None or torch.equal(gradient, other)


FLAGS = list(itertools.product([True, False], [None, True, False]))


@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("outer", FLAGS, ids=str)
def test_the_flag_is_taken_over_as_in_torch(outer, made_inside):
    """Gradients of a weight used twice add up in bfloat16 where its cast is kept, else in float32."""

    def gradient(autocast, inner):
        torch.manual_seed(0)
        x, w = torch.randn(8, 8), nn.Parameter(torch.randn(8, 8))
        region = None if made_inside else autocast("cpu", BF16, *inner)
        with autocast("cpu", BF16, *outer):
            with region or autocast("cpu", BF16, *inner):
                out = (x @ w) @ w
            out = out.float() @ w
        out.float().square().mean().backward()
        return w.grad

    for inner in FLAGS:
        assert torch.equal(gradient(amp_plugin.autocast, inner), gradient(torch.autocast, inner)), inner


def test_the_flag_is_taken_over_from_accelerators_which_hide_it():
    for flag in (True, False):
        with amp_plugin.autocast("cuda", enabled=False, cache_enabled=flag):
            assert not torch.is_autocast_cache_enabled(), "graphs can be captured"
            assert amp_plugin.autocast("cpu")._cache_enabled is flag
            assert amp_plugin.autocast("cuda", enabled=False)._cache_enabled is flag


def test_clearing_torchs_cache_shows_a_write_that_nothing_else_shows():
    """As in torch: `torch.clear_autocast_cache()` inside a region has every weight cast again."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with amp_plugin.autocast("cpu", BF16):
        x @ weight
        weight.detach().numpy()[:] = 5.0  # no dispatcher, no version counter
        assert (x @ weight)[0, 0] == 2.0
        torch.clear_autocast_cache()
        assert (x @ weight)[0, 0] == 10.0


# -- never stale ----------------------------------------------------------------------------------


class ThroughData(torch.optim.Optimizer):
    """Writes weights as many an older optimizer does: no version counter moves."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.data.sub_(param.grad, alpha=0.1)


class ThroughNumpy(ThroughData):
    """Writes weights as a kernel of its own does: nothing but the step's hook shows it."""

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.detach().numpy()[:] -= 0.1 * param.grad.numpy()


OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "for loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "through data": ThroughData,
    "through NumPy": ThroughNumpy,
}


def check_steps(model, optimizer, step):
    """Train in one region, and compare each forward with one that keeps no cast."""
    with amp_plugin.autocast("cpu", BF16):
        for batch in BATCHES:
            loss = loss_of(model, batch)
            with torch.no_grad(), amp_plugin.autocast("cpu", BF16, cache_enabled=False):
                assert torch.equal(loss, loss_of(model, batch)), "casts of older weights"
            loss.backward()
            step()
            optimizer.zero_grad()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, None) for name in OPTIMIZERS),
        *((name, "aot_eager") for name in ("fused", "foreach", "for loop")),
        ("foreach", "inductor"),
    ],
)
def test_a_step_in_the_region_is_seen(name, backend):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    check_steps(
        model, optimizer, torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
    )


@pytest.mark.parametrize("opened", [False, True])
def test_weights_can_be_swapped(opened):
    """``swap_tensors`` takes no tensor that somebody refers to; conversions of modules use it."""
    model = make_model()
    with amp_plugin.autocast("cpu", BF16):
        loss_of(model, BATCHES[0]).backward()
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with amp_plugin.autocast("cpu", BF16) if opened else contextlib.nullcontext():
            model(BATCHES[0])
            if not opened:
                model.double().float()
            model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
            with amp_plugin.autocast("cpu", BF16):
                ours = model(BATCHES[0])
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.autocast("cpu", BF16):
        assert torch.equal(ours, model(BATCHES[0]))


def test_many_weights_cost_no_more_each():
    """Keeping another cast looks at no other one: 4000 weights take about as long each as 200."""
    x = torch.ones(1, 2)

    def seconds_each(count):
        weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(count)]
        with amp_plugin.autocast("cpu", BF16):
            start = time.thread_time()
            for weight in weights:
                nn.functional.linear(x, weight)
            return (time.thread_time() - start) / count

    assert min(seconds_each(4000) for _ in range(3)) < 3 * min(seconds_each(200) for _ in range(3))


@pytest.mark.gpu
def test_within_a_region_a_stream_makes_its_own_casts():
    weight = nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).cuda())
    inputs, other = BATCHES[0].cuda(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with amp_plugin.autocast("cuda", dtype=BF16):
        torch.cuda._sleep(50_000_000)
        nn.functional.linear(inputs, weight)
        with torch.cuda.stream(other):
            second = nn.functional.linear(inputs, weight)
    other.synchronize()
    right = nn.functional.linear(BATCHES[0].to(BF16), weight.detach().cpu().to(BF16))
    assert torch.equal(second.cpu(), right)


def second_forward() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    plain, x = model.weight.detach().clone(), torch.randn(2, 8)
    fully_shard(model, reshard_after_forward=False)
    with amp_plugin.autocast("cpu", dtype=BF16):
        for _ in range(2):
            output = model(x)
            assert torch.equal(output, x.bfloat16() @ plain.bfloat16().t())
            assert torch.ops.amp_plugin._kept_cast_count() == 0
            output.float().sum().backward()
            model.weight.to_local().detach().numpy()[:] *= (
                2  # by a kernel that no hook of an optimizer announces
            )
            plain.mul_(2)
            model.reshard()
    leave()


@pytest.mark.dist
def test_weights_that_fsdp2_refills_are_never_kept():
    """A forward after an update uses the new ones."""
    ranks = call_on_ranks(2, 90, second_forward)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stderr for rank in ranks)
