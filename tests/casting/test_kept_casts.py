"""A region keeps the same casts of weights as torch.autocast, and none of them is ever stale."""

import contextlib
import functools
import itertools
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import amp_plugin
from amp_plugin.casting.bound_rules import ours_by_default
from amp_plugin.kernels.build import native_core
from tests.process_groups import group_of_one, leave
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
        assert autocast is torch.autocast or native_core().extension.kept_cast_count() == 4
        loss_of(model, BATCHES[1]).backward()
    assert native_core().extension.kept_cast_count() == 0


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


def inference_inside(autocast, model):
    with autocast("cpu", BF16):
        with torch.inference_mode():
            sum(loss_of(model, batch) for batch in BATCHES)
        loss_of(model, BATCHES[0]).backward()


def torchs_flag_inside(autocast, model):
    """A torch.autocast block inside can keep casts or not, independently of the region around it."""
    for outer, inner in ((True, False), (False, True)):
        with autocast("cpu", BF16, cache_enabled=outer):
            with torch.autocast("cpu", BF16, cache_enabled=inner):
                loss_of(model, BATCHES[0]).backward()
                loss_of(model, BATCHES[1]).backward()
            loss_of(model, BATCHES[0]).backward()


def checkpointed(autocast, model):
    with autocast("cpu", BF16):
        loss = sum(checkpoint(loss_of, model, batch, use_reentrant=False) for batch in BATCHES)
    loss.backward()


def casts_and_gradients(program, autocast, around=contextlib.nullcontext):
    model = make_model()
    program(autocast, model)  # do first what happens once per process
    model.zero_grad()
    with around(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        program(autocast, model)
    counts = {row.key: row.count for row in profiler.key_averages()}
    return counts.get("aten::_to_copy", 0), [param.grad for param in model.parameters()]


PROGRAMS = [
    one_region,
    without_cache,
    nested,
    torchs_block_inside,
    no_grad_first,
    inference_inside,
    torchs_flag_inside,
    checkpointed,
]


def same_as_torch(program, ours, around=contextlib.nullcontext, set_up=contextlib.nullcontext):
    theirs, expected = casts_and_gradients(program, torch.autocast, around)
    with set_up():
        made, gradients = casts_and_gradients(program, ours, around)
    assert made == theirs
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient is other is None or torch.equal(gradient, other)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 warns once per process
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_many_casts_as_torch_and_the_same_gradients(program):
    same_as_torch(program, amp_plugin.autocast)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_torchs_blocks_under_our_rules_keep_what_torch_keeps(program):
    """Under ``amp-plugin run``, torch.autocast blocks use our kernels.

    They must keep torch's casts and give torch's bits.
    """
    same_as_torch(program, torch.autocast, set_up=ours_by_default)


class Quiet(TorchDispatchMode):
    """A dispatch mode of a user that only passes ops on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def debug_mode():
    return __import__("torch.utils._debug_mode", fromlist=["DebugMode"]).DebugMode()


MODES = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "DebugMode": debug_mode,
    "a user's": Quiet,
    "a device": lambda: torch.device("cpu"),
}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", [one_region, nested, no_grad_first], ids=lambda program: program.__name__)
@pytest.mark.parametrize("front", ["region", "torch's block"])
def test_a_dispatch_mode_around_changes_no_cast(mode, program, front):
    if front == "region":
        same_as_torch(program, amp_plugin.autocast, MODES[mode])
    else:
        same_as_torch(program, torch.autocast, MODES[mode], ours_by_default)


@pytest.mark.parametrize("ours", [False, True])
def test_selective_checkpointing_recomputes_with_torchs_bits(ours):
    """Its modes surround forward and recomputation.

    The gradient of a weight that is used twice shows whether its cast was kept.
    """

    def gradient(autocast):
        torch.manual_seed(0)
        w, x = nn.Parameter(torch.randn(32, 32)), torch.randn(32, 32, requires_grad=True)
        context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        with autocast("cpu", BF16):
            loss = checkpoint(
                lambda x: ((x @ w).tanh() @ w).float(), x, use_reentrant=False, context_fn=context
            )
        loss.sum().backward()
        return w.grad

    expected = gradient(torch.autocast)
    with contextlib.nullcontext() if ours else ours_by_default():
        assert torch.equal(gradient(amp_plugin.autocast if ours else torch.autocast), expected)


def test_a_mode_sees_nothing_that_keeping_casts_needs():
    """A mode that counts ops counts the same as with torch.autocast, even when a thread keeps its first cast."""

    class Counting(Quiet):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def ops(autocast):
        weight, seen = nn.Parameter(torch.ones(2, 2)), Counting()
        torch.clear_autocast_cache()
        with seen, autocast("cpu", BF16):
            weight @ weight
        return seen.names

    assert ops(amp_plugin.autocast) == ops(torch.autocast)


def test_the_cast_of_a_dtensor_is_kept():
    """The gradients of two uses of a sharded weight are added in torch's order and dtype."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))

        def gradient(autocast):
            torch.manual_seed(0)
            weight = distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)]).requires_grad_()
            x = distribute_tensor(torch.randn(16, 16), mesh, [Replicate()])
            with autocast("cpu", BF16):
                out = (x @ weight).tanh() @ weight
            out.float().square().sum().backward()
            return weight.grad.full_tensor()

        assert torch.equal(gradient(amp_plugin.autocast), gradient(torch.autocast))


def test_a_thread_leaves_nothing_behind():
    """DataParallel starts new threads in each forward.

    torch's cache, which all threads share, does not change.
    """
    layer, x = nn.Linear(8, 8), torch.ones(1, 8)

    def in_threads(count):
        for _ in range(count):
            thread = threading.Thread(target=lambda: amp_plugin.autocast("cpu", BF16)(layer)(x))
            thread.start()
            thread.join()

    in_threads(200)
    before = resident()
    in_threads(1000)
    assert resident() - before < 1000 * 1000, "bytes in 1000 threads"


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


FLAGS = list(itertools.product([True, False], [None, True, False]))


@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("outer", FLAGS, ids=str)
def test_the_flag_is_taken_over_as_in_torch(outer, made_inside):
    """If the cast of a weight that is used twice is kept, its gradients are added in bfloat16, else in
    float32.
    """

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
    """After ``torch.clear_autocast_cache()`` inside a region every weight is cast again, as in torch."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with amp_plugin.autocast("cpu", BF16):
        x @ weight
        weight.detach().numpy()[:] = 5.0  # goes through no dispatcher, and changes no version counter
        assert (x @ weight)[0, 0] == 2.0
        torch.clear_autocast_cache()
        assert (x @ weight)[0, 0] == 10.0


# -- never stale ----------------------------------------------------------------------------------


class ThroughData(torch.optim.Optimizer):
    """An optimizer that writes weights through ``.data``, as older ones do.

    Version counters do not change.
    """

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.data.sub_(param.grad, alpha=0.1)


class ThroughNumpy(ThroughData):
    """An optimizer that writes weights through NumPy, like a custom kernel.

    Only the hook after its step notices it.
    """

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
    """Train in one region, and compare each forward with one that keeps no casts."""
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
        pytest.param("foreach", "inductor", marks=pytest.mark.whole_run),
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
    """``swap_tensors``, which converts modules, refuses a tensor that has other references."""
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
    """Keeping a cast does not look at the other casts.

    So each of 4000 weights takes about as long as each of 200.
    """
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
            assert native_core().extension.kept_cast_count() == 0
            output.float().sum().backward()
            model.weight.to_local().detach().numpy()[:] *= 2  # as a kernel does which calls no optimizer hook
            plain.mul_(2)
            model.reshard()
    leave()


@pytest.mark.dist
def test_weights_that_fsdp2_refills_are_never_kept():
    """A forward after an update uses the new weights."""
    ranks = call_on_ranks(2, 90, second_forward)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stderr for rank in ranks)
