"""Steps and stored weights on CUDA tensors equal the CPU's ops bit for bit, and agree with the reference."""

import itertools
import math

import pytest
import torch

from amp_plugin.kernels import ops, reference  # noqa: F401 - defines torch.ops.amp_plugin
from amp_plugin.kernels.state_codes import encode
from tests.host_device import host_device
from tests.kernels.steps_of_torch import adam_, sgd_
from tests.kernels.test_step_rules import FORMS, NUMBERS, tensors_of, values_of

pytestmark = pytest.mark.gpu

OP = torch.ops.amp_plugin
GRANULE = 1024  # elements, as kGranuleElements
SIZES = (0, 1, 3, 4, 5, 17, GRANULE - 1, GRANULE, GRANULE + 1, 3 * GRANULE + 2)
ADAM = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
    "maximize": False,
}
SGD = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.1,
    "weight_decay": 0.05,
    "nesterov": False,
    "maximize": False,
}
STORED = ("fp32", "bf16 pair")
OPTIONS_OF_ADAM = {
    torch.float32: {"decoupled_weight_decay": False},
    torch.bfloat16: {"maximize": True, "weight_decay": 0.0},
    torch.float16: {"beta1": 0.3, "eps": 1e-3},
}
OPTIONS_OF_SGD = [
    {},
    {"momentum": 0.0, "dampening": 0.0},
    {"nesterov": True, "dampening": 0.0, "maximize": True},
]


def values(seed, sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def unaligned(tensor, device):
    """Copy tensors to a device, each beginning one element after an aligned address."""
    buffer = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=device)
    buffer[1:].copy_(tensor.flatten())
    return buffer[1:].view(tensor.shape)


def stored(params, how):
    """Return parameters and remainders in the form that the ops take."""
    if how == "bf16 pair":
        high = [torch.empty_like(param, dtype=torch.bfloat16) for param in params]
        low = [torch.empty_like(param, dtype=torch.int16) for param in params]
        OP.pack_weights_(params, high, low)
        return high, low
    return params, []


def adam_tensors(how="fp32", grad=torch.float32, *, amsgrad=False, sizes=SIZES, step=4.0):
    params, remainders = stored(values(0, sizes), how)
    seconds = [value.square() for value in values(3, sizes)]
    largest = [value.square() for value in values(4, sizes)] if amsgrad else []
    steps = [torch.tensor(step + i % 3) for i in range(len(sizes))]
    return [params, values(1, sizes, grad), values(2, sizes), seconds, largest, steps, remainders]


def moved(lists, device, *, aligned=True):
    place = (lambda tensor: tensor.to(device)) if aligned else (lambda tensor: unaligned(tensor, device))
    return [[place(tensor) if tensor.dim() else tensor.to(device) for tensor in part] for part in lists]


def copied(lists):
    return [[tensor.clone() for tensor in part] for part in lists]


def pairs(ours, theirs):
    return zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)


def assert_same_bits(ours, theirs):
    for mine, right in pairs(ours, theirs):
        torch.testing.assert_close(mine.cpu(), right.cpu(), rtol=0, atol=0, equal_nan=True)


def assert_alike(ours, host):
    """Assert that results are close.

    On the host device, where the host computes both, their bits must be equal.
    """
    if host_device.LOADED:
        assert_same_bits(ours, host)
    for mine, right in pairs(ours, host):
        torch.testing.assert_close(mine.cpu(), right, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_adam_is_the_cpus_bit_for_bit(device, how, grad, aligned):
    host = adam_tensors(how, grad, amsgrad=aligned)
    ours = moved(host, device, aligned=aligned)
    options = ADAM | OPTIONS_OF_ADAM[grad]
    late = {"grad_scale": torch.tensor(3.7), "lr_tensor": torch.tensor(0.03, dtype=torch.float64)}
    adam_(OP, *host, **late, **options)
    adam_(OP, *ours, **{name: value.to(device) for name, value in late.items()}, **options)
    assert_alike(ours, host)


def compressed(lists, form):
    """Return states in bfloat16 or as codes. The second list contains averages of squares."""
    if form == "bf16":
        return [[state.bfloat16() for state in part] for part in lists]
    return [[encode(state.flatten(), signed=i == 0) for state in part] for i, part in enumerate(lists)]


@pytest.mark.parametrize("form", ["bf16", "8bit"])
@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_steps_of_compressed_states_are_the_cpus_bit_for_bit(device, form, how, grad, aligned):
    host = adam_tensors(how, grad, amsgrad=aligned)
    host[1][-2][0] = math.nan if grad is torch.float32 else 1.0
    host[2:5] = compressed(host[2 : 5 if aligned else 4], form) + ([] if aligned else [[]])
    ours = [*moved(host[:2], device, aligned=aligned), *moved(host[2:], device)]
    if form == "bf16" and grad is torch.float32:
        ours[1][-2].view(torch.int32)[0] = 0x7FFFFFFF  # the bits of a GPU's nan
    for skipped in (0.0, 0.0, 1.0):
        late = {"grad_scale": torch.tensor(3.7), "found_inf": torch.tensor(skipped)}
        adam_(OP, *host, **late, **ADAM)
        adam_(OP, *ours, **{name: value.to(device) for name, value in late.items()}, **ADAM)
    params, remainders = stored(values(0, SIZES), how)
    grads, momenta = values(1, SIZES), values(2, SIZES)
    for part in (grads, momenta):
        part[-1][:2] = torch.tensor([3e38, -3e38])  # the sums of both elements overflow
    grads[-2][-1] = math.nan
    by_sgd = [params, grads, *compressed([momenta], form), remainders]
    ours_by_sgd = moved(by_sgd, device)
    for lists in (by_sgd, ours_by_sgd):
        sgd_(OP, *lists, **SGD)
    if host_device.LOADED:
        assert_same_bits([*ours, *ours_by_sgd], [*host, *by_sgd])


def test_codes_of_the_largest_and_the_smallest_numbers_are_the_cpus_bit_for_bit(device):
    """Each block of codes has numbers of one size, with a 0 and one large number, infinity or nan."""
    block = 128
    sizes = [(1e-44, 0.0), (1e-37, 1e-30), (1e-3, 1.0), (1e36, 2e37), (1e36, 1e38), (1e20, 3e38)]
    sizes += [(1e19, math.inf), (1.0, math.nan), (math.inf, math.nan), (0.0, 0.0), (1e-3, -1e10)]
    momenta = values(2, [block] * len(sizes))
    for part, (size, outlier) in zip(momenta, sizes, strict=True):
        part.mul_(size)
        part[:3] = torch.tensor([0.0, outlier, -outlier])
    momentum = torch.cat(momenta)
    for scale in (1.0, 1e-19):
        zero = [torch.zeros_like(momentum)]
        states = [*compressed([zero, zero], "8bit"), *compressed([[momentum]], "8bit")]
        by_adam = [
            values(0, [momentum.numel()]),
            [momentum * scale],
            *states[:2],
            [],
            [torch.tensor(4.0)],
            [],
        ]
        by_sgd = [values(0, [momentum.numel()]), [momentum * scale], states[2], []]
        ours_by_adam, ours_by_sgd = moved(by_adam, device), moved(by_sgd, device)
        for _ in range(2):
            for lists in (by_adam, ours_by_adam):
                adam_(OP, *lists, **ADAM)
            for lists in (by_sgd, ours_by_sgd):
                sgd_(OP, *lists, **SGD)
        if host_device.LOADED:
            assert_same_bits([*ours_by_adam, *ours_by_sgd], [*by_adam, *by_sgd])


@pytest.mark.parametrize("name", reference.RULES)
def test_every_rule_is_the_cpus_bit_for_bit(device, name):
    """Codes beyond the last element do not count."""
    numbers = [NUMBERS[number] for number in reference.RULES[name].numbers]
    grads = (torch.float32, torch.bfloat16, torch.float16)
    for how, form, grad in itertools.product(("fp32", "pair"), FORMS, grads):
        host = copied(tensors_of(name, how, form, grad))
        ours = moved(host, device)
        OP.step_(*host, name, numbers, grad_scale=torch.tensor(3.7))
        OP.step_(*ours, name, numbers, grad_scale=torch.tensor(3.7, device=device))
        if host_device.LOADED:
            assert_same_bits([*values_of(name, ours)[:2], ours[1]], [*values_of(name, host)[:2], host[1]])


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_stays_close_to_torchs_fused_kernel(device, amsgrad, decoupled):
    """The bits differ: on CUDA, torch rounds betas to float32 before computing 1 - beta, and adds in another
    order.
    """
    ours = moved(adam_tensors(sizes=(70, 5000), amsgrad=amsgrad, step=0.0), device)
    theirs, before = copied(ours), copied(ours)[0]
    options = {**ADAM, "beta2": 0.999, "decoupled_weight_decay": decoupled}
    late = {"grad_scale": torch.tensor(3.0, device=device), "found_inf": torch.tensor(0.0, device=device)}
    of_torch = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for _ in range(5):
        adam_(OP, *ours, **late, **options)
        torch._foreach_add_(theirs[5], 1)
        plain = {name: value for name, value in options.items() if name != "decoupled_weight_decay"}
        of_torch(*theirs[:6], amsgrad=amsgrad, **late, **plain)
        assert all(map(torch.equal, ours[1], theirs[1])), "gradients are not those of torch's fused kernel"
    for old, mine, right in zip(before, ours[0], theirs[0], strict=True):
        assert ((mine - right).abs() <= 1e-4 * (mine - old).abs() + 1e-6 * right.abs()).all()
    for part, rtol, atol in ((2, 1e-6, 1e-5), (3, 1e-4, 1e-9), (4, 1e-4, 1e-9)):
        for mine, right in zip(ours[part], theirs[part], strict=True):
            torch.testing.assert_close(mine, right, rtol=rtol, atol=atol)


@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("options", OPTIONS_OF_SGD, ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_sgd_is_the_cpus_bit_for_bit(device, how, options, aligned):
    options = {**SGD, **options}
    params, remainders = stored(values(0, SIZES), how)
    buffers = values(2, SIZES) if options["momentum"] else []
    host = [params, values(1, SIZES), buffers, remainders]
    ours = moved(host, device, aligned=aligned)
    sgd_(OP, *host, grad_scale=torch.tensor(0.3), **options)
    sgd_(OP, *ours, grad_scale=torch.tensor(0.3, device=device), **options)
    assert_alike(ours, host)


def test_many_tensors_in_one_launch(device):
    sizes = [7] * 1000
    host = adam_tensors(sizes=sizes)
    ours = moved(host, device)
    adam_(OP, *copied(ours), **ADAM)  # the first call loads the kernel
    if host_device.LOADED:
        torch.ops.host_device.launched()  # returns the launches so far, and forgets them
    adam_(OP, *host, **ADAM)
    adam_(OP, *ours, **ADAM)
    if host_device.LOADED:
        assert torch.ops.host_device.launched() == ["step"]
    assert_alike(ours, host)


def test_a_counter_of_the_host_is_refused(device):
    params, grads, first, second, _, steps, _ = moved(adam_tensors(sizes=(5,)), device)
    with pytest.raises(
        ValueError, match="a step counter that is .* on cpu; it must be one float32 or float64 on cuda:0"
    ):
        adam_(OP, params, grads, first, second, [], [step.cpu() for step in steps], [], **ADAM)
    with pytest.raises(
        ValueError, match="parameter 0 has a gradient that is .* on cpu; it must be .*, dense, on cuda:0"
    ):
        sgd_(OP, params, [grads[0].cpu()], first, [], **SGD)
    with pytest.raises(ValueError, match="found_inf: got a tensor of 2 elements, Float, on cuda:0; give one"):
        sgd_(OP, params, grads, first, [], found_inf=torch.zeros(2, device=device), **SGD)


@pytest.mark.parametrize("aligned", [True, False])
def test_pairs_are_split_and_joined_bit_for_bit(device, aligned):
    special = [0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 0x00008000, 0x00000001, 0x3F808000]
    special = torch.tensor(special, dtype=torch.int32).view(torch.float32)
    host = [torch.cat([special, -special, torch.tensor([math.inf, -0.0])]), *values(5, SIZES)]
    halves = [[torch.zeros_like(t, dtype=d) for t in host] for d in (torch.bfloat16, torch.int16)]
    masters, *ours = moved([host, *halves], device, aligned=aligned)
    OP.pack_weights_(host, *halves)
    OP.pack_weights_(masters, *ours)
    for mine, right in pairs(ours, halves):
        assert torch.equal(mine.cpu().view(torch.int16), right.view(torch.int16))
    back = [torch.zeros_like(master) for master in masters]
    OP.unpack_weights_(*ours, back)
    OP.unpack_weights_(*halves, host)
    for mine, right in zip(back, host, strict=True):
        assert torch.equal(mine.cpu().view(torch.int32), right.view(torch.int32))


def test_a_captured_step_counts_at_each_replay(device):
    params, grads, first, second, _, steps, _ = moved(adam_tensors(sizes=(50, 3)), device)
    twin = copied([params, grads, first, second, [], steps, []])
    graph, scale = torch.cuda.CUDAGraph(), torch.tensor(2.0, device=device)
    adam_(OP, *copied(twin), grad_scale=scale, **ADAM)  # the first call loads the kernel
    with torch.cuda.graph(graph):
        adam_(OP, params, grads, first, second, [], steps, [], grad_scale=scale, **ADAM)
    for _ in range(3):
        graph.replay()
        adam_(OP, *twin, grad_scale=scale, **ADAM)
    torch.cuda.synchronize()
    assert_same_bits([params, first, second, steps], [twin[0], twin[2], twin[3], twin[5]])
    assert [step.item() for step in steps] == [7.0, 8.0]
