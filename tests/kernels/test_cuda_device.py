"""On a GPU: threads, devices, sizes that only a GPU can hold, and Dynamo."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import amp_plugin
from amp_plugin.kernels import ops  # noqa: F401 - defines torch.ops.amp_plugin

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]
amp = torch.ops.amp_plugin
GIB = 2**30


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device="cuda")


def some_grads(seed=0, count=20):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [1 + 977 * i for i in range(count)]
    return [torch.randn(n, device="cuda", generator=generator) for n in sizes]


def test_threads_and_their_streams_do_not_disturb_each_other():
    want = [amp.norm_check(some_grads(seed), scalar(2.0))[0].item() for seed in range(4)]

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            grads, norms = some_grads(seed), []
            for _ in range(100):
                moved = [g.clone() for g in grads]
                amp.multiply_(moved, scalar(4.0))
                norms.append(amp.unscale_(moved, scalar(0.5))[0])
                del moved  # another thread may reuse their memory
            return {norm.item() for norm in norms}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [{norm} for norm in want]


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


@pytest.mark.filterwarnings("ignore")  # Dynamo warns about code that it skips
def test_a_step_that_dynamo_runs_eagerly_is_not_traced_into_the_kernels():
    """backward() breaks the graph.

    Dynamo traces the code that follows, but must not trace the code of a kernel call.
    """

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
