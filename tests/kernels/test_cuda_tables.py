"""One launch an op whatever the number of tensors, eager and captured; tables are uploaded when a tensor moved."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time

import pytest
import torch

from amp_plugin.kernels import ops  # noqa: F401 - defines torch.ops.amp_plugin
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.scaling.gradients import make_ledger
from tests.host_device import host_device

amp = torch.ops.amp_plugin
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not host_device.LOADED, reason="launches are counted on the device made of host memory"
    ),
]
FIRST_CONTEXT = 0xC0  # of cuda:0 on the device made of host memory; the next is of cuda:1


@pytest.fixture(autouse=True)
def served():
    assert cuda_core(0).loaded
    torch.ops.host_device.launched()


def launched():
    return torch.ops.host_device.launched()


def scalar(value):
    return torch.tensor(value, device="cuda")


def gradients(count, size=3):
    return [torch.full((size + i % 5,), 1.0, device="cuda") for i in range(count)]


CALLS = {
    "norm_check": amp.norm_check,
    "unscale": amp.unscale_,
    "multiply": amp.multiply_,
}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("count", [1, 100, 400, 10_000])
def test_every_op_is_one_launch(count, captured):
    grads = gradients(count)
    factor = scalar(0.5)
    for name, call in CALLS.items():
        if captured:
            graph = torch.cuda.CUDAGraph()
            launched()
            with torch.cuda.graph(graph):
                call(grads, factor)
        else:
            launched()
            call(grads, factor)
        assert launched() == [name]


def test_the_other_ops_are_one_launch():
    state = (
        scalar(4.0),
        torch.zeros((), dtype=torch.int32, device="cuda"),
        torch.ones((), dtype=torch.int32, device="cuda"),
    )
    amp.update_scale_(*state, scalar(0.0), 2.0, 0.5, 1, 1.0, 64.0, 1, 0)
    amp.clip_factor(scalar(3.0), 1.0)
    assert launched() == ["update_scale", "clip_factor"]
    assert state[0].item() == 8.0


@pytest.mark.parametrize("count", [1, 100, 400])
def test_no_python_runs_in_a_call(count):
    params = [torch.nn.Parameter(torch.zeros(3, device="cuda")) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    inverse, ledger = scalar(0.5), make_ledger()
    grads = [param.grad for param in params]
    for call in (amp.norm_check, amp.unscale_, amp.multiply_):  # Python compiles each, once
        call(grads, inverse)
    seen = []
    gc.collect()  # no finalizer of an earlier test's objects runs in the calls
    gc.disable()

    def note(frame, event, _):
        if event == "call":
            seen.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        ledger.norm_check(params, inverse, 2.0)
        ledger.unscale_(params, inverse, 2.0)
        ledger.multiply_(params, inverse)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert not seen


def uploads_of(call):
    before = amp._cuda_uploads(0)
    call()
    return amp._cuda_uploads(0) - before


def push_out_tables():
    """Fill the store of tables: none is left of an earlier test, whose memory new tensors may lie in."""
    held, inverse = torch.ones(101, device="cuda"), scalar(1.0)
    for n in range(1, 101):
        amp.norm_check([held[n:]], inverse)
    return held


def test_a_table_is_uploaded_only_when_a_tensor_moved():
    held = push_out_tables()
    one, other, inverse = gradients(20), gradients(20), scalar(0.5)
    assert uploads_of(lambda: amp.norm_check(one, inverse)) == 1
    assert (
        uploads_of(lambda: amp.unscale_(list(one), inverse)) == 0
    )  # another op, another list, the same memory
    assert uploads_of(lambda: amp.norm_check(other, inverse)) == 1
    assert uploads_of(lambda: amp.norm_check(one, inverse)) == 0  # two optimizers take turns
    assert uploads_of(lambda: amp.norm_check(one[:-1], inverse)) == 1
    assert uploads_of(lambda: amp.norm_check([one[0].view(torch.int32).view(torch.float32)], inverse)) == 1
    with torch.cuda.stream(torch.cuda.Stream()):
        assert uploads_of(lambda: amp.norm_check(one, inverse)) == 1
    del held  # it kept its memory from the gradients


def test_old_tables_are_dropped_and_their_memory_used_again():
    buffer, inverse = torch.ones(500, device="cuda"), scalar(1.0)
    push_out_tables()
    for n in range(1, 200):
        assert amp.norm_check([buffer[:n]], inverse)[0].item() == pytest.approx(n**0.5)
    assert uploads_of(lambda: amp.norm_check([buffer[:199]], inverse)) == 0
    assert uploads_of(lambda: amp.norm_check([buffer[:1]], inverse)) == 1


def test_what_a_launch_leaves_behind_is_taken_away_by_the_next():
    grads, inverse = gradients(300, size=2000), scalar(1.0)
    for position in (0, 77, 299):
        grads[position][5] = float("nan")
        flags = amp.norm_check(grads, inverse)[2].tolist()
        assert [i for i, flag in enumerate(flags) if flag] == [position]
        grads[position][5] = 1.0
        _, found, flags = amp.norm_check(grads, inverse)
        assert (found.item(), flags.sum().item()) == (0.0, 0)


def test_a_graph_has_a_table_of_its_own_as_long_as_it_lives():
    grads, inverse, graph = gradients(150), scalar(1.0), torch.cuda.CUDAGraph()
    want = amp.norm_check(grads, inverse)[0].item()

    def capture():
        with torch.cuda.graph(graph):
            return amp.norm_check(grads, inverse)[0]

    norm = capture()
    for n in range(1, 100):  # tables come and go, in memory of others
        amp.norm_check([torch.ones(n, device="cuda")], inverse)
    graph.replay()
    assert norm.item() == want
    graph.reset()
    graph = torch.cuda.CUDAGraph()
    norm = capture()
    graph.replay()
    assert norm.item() == want


def test_tensors_of_another_device_are_refused():
    grads = [torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")]
    with pytest.raises(
        ValueError, match="tensor 1 of 2 is not on cuda:0, where the scale is; call the op once"
    ):
        amp.norm_check(grads, scalar(1.0))


def test_a_factor_of_one_lets_every_block_end_at_once():
    grads = gradients(3, size=100_000)
    torch.ops.host_device.barriers()
    assert amp.multiply_(grads, scalar(1.0)).item() == 0.0
    assert torch.ops.host_device.barriers() == 0
    assert amp.multiply_(grads, scalar(2.0)).item() == 0.0
    assert torch.ops.host_device.barriers() > 0


def test_a_table_finds_memory_where_torchs_cache_has_all_of_the_card():
    """At its worst, in the middle of a training."""
    huge = [torch.ones(1, device="cuda") for _ in range(200_000)]  # more than what is reserved
    torch.ops.host_device.card_is_full(True)
    try:
        assert amp.norm_check(gradients(9), scalar(1.0))[1].item() == 0.0
        assert amp.norm_check(huge, scalar(1.0))[0].item() == pytest.approx(200_000**0.5)
    finally:
        torch.ops.host_device.card_is_full(False)


def test_a_table_that_another_thread_pushes_out_keeps_its_memory_until_it_is_launched():
    """On the same stream, whose memory the others' tables would be written to."""
    mine, others, inverse, norms = gradients(1, size=7), torch.ones(101, device="cuda"), scalar(1.0), []
    thread = threading.Thread(target=lambda: norms.append(amp.norm_check(mine, inverse)[0]), daemon=True)
    torch.ops.host_device.hold_next_launch(True)
    try:
        thread.start()
        deadline = time.monotonic() + 60
        while not torch.ops.host_device.launch_is_held():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for n in range(1, 101):  # more than tables are kept
            assert amp.norm_check([others[n:]], inverse)[0].item() == pytest.approx((101 - n) ** 0.5)
    finally:
        torch.ops.host_device.hold_next_launch(False)
    thread.join()
    assert norms[0].item() == pytest.approx(7**0.5)


@pytest.fixture
def of_context():
    """Make a context current in this thread, by a number; 0 is none."""
    set_current = ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent
    yield lambda number: set_current(ctypes.c_size_t(number))
    set_current(ctypes.c_size_t(0))


def test_a_launch_takes_the_kernel_itself_and_leaves_the_context(of_context):
    grads, inverse, calls = gradients(9), scalar(1.0), torch.ops.host_device.context_calls
    amp.norm_check(grads, inverse)
    of_context(FIRST_CONTEXT)
    calls()
    amp.norm_check(grads, inverse)
    assert calls() == ["cuLaunchKernel of a CUkernel"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        amp.norm_check(grads, inverse)
    assert calls() == ["cuLaunchKernel of a CUkernel"]


@pytest.mark.parametrize("before", [0, FIRST_CONTEXT + 1], ids=["no context", "another device's"])
def test_no_context_is_pushed_or_retained_where_another_is_current(of_context, before):
    grads, inverse, calls = gradients(9), scalar(1.0), torch.ops.host_device.context_calls
    amp.norm_check(grads, inverse)
    of_context(before)
    calls()
    amp.norm_check(grads, inverse)
    seen = calls()
    assert seen.count("cuLaunchKernel of a CUkernel") == 1
    assert set(seen) == {"cuLaunchKernel of a CUkernel", "cuCtxSetCurrent"}
    found = ctypes.c_size_t()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
    assert found.value == before
