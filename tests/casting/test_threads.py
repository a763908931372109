"""autocast_module lets threads run a module with the full autocast state."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from amp_plugin import OpRules, autocast, autocast_module, run_in
from amp_plugin.casting.threads import RegionState, current_state
from amp_plugin.kernels.build import native_core

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Net(nn.Module):
    """Returns the dtypes of two ops: a product, and a softmax that runs in fp32 only under custom rules."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return y.dtype, y.softmax(-1).dtype


def in_thread(call, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def as_data_parallel(module, x, copies=3):
    """Do on the CPU what nn.DataParallel does: run replicas in threads, inside torch.autocast blocks."""
    replicas = []
    for _ in range(copies):
        replica = module._replicate_for_data_parallel()
        for name, child in module.named_children():
            setattr(replica, name, child)
        replicas.append(replica)
    enabled = torch.is_autocast_enabled("cpu")

    def worker(replica):
        with torch.autocast("cpu", enabled=enabled):
            return replica(x)

    return [in_thread(worker, replica) for replica in replicas]


X = torch.ones(2, 3)


def test_replicas_run_in_the_state_of_the_caller():
    net = autocast_module(Net())
    for region, dtype in (
        (autocast("cpu", dtype=FP16), FP16),
        (autocast("cpu", dtype=BF16), BF16),
        (torch.autocast("cpu", dtype=FP16), FP16),
        (nullcontext(), FP32),
        (autocast("cpu", enabled=False), FP32),
    ):
        with region:
            assert as_data_parallel(net, X) == [(dtype, dtype)] * 3
            assert net(X) == (dtype, dtype)


@pytest.mark.native
def test_rules_and_the_cache_flag_go_along():
    rules = OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")
    net = autocast_module(Net())
    with autocast("cpu", FP16, cache_enabled=False, rules=rules):
        (state,) = current_state()
        assert as_data_parallel(net, X) == [(FP16, FP32)] * 3
    assert state == RegionState(device_type="cpu", dtype=FP16, cache_enabled=False, rules=rules)
    assert pickle.loads(pickle.dumps(state)) == state
    assert in_thread(autocast_module(Net(), state), X) == (FP16, FP32)


@pytest.mark.native
def test_the_cache_flag_is_followed_in_the_thread():
    casts = native_core().extension.kept_cast_count
    for flag, kept in ((True, 2), (False, 0)):
        with autocast("cpu", BF16, cache_enabled=flag):
            net = autocast_module(Net())
        counted = []
        hook = net.register_forward_hook(lambda *_: counted.append(casts()))
        in_thread(net, X)
        hook.remove()
        assert counted == [kept]


def test_any_thread_runs_in_the_state_of_where_it_was_made():
    with autocast("cpu", dtype=FP16):
        net = autocast_module(Net())
    assert in_thread(net, X) == (FP16, FP16)
    assert net(X) == (FP16, FP16)  # and the thread opens no block of its own


def test_a_block_of_its_own_wins():
    with autocast("cpu", dtype=FP16):
        net = autocast_module(Net())

    def inside(block):
        with block:
            return net(X)

    for make in (torch.autocast, autocast):
        assert in_thread(inside, make("cpu", dtype=BF16)) == (BF16, BF16)
        assert in_thread(inside, make("cpu", enabled=False)) == (FP32, FP32)
    with autocast("cpu", dtype=FP16):
        replica = net._replicate_for_data_parallel()
    replica.linear = net.linear
    net = replica
    assert in_thread(inside, autocast("cpu", dtype=BF16)) == (BF16, BF16)


def test_a_child_stays_as_its_parent_left_it():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = autocast_module(Net())

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.child(x)

    parent = autocast_module(Parent())
    with autocast("cpu", dtype=FP16):
        assert as_data_parallel(parent, X) == [(FP32, FP32)] * 3


def test_the_state_of_the_thread_is_put_back_after_an_error():
    class Broken(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    with autocast("cpu", dtype=FP16):
        net = autocast_module(Broken())

    def twice():
        with pytest.raises(ZeroDivisionError):
            net(X)
        good = autocast_module(Net(), RegionState(device_type="cpu", dtype=BF16))
        return torch.is_autocast_enabled("cpu"), good(X)

    assert in_thread(twice) == (False, (BF16, BF16))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_survives_copies(copied):
    with autocast("cpu", dtype=FP16):
        net = run_in(FP32)(autocast_module(Net()))
    other = copied(net)
    assert isinstance(other, Net)
    assert list(other.state_dict()) == ["linear.weight", "linear.bias"]
    assert in_thread(other, X) == (FP32, FP32)  # with both changes: run_in turns the opened region off
    again = copied(autocast_module(Net(), RegionState(device_type="cpu", dtype=FP16)))
    assert in_thread(again, X) == (FP16, FP16)


@pytest.mark.one_graph
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled():
    state = RegionState(device_type="cpu", dtype=FP16)
    linear = nn.Linear(3, 3)
    expected = in_thread(autocast_module(copy.deepcopy(linear), state), X)
    compiler = partial(torch.compile, fullgraph=True, backend="aot_eager")
    for compiled in (
        compiler(autocast_module(copy.deepcopy(linear), state)),
        autocast_module(compiler(copy.deepcopy(linear)), state),
    ):
        assert in_thread(compiled, X).equal(expected)
        with autocast("cpu", dtype=BF16):
            assert compiled(X).dtype is BF16


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_refused():
    scripted = torch.jit.trace(nn.Linear(3, 3), X)
    with pytest.raises(TypeError, match="is TorchScript and cannot be changed; apply this before scripting"):
        autocast_module(scripted)
    with pytest.raises(TypeError, match=r"Linear without its autocast state; script the module before, and"):
        torch.jit.script(nn.Sequential(autocast_module(nn.Linear(3, 3))))


@pytest.mark.gpu
def test_data_parallel_over_one_device_twice():
    def dtypes(change, block):
        seen = []
        net = nn.Linear(4, 4).cuda()
        net.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
        parallel = change(nn.DataParallel(net, device_ids=[0, 0]))
        with block:
            parallel(torch.ones(4, 4, device="cuda"))
        return seen

    # torch's own wrapper loses it
    assert dtypes(lambda each: each, torch.autocast("cuda", dtype=BF16)) == [FP16, FP16]
    assert dtypes(autocast_module, torch.autocast("cuda", dtype=BF16)) == [BF16, BF16]
    rules = OpRules.default("cuda").with_rule("aten::linear", "fp32")
    assert dtypes(autocast_module, autocast("cuda", dtype=BF16, rules=rules)) == [FP32, FP32]
