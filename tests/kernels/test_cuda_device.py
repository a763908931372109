"""On a GPU: no host syncs, graphs, streams, threads, sizes that only a GPU holds, torch beside ours."""

from __future__ import annotations

import threading

import pytest
import torch

import amp_plugin
from amp_plugin.kernels import ops  # noqa: F401 - defines torch.ops.amp_plugin
from amp_plugin.kernels.cuda.register import cuda_core

pytestmark = pytest.mark.gpu
amp = torch.ops.amp_plugin
GIB = 2**30


@pytest.fixture(autouse=True)
def our_kernels():
    core = cuda_core(0)
    assert core.loaded, core.reason


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device="cuda")


def some_grads(seed=0, count=20):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [1 + 977 * i for i in range(count)]
    return [torch.randn(n, device="cuda", generator=generator) for n in sizes]


class no_host_sync:
    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_):
        torch.cuda.set_sync_debug_mode("default")


def scale_state():
    return scalar(2.0**16), scalar(0, torch.int32), scalar(1, torch.int32)


RULE = (2.0, 0.5, 3, 1.0, 2.0**24, 1, 0)


def test_no_op_waits_for_the_device():
    inverse, state = scalar(0.5), scale_state()
    for _ in range(2):  # the second time with moved gradients: the table is uploaded again
        grads = some_grads()
        with no_host_sync():
            amp.norm_check(grads, inverse)
            _, found_inf, _ = amp.unscale_(grads, inverse)
            amp.multiply_(grads, inverse)
            amp.update_scale_(*state, found_inf, *RULE)


def make_step(model, optimizer, inputs, state, max_norm=1.0):
    """Scale, backward, measure, clip by folding, step, update: what a captured training step does."""
    parameters = list(model.parameters())

    def step():
        scale = state[0]
        loss = model(inputs).square().mean() * scale
        grads = torch.autograd.grad(loss, parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        norm, found_inf, flags = amp.norm_check(grads, scale.reciprocal())
        optimizer.grad_scale = amp.clip_factor(norm, max_norm, scale)
        optimizer.found_inf = found_inf
        optimizer.step()
        amp.update_scale_(*state, found_inf, *RULE)
        return norm, found_inf, flags

    return step


def small_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.Linear(65, 7)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)


def batches(count=12):
    generator = torch.Generator("cuda").manual_seed(1)
    data = [torch.randn(16, 33, device="cuda", generator=generator) for _ in range(count)]
    for overflow in (4, 5, 9):
        data[overflow] = torch.full_like(data[overflow], float("inf" if overflow != 9 else "nan"))
    return data


def test_a_captured_step_replays_with_new_data_and_overflows():
    data = batches()
    eager_model, eager_optimizer = small_model()
    inputs, state = data[0].clone(), scale_state()
    step, eager = make_step(eager_model, eager_optimizer, inputs, state), []
    for batch in data:
        inputs.copy_(batch)
        norm, found_inf, flags = step()
        eager.append((norm.item(), found_inf.item(), state[0].item(), state[1].item(), flags.tolist()))
    assert [found for _, found, *_ in eager] == [float(i in (4, 5, 9)) for i in range(len(data))]

    model, optimizer = small_model()
    inputs, state = data[0].clone(), scale_state()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = make_step(model, optimizer, inputs, state)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.copy_(old)
        for values in optimizer.state.values():
            for tensor in values.values():
                tensor.zero_()
    for tensor, value in zip(state, (2.0**16, 0, 1), strict=True):
        tensor.fill_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm, found_inf, flags = step()
    replayed = []
    for batch in data:
        inputs.copy_(batch)
        graph.replay()
        replayed.append((norm.item(), found_inf.item(), state[0].item(), state[1].item(), flags.tolist()))
    torch.testing.assert_close(
        [norm for norm, *_ in replayed], [norm for norm, *_ in eager], equal_nan=True, rtol=1e-5, atol=0
    )
    assert [rest for _, *rest in replayed] == [rest for _, *rest in eager]
    for one, other in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_capture_of_many_tensors_carries_its_table():
    grads = [torch.full((1 + i % 9,), 1.0, device="cuda") for i in range(300)]
    inverse, graph = scalar(1.0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm, found_inf, flags = amp.unscale_(grads, inverse)
    for value in (0.5, 3.0):
        for grad in grads:
            grad.fill_(2.0)
        grads[250][0] = float("nan")
        inverse.fill_(value)
        torch.cuda.synchronize()
        junk = [torch.full((4096,), 0xAB, dtype=torch.uint8, device="cuda") for _ in range(200)]
        graph.replay()
        expected = [0] * 300
        expected[250] = 2
        assert flags.tolist() == expected
        assert norm.isnan()
        assert found_inf.item() == 1.0
        assert all((g == 2 * value).all() for i, g in enumerate(grads) if i != 250)
        del junk


def test_side_streams_do_not_disturb_each_other():
    streams = [torch.cuda.Stream() for _ in range(4)]
    grads = [some_grads(seed) for seed in range(4)]
    want = [amp.norm_check(g, scalar(1.0))[0].item() for g in grads]
    torch.cuda.synchronize()
    got = []
    for _ in range(50):
        for stream, these in zip(streams, grads, strict=True):
            with torch.cuda.stream(stream):
                moved = [g.clone() for g in these]
                inverse = torch.full((), 0.5, device="cuda")
                amp.multiply_(moved, inverse.mul(4))
                got.append(amp.unscale_(moved, inverse)[0])
                del moved
    torch.cuda.synchronize()
    assert [norm.item() for norm in got] == want * 50


def test_threads_do_not_disturb_each_other():
    want = [amp.norm_check(some_grads(seed), scalar(1.0))[0].item() for seed in range(4)]
    wrong = []

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                grads = some_grads(seed)
                for _ in range(100):
                    moved = [g.clone() for g in grads]
                    if amp.norm_check(moved, torch.ones((), device="cuda"))[0].item() != want[seed]:
                        wrong.append(seed)
        except RuntimeError as error:  # a thread's exception would otherwise be lost
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own_kernels():
    for index in (1, 0, 1):
        device = torch.device("cuda", index)
        grads = [torch.ones(4, device=device), torch.ones(5, device=device)]
        norm, found_inf, _ = amp.unscale_(grads, torch.tensor(2.0, device=device))
        assert norm.device == found_inf.device == device
        assert (norm.item(), found_inf.item()) == (6.0, 0.0)


def test_more_than_two_to_the_31_elements():
    numel = 2**31 + 33
    if torch.cuda.mem_get_info()[0] < 7 * numel:
        pytest.skip(f"needs {7 * numel // GIB} GiB of GPU memory")
    grad = torch.full((numel,), 2.0, dtype=torch.float16, device="cuda")
    norm, found_inf, _ = amp.unscale_([torch.ones(3, device="cuda"), grad], scalar(0.5))
    torch.testing.assert_close(norm.double().item(), (0.75 + numel) ** 0.5, rtol=1e-6, atol=0.0)
    assert found_inf.item() == 0.0
    assert bool((grad == 1).all())
    grad[-1] = float("nan")
    assert amp.norm_check([torch.ones(3, device="cuda"), grad], scalar(0.5))[2].tolist() == [0, 2]
    assert amp.multiply_([grad], scalar(3.0)).item() == 1.0
    assert bool((grad[:-1] == 3).all())


def test_memory_does_not_grow():
    grads, inverse = some_grads(), scalar(1.0)
    amp.unscale_(grads, inverse)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        amp.unscale_(grads, inverse)
        amp.multiply_(grads, inverse)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.filterwarnings("ignore")  # Dynamo's, on what it steps over
def test_a_step_that_dynamo_runs_eagerly_is_not_traced_into_the_kernels():
    """backward() breaks the graph; the frames that the rest calls are Dynamo's, a kernel's must not be."""

    def train(wrap):
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 4).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = amp_plugin.GradScaler("cuda", init_scale=2.0**10, growth_interval=1)

        def step(inputs):
            optimizer.zero_grad()
            scaler.scale(layer(inputs).square().mean()).backward()
            scaler.clip_grad_norm_(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()

        compiled = wrap(step)
        for inputs in torch.randn(3, 2, 8):
            compiled(inputs.cuda())
        return layer.weight.detach(), scaler.get_scale()

    weight, scale = train(lambda step: step)
    again, scale_again = train(lambda step: torch.compile(step, backend="eager"))
    assert scale == scale_again == 2.0**13
    assert torch.equal(weight, again)
