"""Each op is one launch for any number of tensors. Tables are uploaded again only if a tensor moves."""

import ctypes
import gc
import sys
import threading
import time
from contextlib import nullcontext

import pytest
import torch

from amp_plugin.kernels import ops  # noqa: F401 - defines torch.ops.amp_plugin
from amp_plugin.kernels.build import native_core
from tests.host_device import host_device

amp = torch.ops.amp_plugin
# returns the launches since its last call
launched = torch.ops.host_device.launched if host_device.LOADED else None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("cuda_kernels"),
    pytest.mark.skipif(
        not host_device.LOADED, reason="launches are counted on the device made of host memory"
    ),
]
FIRST_CONTEXT = 0xC0  # the host device's context for cuda:0; the next number is that of cuda:1


def scalar(value):
    return torch.tensor(value, device="cuda")


def gradients(count, size=3):
    return [torch.full((size + i % 5,), 1.0, device="cuda") for i in range(count)]


def many(count):
    """Return so many gradients that their table does not fit into the memory reserved for tables."""
    return list(torch.ones(count, device="cuda").unbind())


CALLS = {"norm_check": amp.norm_check, "unscale": amp.unscale_, "multiply": amp.multiply_}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("count", [1, 100, 400, 10_000])
def test_every_op_is_one_launch(count, captured):
    grads, factor = gradients(count), scalar(0.5)
    for name, call in CALLS.items():
        launched()
        with torch.cuda.graph(torch.cuda.CUDAGraph()) if captured else nullcontext():
            call(grads, factor)
        assert launched() == [name]


def test_the_other_ops_are_one_launch():
    scale = scalar(4.0)
    counters = [torch.full((), i, dtype=torch.int32, device="cuda") for i in range(2)]
    launched()
    amp.update_scale_(scale, *counters, scalar(0.0), 2.0, 0.5, 1, 1.0, 64.0, 1, 0)
    amp.clip_factor(scalar(3.0), 1.0)
    assert launched() == ["update_scale", "clip_factor"]
    assert scale.item() == 8.0


@pytest.mark.parametrize("count", [1, 100, 400])
def test_no_python_runs_in_a_call(count):
    params = [torch.nn.Parameter(torch.zeros(3, device="cuda")) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    inverse, ledger = scalar(0.5), native_core().extension.GradientLedger
    grads = [param.grad for param in params]
    for call in CALLS.values():  # Python runs setup code once for each call
        call(grads, inverse)
    seen = []
    gc.collect()  # so that no finalizer of an earlier test runs during the calls
    gc.disable()
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        ledger.norm_check(params, inverse, 2.0)
        ledger.unscale_(params, inverse, 2.0)
        ledger.multiply_(params, inverse)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert not seen


def uploads_of(tensors, call=amp.norm_check):
    before = amp._cuda_uploads(0)
    call(tensors, scalar(0.5))
    return amp._cuda_uploads(0) - before


def push_out_tables():
    """Fill the cache with tables, so that none of an earlier test is left.

    New tensors may reuse that test's memory.
    """
    held = torch.ones(101, device="cuda")
    for n in range(1, 101):
        amp.norm_check([held[n:]], scalar(1.0))
    return held


def test_a_table_is_uploaded_only_when_a_tensor_moved():
    held = push_out_tables()
    one, other = gradients(20), gradients(20)
    assert uploads_of(one) == 1
    assert uploads_of(list(one), amp.unscale_) == 0  # another op and another list, but the same memory
    assert uploads_of(other) == 1
    assert uploads_of(one) == 0  # two optimizers take turns
    assert uploads_of(one[:-1]) == 1
    assert uploads_of([one[0].view(torch.int32).view(torch.float32)]) == 1
    with torch.cuda.stream(torch.cuda.Stream()):
        assert uploads_of(one) == 1
    del held  # while it existed, gradients could not get its memory


def test_old_tables_are_dropped_and_their_memory_used_again():
    buffer, inverse = torch.ones(500, device="cuda"), scalar(1.0)
    push_out_tables()
    for n in range(1, 200):
        assert amp.norm_check([buffer[:n]], inverse)[0].item() == pytest.approx(n**0.5)
    assert uploads_of([buffer[:199]]) == 0
    assert uploads_of([buffer[:1]]) == 1


def test_a_graph_has_a_table_of_its_own_as_long_as_it_lives():
    grads, inverse, graph = gradients(150), scalar(1.0), torch.cuda.CUDAGraph()
    want = amp.norm_check(grads, inverse)[0].item()
    for _ in range(2):
        with torch.cuda.graph(graph):
            norm = amp.norm_check(grads, inverse)[0]
        for n in range(1, 100):  # other tables come and go, and reuse memory
            amp.norm_check([torch.ones(n, device="cuda")], inverse)
        graph.replay()
        assert norm.item() == want
        graph.reset()
        graph = torch.cuda.CUDAGraph()


def test_a_factor_of_one_lets_every_block_end_at_once():
    grads = gradients(3, size=100_000)
    torch.ops.host_device.barriers()
    assert amp.multiply_(grads, scalar(1.0)).item() == 0.0
    assert torch.ops.host_device.barriers() == 0
    assert amp.multiply_(grads, scalar(2.0)).item() == 0.0
    assert torch.ops.host_device.barriers() > 0


def test_a_table_finds_memory_where_torchs_cache_has_all_of_the_card():
    """This can happen in the middle of training."""
    huge = many(200_000)
    torch.ops.host_device.card_is_full(True)
    try:
        assert amp.norm_check(gradients(9), scalar(1.0))[1].item() == 0.0
        assert amp.norm_check(huge, scalar(1.0))[0].item() == pytest.approx(200_000**0.5)
    finally:
        torch.ops.host_device.card_is_full(False)


def in_thread(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_table_that_another_thread_pushes_out_keeps_its_memory_until_it_is_launched():
    """Otherwise tables of another thread on the same stream would overwrite it."""
    mine, others, inverse, norms = gradients(1, size=7), torch.ones(101, device="cuda"), scalar(1.0), []
    torch.ops.host_device.hold_next_launch(True)
    try:
        thread = in_thread(lambda: norms.append(amp.norm_check(mine, inverse)[0]))
        wait_until(torch.ops.host_device.launch_is_held)
        for n in range(1, 101):  # more tables than the cache keeps
            assert amp.norm_check([others[n:]], inverse)[0].item() == pytest.approx((101 - n) ** 0.5)
    finally:
        torch.ops.host_device.hold_next_launch(False)
    thread.join()
    assert norms[0].item() == pytest.approx(7**0.5)


@pytest.fixture
def of_context():
    """Make the context with this number current in this thread. 0 means no context."""
    set_current = ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent
    yield lambda number: set_current(ctypes.c_size_t(number))
    set_current(ctypes.c_size_t(0))


def test_a_launch_takes_the_kernel_itself_and_leaves_the_context(of_context):
    grads, inverse, calls = gradients(9), scalar(1.0), torch.ops.host_device.context_calls
    amp.norm_check(grads, inverse)
    of_context(FIRST_CONTEXT)
    for block in (nullcontext(), torch.cuda.graph(torch.cuda.CUDAGraph())):
        calls()
        with block:
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


def test_the_driver_is_asked_nothing_that_is_an_error(of_context):
    """compute-sanitizer counts every error.

    Without a context, the driver cannot say which device is current.
    """
    failures = torch.ops.host_device.failures()
    grads, inverse = gradients(9), scalar(1.0)
    for context in (0, FIRST_CONTEXT, FIRST_CONTEXT + 1):
        of_context(context)
        amp.norm_check(grads, inverse)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            amp.norm_check(grads, inverse)
    assert torch.ops.host_device.failures() == failures


def test_a_graph_gives_its_table_back_while_another_thread_allocates():
    """This happens on a thread of the driver, for which the allocation may be waiting."""
    graph, grads, inverse = torch.cuda.CUDAGraph(), gradients(5), scalar(1.0)
    with torch.cuda.graph(graph):
        amp.norm_check(grads, inverse)
    huge = many(200_000)

    def allocate():  # needs a new slab, because no table of the new stream was given back
        with torch.cuda.stream(torch.cuda.Stream()):
            amp.norm_check(huge, inverse)

    torch.ops.host_device.hold_next_allocation(True)
    try:
        allocating = in_thread(allocate)
        wait_until(torch.ops.host_device.allocation_is_held)
        giving_back = in_thread(graph.reset)
        giving_back.join(10)
        assert not giving_back.is_alive()
    finally:
        torch.ops.host_device.hold_next_allocation(False)
    allocating.join()


def test_a_full_card_is_told_of_during_a_capture_too():
    """During a capture torch cannot empty its cache. It raises an internal error, which is not shown."""
    huge, inverse, held = many(200_000), scalar(1.0), []
    while True:  # until the memory from the driver is used up
        bytes_before = torch.ops.host_device.driver_bytes()
        held.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(held[-1]):
            amp.norm_check(huge, inverse)
        if torch.ops.host_device.driver_bytes() > bytes_before:
            break
    torch.ops.host_device.card_is_full(True)
    try:
        with (
            pytest.raises(RuntimeError, match="cannot allocate memory for a table of tensors"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            amp.norm_check(huge, inverse)
    finally:
        torch.ops.host_device.card_is_full(False)


def test_an_upload_breaks_no_capture_of_another_thread():
    """In torch's capture mode "global", allocating pinned memory in any thread breaks the capture.

    In mode "relaxed" it does not.
    """
    before = torch.ops.host_device.unsafe_allocations()
    assert uploads_of(gradients(11)) == 1
    assert torch.ops.host_device.unsafe_allocations() == before


def test_threads_that_capture_share_a_stream_for_uploads():
    grads, inverse = gradients(3), scalar(1.0)

    def capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            amp.norm_check(grads, inverse)

    capture()
    made = torch.ops.host_device.streams_made()
    for _ in range(3):
        in_thread(capture).join()
    assert torch.ops.host_device.streams_made() == made


@pytest.mark.parametrize("fault", ["no user objects", "graphs take no user object"])
def test_a_graph_that_takes_no_table_leaves_none_behind(monkeypatch, fault):
    grads, inverse = gradients(400), scalar(1.0)
    for _ in range(2):  # the first round allocates memory
        objects, memory = torch.ops.host_device.user_objects(), torch.ops.host_device.driver_bytes()
        for _ in range(300):
            with monkeypatch.context() as planted, torch.cuda.graph(torch.cuda.CUDAGraph()):
                planted.setenv("HOST_DEVICE_FAULT", fault)
                with pytest.raises(RuntimeError, match="cannot attach the table to the CUDA graph"):
                    amp.norm_check(grads, inverse)
    assert torch.ops.host_device.user_objects() == objects
    assert torch.ops.host_device.driver_bytes() == memory


def test_a_capture_that_has_failed_gets_no_table(monkeypatch):
    objects, grads, inverse = torch.ops.host_device.user_objects(), gradients(12), scalar(1.0)
    with monkeypatch.context() as planted, torch.cuda.graph(torch.cuda.CUDAGraph()):
        planted.setenv("HOST_DEVICE_FAULT", "the capture has failed")
        amp.norm_check(grads, inverse)
        assert torch.ops.host_device.user_objects() == objects
