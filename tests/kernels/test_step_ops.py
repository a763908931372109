"""Steps of Adam and SGD equal torch's fused kernels bit for bit, and agree with float64."""

import itertools
import math

import pytest
import torch

from tests.kernels.steps_of_torch import adam_, sgd_
from tests.kernels.test_weight_ops import pair_of

OP = torch.ops.amp_plugin
TASK = 65536
SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 1000, TASK - 1, TASK + 1]
VECTOR = 16


def some(shapes, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * factor for shape in shapes]


def copies(*lists, device="cpu"):
    return [[tensor.to(device, copy=True) for tensor in tensors] for tensors in lists]


def all_equal(ours, theirs):
    """Return whether the tensors of two lists of lists are equal, on whatever device they are."""
    pairs = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)


def same_bits(theirs, ours, terms=()):
    """Return whether two lists have the same bits, except in last elements that do not fill a vector.

    In torch's loop over those elements, the compiler fuses other products into sums. That makes a difference
    of one or two roundings of the largest of the ``terms`` that were added. Without terms, it is two units in
    the last place of the result.
    """
    for i, pair in enumerate(zip(theirs, ours, strict=True)):
        right, got = (tensor.flatten() for tensor in pair)
        whole = right.numel() // VECTOR * VECTOR
        largest = [abs(term[i].flatten()[whole:]) for term in terms] or [right[whole:].abs()]
        rounding = torch.stack(largest).amax(0) * 2.0**-22
        if not (
            torch.equal(right[:whole], got[:whole]) and (right[whole:] - got[whole:]).abs().le(rounding).all()
        ):
            return False
    return True


class Adam:
    """The tensors of one Adam step."""

    def __init__(self, shapes, *, amsgrad=False, grad_dtype=torch.float32, scale=1.0, step=4.0, seed=0):
        self.params = some(shapes, seed)
        self.grads = [g.to(grad_dtype) for g in some(shapes, seed + 1, scale)]
        self.exp_avg = some(shapes, seed + 2, 0.1)
        self.exp_avg_sq = [t.square() for t in some(shapes, seed + 3, 0.1)]
        self.largest = [t.square() for t in some(shapes, seed + 4, 0.1)] if amsgrad else []
        self.steps = [torch.tensor(step) for _ in shapes]

    def tensors(self, device="cpu"):
        lists = (self.params, self.grads, self.exp_avg, self.exp_avg_sq, self.largest, self.steps)
        return copies(*lists, device=device)


ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
NAMES = ["param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]


def torch_adam(tensors, *, decoupled_weight_decay, **options):
    torch._foreach_add_(tensors[5], 1)
    call = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
    call(*tensors, amsgrad=bool(tensors[4]), **options)


@pytest.mark.native
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_has_the_bits_of_torchs_fused_kernel(amsgrad, decoupled, weight_decay):
    for maximize, scale, beta1 in itertools.product([False, True], [None, 2.0**16, 3.7e4, 1.0], [0.9, 0.3]):
        given = Adam([(size,) for size in SIZES] + [(3, 5, 7)], amsgrad=amsgrad, scale=scale or 1.0)
        options = {**ADAM, "beta1": beta1, "weight_decay": weight_decay, "maximize": maximize}
        options["grad_scale"] = None if scale is None else torch.tensor(scale)
        theirs, ours = given.tensors(), given.tensors()
        torch_adam(theirs, decoupled_weight_decay=decoupled, **options)
        adam_(OP, *ours, [], decoupled_weight_decay=decoupled, **options)
        for name, right, got in zip(NAMES, theirs, ours, strict=False):
            assert same_bits(right, got), name
        assert all(map(torch.equal, theirs[1], ours[1])), "gradients are left divided"
        assert theirs[5] == ours[5]


def torch_sgd(tensors, **options):
    torch._fused_sgd_(*tensors, is_first_step=False, **options)


@pytest.mark.native
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_has_the_bits_of_torchs_fused_kernel(momentum):
    shapes = [(size,) for size in SIZES]
    choices = {
        "dampening": [0.0, 0.3],
        "nesterov": [False, True],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
    }
    for scale, *chosen in itertools.product([None, 2.0**16, 3.7e4], *choices.values()):
        grads, buffers = some(shapes, 1, scale or 1.0), some(shapes, 2) if momentum else []
        options = dict(zip(choices, chosen, strict=True))
        options |= {"lr": 1e-3, "momentum": momentum}
        options["grad_scale"] = None if scale is None else torch.tensor(scale)
        theirs, ours = (copies(some(shapes, 0), grads, buffers) for _ in range(2))
        torch_sgd(theirs, **options)
        sgd_(OP, *ours, [], **options)
        assert same_bits(theirs[0], ours[0])
        assert all(map(torch.equal, theirs[1], ours[1])), "gradients are left divided"
        terms = [[abs(g) / (scale or 1.0) + 0.5 for g in grads], buffers]
        assert same_bits(theirs[2], ours[2], terms if momentum else ())


def errors(got, right):
    """Return the largest error, relative to the largest true value."""
    return max(
        ((g.double() - r).abs().max() / r.abs().max().clamp(min=1e-30)).item()
        for g, r in zip(got, right, strict=True)
    )


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_is_right_by_float64(kernel, grad_dtype, amsgrad):
    given = Adam([(1000,), (33, 5)], amsgrad=amsgrad, grad_dtype=grad_dtype, scale=128.0)
    got = given.tensors()
    adam_(kernel, *got, [], decoupled_weight_decay=True, grad_scale=torch.tensor(100.0), **ADAM)
    right = [[t.double() for t in tensors] for tensors in given.tensors()]
    optimizer = torch.optim.AdamW(right[0], lr=1e-3, weight_decay=0.1, amsgrad=amsgrad)
    for i, param in enumerate(right[0]):
        param.grad = right[1][i] / 100
        state = {"step": right[5][i].float(), "exp_avg": right[2][i], "exp_avg_sq": right[3][i]}
        optimizer.state[param] = state | ({"max_exp_avg_sq": right[4][i]} if amsgrad else {})
    optimizer.step()
    assert errors(got[0], right[0]) < 1.2e-7
    for i, name in enumerate(["exp_avg", "exp_avg_sq", "max_exp_avg_sq"][: 3 if amsgrad else 2]):
        assert errors(got[2 + i], [optimizer.state[param][name] for param in right[0]]) < 2.4e-7
    assert got[5] == [torch.tensor(5.0)] * 2


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_right_by_float64(kernel, grad_dtype, nesterov):
    params, grads, buffers = (some([(1000,), (33, 5)], seed) for seed in range(3))
    grads = [g.to(grad_dtype) for g in grads]
    got = copies(params, grads, buffers)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    sgd_(kernel, *got, [], dampening=0.0, maximize=False, **options)
    right = [param.double() for param in params]
    optimizer = torch.optim.SGD(right, **options)
    for param, grad, buffer in zip(right, grads, buffers, strict=True):
        param.grad, optimizer.state[param]["momentum_buffer"] = grad.double(), buffer.double()
    optimizer.step()
    assert errors(got[0], right) < 1.2e-7
    assert errors(got[2], [optimizer.state[param]["momentum_buffer"] for param in right]) < 2.4e-7


@pytest.mark.parametrize("scale", [None, 1.0, 64.0])
@pytest.mark.parametrize("found", [torch.tensor(1.0), torch.ones(1, dtype=torch.float64)], ids=str)
def test_an_overflow_only_divides_gradients(on, scale, found):
    late = {"found_inf": found.to(on.device)}
    if scale is not None:
        late["grad_scale"] = torch.tensor(scale, device=on.device)
    given = Adam([(5000,), (3,)], amsgrad=True)
    got = given.tensors(on.device)
    adam_(on.ops, *got, [], decoupled_weight_decay=False, **late, **ADAM)
    given.grads = [grad / (scale or 1.0) for grad in given.grads]
    assert all_equal(got, given.tensors())
    if on.name == "op":  # on a GPU, the host does not know it
        assert not any(tensor._version for tensor in itertools.chain(got[0], *got[2:]))
    params, grads, buffers = (some([(40,)], seed) for seed in range(3))
    got = copies(params, grads, buffers, device=on.device)
    sgd_(on.ops, *got, [], **late, **{**SGD, "weight_decay": 0.1})
    assert all_equal(got, [params, [grad / (scale or 1.0) for grad in grads], buffers])


@pytest.mark.parametrize("place", ["second moment", "largest so far", "both"])
def test_a_nan_is_the_largest_in_amsgrad(on, place):
    """The result equals torch.maximum's, in whole vectors and in the elements after them."""
    given = Adam([(2 * VECTOR + 5,)], amsgrad=True)
    for at in (3, 2 * VECTOR + 4):
        if place != "largest so far":
            given.exp_avg_sq[0][at] = math.nan
        if place != "second moment":
            given.largest[0][at] = math.nan
    got = given.tensors(on.device)
    adam_(on.ops, *got, [], decoupled_weight_decay=True, **ADAM)
    wrong = [3, 2 * VECTOR + 4]
    assert got[4][0].isnan().nonzero().flatten().tolist() == wrong
    assert got[0][0].isnan().nonzero().flatten().tolist() == wrong


LAYOUTS = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.view(-1, 3).t().contiguous().t(),
    "with gaps": lambda tensor: tensor.new_zeros((*tensor.shape, 2))[..., 0].copy_(tensor),
}


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("paired", [False, True])
def test_gradients_are_left_divided(on, grad_dtype, layout, found, paired):
    """Each quotient is rounded once. It is not affected by maximize or weight decay, and inf and nan stay."""
    values = torch.randn(999, generator=torch.Generator().manual_seed(3)) * 1e3
    values[:8] = torch.tensor([*SPECIAL[:5], 60000.0, 1e-3, -7.0])
    grad = LAYOUTS[layout](values.to(grad_dtype).to(on.device))
    param = torch.randn(grad.shape, device=on.device)
    high, low = pair_of(OP, param)
    options = {**SGD, "momentum": 0.0, "weight_decay": 0.5, "maximize": True}
    late = {"grad_scale": torch.tensor(3.7), "found_inf": torch.tensor(found)}
    late = {name: number.to(on.device) for name, number in late.items()}
    right, version = (grad.cpu().float() / 3.7).to(grad_dtype), grad._version
    sgd_(on.ops, [high if paired else param], [grad], [], [low] if paired else [], **options, **late)
    assert torch.equal(bits(grad.cpu().float()), bits(right.float()))
    assert grad._version > version


@pytest.mark.parametrize("number", [None, 1.0, torch.tensor(1.0), torch.tensor([1.0], dtype=torch.float64)])
def test_a_scale_of_one_does_not_write_gradients(kernel, number):
    late = {} if number is None else {"grad_scale": torch.as_tensor(number)}
    got, read_only = Adam([(70,)]).tensors(), torch.randn(70)
    got[1] = [read_only]
    before = read_only.clone()
    adam_(kernel, *got, [], decoupled_weight_decay=True, **late, **ADAM)
    assert torch.equal(read_only, before)
    assert read_only._version == 0


@pytest.mark.native
def test_the_step_takes_what_16_bit_gradients_are_before_they_are_rounded():
    grad = torch.randn(1000).to(torch.bfloat16)
    wide, narrow = (torch.zeros(1000) for _ in range(2))
    late = {"grad_scale": torch.tensor(3.7)}
    sgd_(OP, [wide], [grad.float()], [], [], **{**SGD, "momentum": 0.0}, **late)
    sgd_(OP, [narrow], [grad], [], [], **{**SGD, "momentum": 0.0}, **late)
    assert torch.equal(wide, narrow)


def joined(high, low):
    value = torch.empty_like(high, dtype=torch.float32)
    OP.unpack_weights_([high], [low], [value])
    return value


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pair_is_stepped_as_the_float32_it_is(grad_dtype):
    """This holds for all bits: an infinity, a nan, a number whose half overflows, and one below the normal
    range.
    """
    given = Adam([(size,) for size in SIZES], grad_dtype=grad_dtype)
    for param in given.params[-2:]:
        param[: TASK // 2] = torch.randint(-(2**31), 2**31, (TASK // 2,)).to(torch.int32).view(torch.float32)
        param[: len(SPECIAL)] = torch.tensor(SPECIAL)
    whole, paired = given.tensors(), given.tensors()
    parts = [pair_of(OP, param) for param in paired[0]]
    for high, low in parts:
        low[high == 0] = -1  # ignored, because the high half is zero
    paired[0], remainders = [high.clone() for high, _ in parts], [low.clone() for _, low in parts]
    adam_(OP, *whole, [], decoupled_weight_decay=True, **ADAM)
    adam_(OP, *paired, remainders, decoupled_weight_decay=True, **ADAM)
    together = [joined(h, low) for h, low in zip(paired[0], remainders, strict=True)]
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(together, whole[0], strict=True))
    assert all(map(torch.equal, itertools.chain(*paired[2:]), itertools.chain(*whole[2:])))


def test_any_memory_order(on):
    """A gradient, state or parameter may have another memory order than the others, or gaps."""
    shape = (2, 3, 4, 5)

    def stepped(order):
        given = Adam([shape], amsgrad=True)
        tensors = given.tensors(on.device)
        for i, change in order.items():
            tensors[i] = [change(tensor) for tensor in tensors[i]]
        late = {"grad_scale": torch.tensor(3.0, device=on.device)}
        adam_(on.ops, *tensors, [], decoupled_weight_decay=True, **late, **ADAM)
        return [tensor.contiguous() for tensor in itertools.chain(*tensors)]

    def gappy(tensor):
        return tensor.new_zeros((*shape, 2))[..., 0].copy_(tensor)

    def last(tensor):
        return tensor.contiguous(memory_format=torch.channels_last)

    plain = stepped({})
    for change in (gappy, last):
        for which in ({0}, {1}, {2}, {3}, {4}, {0, 1, 2, 3, 4}):
            assert all(map(torch.equal, plain, stepped(dict.fromkeys(which, change)))), which


@pytest.mark.native
def test_threads_do_not_change_a_bit(numbers_of_threads):
    given = Adam([(3 * TASK + 5,), (7,), (TASK,)], amsgrad=True)
    results = [given.tensors() for _ in range(3)]
    for tensors, _ in zip(results, numbers_of_threads, strict=True):
        adam_(OP, *tensors, [], decoupled_weight_decay=True, grad_scale=torch.tensor(3.0), **ADAM)
    assert all(all_equal(results[0], other) for other in results[1:])


@pytest.mark.native
def test_versions_are_counted_of_what_is_written(on):
    if on.name == "reference":
        pytest.skip("each op of torch counts")
    params, grads, first, second, _, steps = Adam([(5,)]).tensors(on.device)
    everything = (params, grads, first, second, steps)
    scaled, found = ({name: torch.ones((), device=on.device)} for name in ("grad_scale", "found_inf"))
    scaled["grad_scale"] *= 2
    for late, written in (
        ({}, [1, 0, 1, 1, 1]),
        (scaled, [1, 1, 1, 1, 1]),
        (scaled | found, [0, 1, 0, 0, 0]),
    ):
        before = [tensors[0]._version for tensors in everything]
        adam_(
            on.ops, params, grads, first, second, [], steps, [], decoupled_weight_decay=True, **late, **ADAM
        )
        counted = [tensors[0]._version - old for tensors, old in zip(everything, before, strict=True)]
        # on a GPU, the host does not know that the step is skipped
        is_known = on.name == "op" or not late.keys() & found.keys()
        assert counted == (written if is_known else [1] * 5)


def test_numbers_as_tensors(on):
    given = Adam([(50,)])
    as_number, as_tensor = given.tensors(on.device), given.tensors(on.device)
    as_tensor[5] = [torch.tensor([4.0], dtype=torch.float64, device=on.device)]
    adam_(on.ops, *as_number, [], decoupled_weight_decay=True, **ADAM)
    late = {"lr_tensor": torch.tensor(1e-3, dtype=torch.float64), "grad_scale": torch.ones(1)}
    late = {name: number.to(on.device) for name, number in late.items()}
    adam_(on.ops, *as_tensor, [], decoupled_weight_decay=True, **{**ADAM, "lr": 7.0}, **late)
    assert torch.equal(as_number[0][0], as_tensor[0][0])
    assert as_tensor[5][0].item() == 5.0


SPECIAL = [-0.0, 0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-30, -1e-30, 2.0]


def bits(tensor):
    """Return the bits of float32 numbers. All nans count as equal."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor).view(torch.int32)


@pytest.mark.native
@pytest.mark.parametrize("scale", [0.25, 1.0, 3.7e4])
def test_special_gradients_step_as_in_torch(scale):
    """Without a check for infinities, the step gives torch's results, and zeros keep their sign."""
    given = Adam([(2 * VECTOR,)])
    given.grads[0][: len(SPECIAL)] = torch.tensor(SPECIAL)
    given.exp_avg[0][: len(SPECIAL)] = 0
    late = {"grad_scale": torch.tensor(scale)}
    for call, of_torch, options in (
        (adam_, torch_adam, {**ADAM, "decoupled_weight_decay": True, "beta1": 0.9}),
        (adam_, torch_adam, {**ADAM, "decoupled_weight_decay": False, "beta1": 0.3}),
        (sgd_, torch_sgd, {**SGD, "weight_decay": 0.0}),
        (sgd_, torch_sgd, {**SGD, "nesterov": True}),
    ):
        theirs, ours = given.tensors(), given.tensors()
        if call is sgd_:
            theirs, ours = theirs[:3], ours[:3]
        of_torch(theirs, **options, **late)
        call(OP, *ours, [], **options, **late)
        for right, got in zip(theirs, ours, strict=True):
            assert all(torch.equal(bits(r), bits(g)) for r, g in zip(right, got, strict=True)), options


SGD = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}


@pytest.mark.native
@pytest.mark.parametrize(
    ("params", "grads", "buffers", "remainders", "error", "text"),
    [
        ([1], [], [1], [], ValueError, "sgd_momentum: 1 params and 0 grads; give 1 for each parameter."),
        ([1], [1], [1, 1], [], ValueError, "1 params and 2 states; give 1 for each parameter"),
        (
            [1],
            [2],
            [1],
            [],
            ValueError,
            r"parameter 0 has a gradient that is Float of shape \[2\], layout Strided, on cpu; it must be float32,",
        ),
        ([1], [1], [], [], ValueError, "sgd_momentum: 1 params and 0 states; give 1 for each"),
        ([1.0], [1], [1], [], ValueError, "parameter 0 is Double of shape .* it must be float32 of shape"),
        (
            [1],
            [1],
            [1],
            [1],
            ValueError,
            "parameter 0 is Float of shape .* it must be bfloat16, as it has a rem",
        ),
    ],
)
def test_errors_say_what_is_wrong(params, grads, buffers, remainders, error, text):
    def made(sizes):
        dtypes = [torch.float64 if isinstance(size, float) else torch.float32 for size in sizes]
        return [torch.ones(int(size), dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]

    with pytest.raises(error, match=text):
        sgd_(OP, made(params), made(grads), made(buffers), made(remainders), **SGD)


@pytest.mark.native
def test_errors_of_rules_say_what_is_wrong():
    params, grads, first, second, _, steps = Adam([(5,)]).tensors()
    with pytest.raises(ValueError, match="adam: 1 params and 1 states; give 2 for each parameter"):
        adam_(OP, params, grads, first, [], [], steps, [], decoupled_weight_decay=True, **ADAM)
    with pytest.raises(
        ValueError, match="has a step counter that is Long of shape .* must be one float32 or"
    ):
        adam_(
            OP, params, grads, first, second, [], [torch.tensor(1)], [], decoupled_weight_decay=True, **ADAM
        )
    with pytest.raises(ValueError, match="adam: parameter 0 has states of different dtypes"):
        adam_(
            OP, params, grads, first, [second[0].bfloat16()], [], steps, [],
            decoupled_weight_decay=True, **ADAM,
        )  # fmt: skip
    with pytest.raises(ValueError, match="there is no rule adamw; give one of adam, adam_amsgrad, sgd,"):
        OP.step_(params, grads, [*first, *second], steps, [], "adamw", [0.1])
    with pytest.raises(ValueError, match="got 1 numbers for the rule sgd; give 6, in the order of"):
        OP.step_(params, grads, [], [], [], "sgd", [0.1])


def test_opcheck():
    params, grads, first, second, largest, steps = Adam([(5,), (3, 2)], amsgrad=True).tensors()
    late = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
    lists = (params, grads, [*first, *second, *largest], steps, [])
    torch.library.opcheck(OP.step_.default, (*lists, "adam_amsgrad", [0.1, 0.9, 0.99, 1e-8, 0, 0, 0]), late)


def test_no_parameters_at_all():
    """Then no tensor shows the device, so torch's own ops run."""
    assert adam_(OP, *([] for _ in range(7)), decoupled_weight_decay=True, **ADAM) is None
    assert sgd_(OP, *([] for _ in range(4)), **SGD) is None
