"""custom_fwd and custom_bwd give the same as torch's."""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

import amp_plugin
from amp_plugin import custom_bwd, custom_fwd

BF16 = torch.bfloat16


def product(fwd, bwd, *, with_setup_context=False, **options):
    """Return x @ w as an autograd Function in either style. It records the autocast state of its methods."""

    def multiply(x, w):
        Product.seen.append((torch.is_autocast_enabled("cpu"), x.dtype))
        return x @ w

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def both(ctx, *inputs):
        save(ctx, inputs, None)
        return multiply(*inputs)

    class Product(torch.autograd.Function):
        seen: ClassVar = []
        forward = staticmethod(fwd(device_type="cpu", **options)(multiply if with_setup_context else both))
        if with_setup_context:
            setup_context = staticmethod(save)

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            Product.seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return grad.to(x.dtype) @ w.t(), x.t() @ grad.to(x.dtype)

    return Product


@pytest.mark.parametrize("cast_inputs", [None, torch.float32, BF16])
@pytest.mark.parametrize("enabled", [True, False])
def test_same_as_torch(cast_inputs, enabled):
    def run(fwd, bwd, autocast):
        torch.manual_seed(0)
        function = product(fwd, bwd, cast_inputs=cast_inputs)
        x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        with autocast("cpu", dtype=torch.float16, enabled=enabled):
            y = function.apply(x, w)
        y.float().sum().backward()
        return y.detach(), x.grad, w.grad, function.seen

    theirs = run(torch.amp.custom_fwd, torch.amp.custom_bwd, torch.autocast)
    ours = run(custom_fwd, custom_bwd, amp_plugin.autocast)
    assert ours[3] == theirs[3]
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_setup_context(cast_inputs):
    function = product(custom_fwd, custom_bwd, with_setup_context=True, cast_inputs=cast_inputs)
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with amp_plugin.autocast("cpu", dtype=torch.float16):
        inside = function.apply(x, w)
    outside = function.apply(x, w)
    inside.float().sum().backward()
    outside.sum().backward()
    on = cast_inputs is None
    assert function.seen == [
        (on, torch.float32),
        (False, torch.float32),
        (on, torch.float16),
        (False, BF16),
    ]
    assert not hasattr(x, "_dtype")
    assert not [name for name in vars(function) if name.startswith("_amp_plugin")]


def test_setup_context_with_nested_functions():
    inner = product(custom_fwd, custom_bwd, with_setup_context=True, cast_inputs=torch.float32)

    class Outer(torch.autograd.Function):
        seen: ClassVar = []

        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(x):
            return inner.apply(x, x).sum()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            Outer.seen.append(torch.is_autocast_enabled("cpu"))
            return grad * ctx.saved_tensors[0]

    x = torch.randn(3, 3, requires_grad=True)
    with amp_plugin.autocast("cpu"):
        Outer.apply(x).backward()
    assert Outer.seen == [True]


def test_setup_context_under_functorch():
    function = product(custom_fwd, custom_bwd, with_setup_context=True)
    function.generate_vmap_rule = True
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    with amp_plugin.autocast("cpu", dtype=torch.float16):
        grad = torch.func.grad(lambda x: function.apply(x, w).float().sum())(x)
        batched = torch.vmap(function.apply, in_dims=(0, None))(torch.randn(2, 3, 3), w)
    assert grad.shape == (3, 3)
    assert batched.dtype is torch.float16


def test_every_kind_of_input_is_cast_or_passed():
    class Point(NamedTuple):
        x: Any
        y: Any

    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, *inputs):
            seen.extend(list(each) if isinstance(each, Iterator) else each for each in inputs)

    half, array = torch.ones(2, dtype=torch.float16), pytest.importorskip("numpy").ones(2, dtype="float16")
    passed = "text", array, half.double(), torch.ones(1, dtype=torch.int64)
    with amp_plugin.autocast("cpu"):
        Look.apply(half, {"a": half}, [half, (half,)], (each for each in [half]), Point(half, 1), *passed)
    assert type(seen[4]) is Point
    cast = [seen[0], seen[1]["a"], seen[2][1][0], seen[3][0], seen[4].x]
    assert [tensor.dtype for tensor in cast] == [torch.float32] * 5
    assert seen[5] == "text"
    assert seen[6] is array
    assert [tensor.dtype for tensor in seen[7:]] == [torch.float64, torch.int64]


def test_backward_without_custom_fwd_says_what_to_do():
    half = product(lambda **_: lambda forward: forward, custom_bwd)
    x = torch.ones(1, 1, requires_grad=True)
    with pytest.raises(
        RuntimeError, match="forward of ProductBackward recorded no autocast state; decorate it"
    ):
        half.apply(x, x).backward()


class Anywhere(torch.autograd.Function):
    """x @ w in both styles, with decorators that name no device."""

    seen: ClassVar = []

    @staticmethod
    @custom_fwd
    def forward(ctx, x, options):
        ctx.save_for_backward(x)
        ctx.kind = x.device.type
        return x @ options["weights"][0]

    @staticmethod
    @custom_bwd
    def backward(ctx, grad):
        kind, (x,) = ctx.kind, ctx.saved_tensors
        Anywhere.seen.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
        return grad.to(x.dtype), None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_device_is_that_of_the_arguments(device):
    Anywhere.seen.clear()
    x, w = torch.randn(3, 3, device=device, requires_grad=True), torch.eye(3, device=device)
    with amp_plugin.autocast(device, dtype=torch.float16):
        inside = Anywhere.apply(x, {"weights": [w]})
    outside = Anywhere.apply(x, {"weights": [w]})
    assert (inside.dtype, outside.dtype) == (torch.float16, torch.float32)
    inside.float().sum().backward()
    with amp_plugin.autocast(device, dtype=BF16):
        outside.sum().backward()
    assert [call[:2] for call in Anywhere.seen] == [(device, True), (device, False)]
    assert Anywhere.seen[0][2] is torch.float16


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_counts_before_the_cpu(device):
    class Scaled(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=torch.float32)
        def forward(factor, x):
            return x * factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.state = ctx._device_type

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            return None, grad

    factor, x = torch.ones(()), torch.ones(3, device=device, requires_grad=True)
    with amp_plugin.autocast("cpu" if device == "meta" else device):
        y = Scaled.apply(factor, x.half())
    # meta tensors are not cast
    wanted = (torch.float16, "cpu") if device == "meta" else (torch.float32, device)
    assert (y.dtype, y.grad_fn.state) == wanted
    y.sum().backward()


def test_without_a_tensor_the_device_has_to_be_named():
    class Constant(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, size):
            return torch.ones(size)

    with pytest.raises(ValueError, match=r"Constant.forward was given no tensor, .*\(device_type='cuda'\)"):
        Constant.apply(2)


@pytest.mark.parametrize("decorator", [custom_fwd, custom_bwd])
def test_device_type_must_be_a_string(decorator):
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        decorator(device_type=torch.device("cpu"))
