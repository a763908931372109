"""run_in fixes the dtype of an instance, a class, a function or a method, in any region."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn

from amp_plugin import autocast, run_in
from amp_plugin.casting.run_in import apply_fp32_modules
from tests.process_groups import leave
from tests.warm_processes import call_on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Pool(nn.Module):
    """Stands for a region-of-interest pooling from another library, whose boxes need fp32."""

    def forward(self, x, rois, scale=1.0):
        self.seen = (x.dtype, rois.dtype, torch.is_autocast_enabled("cpu"))
        return x * scale + rois.sum().to(x.dtype)


@run_in(FP32, keep={"rois"}, cast_back=True)
class Pool32(Pool):
    """The case that a user asked about: `rois` as it came, `x` converted to fp32 and back."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.heads[0](self.norm(self.body(x)))


def in_bf16(call, *args, **kwargs):
    with autocast("cpu", dtype=BF16):
        return call(*args, **kwargs)


def dtypes_of(net, module):
    """Return the dtypes into and out of a submodule in a bf16 region, as seen below its hooks."""
    seen = []
    hook = module.register_forward_hook(lambda _, args, output: seen.append((args[0].dtype, output.dtype)))
    in_bf16(net, torch.ones(2, 4))
    hook.remove()
    return seen


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_the_roi_pool_case(dtype):
    pool, rois = Pool32(), torch.ones(3, 5, dtype=torch.float64)
    x = torch.ones(2, dtype=dtype, requires_grad=True)
    for call in (lambda: pool(x, rois), lambda: pool(x, rois=rois), lambda: pool(rois=rois.half(), x=x)):
        output = in_bf16(call)
        assert pool.seen[0] is FP32
        assert pool.seen[2] is False
        assert output.dtype is dtype
    assert pool.seen[1] is FP16  # this input is passed on unchanged
    output.sum().backward()
    assert x.grad.dtype is dtype


def test_a_class_statement_is_decorated_in_place_also_with_the_old_super():
    decorated = run_in(FP32)

    @decorated
    class Local(nn.Module):
        def __init__(self):
            super(Local, self).__init__()  # noqa: UP008
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x)

    assert in_bf16(Local(), torch.ones(1, 2)).dtype is FP32
    assert type(pickle.loads(pickle.dumps(Pool32()))) is Pool32


@pytest.mark.parametrize("cast_back", [False, True])
def test_an_instance_computes_as_in_fp32_and_survives_copies(cast_back):
    net = Net()
    plain = copy.deepcopy(net)
    assert run_in(FP32, cast_back=cast_back)(net.norm) is net.norm
    assert isinstance(net.norm, nn.Linear)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert inspect.signature(net.norm.forward) == inspect.signature(plain.norm.forward)
    outside = BF16 if cast_back else FP32
    for twin in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert dtypes_of(twin, twin.norm) == [(BF16, outside)]
        x = torch.randn(2, 4, dtype=BF16)
        expected = plain.norm(x.float())
        assert in_bf16(twin.norm, x).equal(expected.to(outside))
    plain.load_state_dict(net.state_dict())


def test_applied_again_the_last_settings_count():
    linear = run_in(FP32)(run_in(torch.float64)(nn.Linear(2, 2)))
    assert in_bf16(linear, torch.ones(1, 2)).dtype is FP32


def test_a_lazy_module_stays_in_fp32_when_it_gets_its_shape():
    linear = run_in(FP32)(nn.LazyLinear(3))
    for _ in range(2):
        assert in_bf16(linear, torch.ones(2, 4, dtype=BF16)).dtype is FP32


def test_functions_and_methods():
    @run_in(FP32, keep="index")
    def function(x, *more, index=None):
        return x.dtype, [tensor.dtype for tensor in more], index.dtype, torch.is_autocast_enabled("cpu")

    half, double, number = torch.ones(1, dtype=FP16), torch.ones(1).double(), torch.ones(1, dtype=torch.long)
    answer = in_bf16(function, half, half, double, number, index=half)
    assert answer == (FP32, [FP32, torch.float64, torch.long], FP16, False)

    @run_in(FP32, keep={"more"})
    def keeps_the_rest(x, *more, flag):
        return x.dtype, [tensor.dtype for tensor in more], flag.dtype

    assert keeps_the_rest(half, half, half, flag=half) == (FP32, [FP16, FP16], FP32)

    class Encoder(Net):
        @run_in(FP32)
        def encode(self, x):
            return self(x)

    assert in_bf16(Encoder().encode, half.expand(2, 4)).dtype is FP32


def test_containers_are_cast_and_handed_on_untouched_where_nothing_is():
    @run_in(FP32, cast_back=True)
    def function(batch, extra):
        extra.append(1)
        assert batch["x"][0].dtype is FP32
        return {"y": batch["x"][0], "n": 3}

    extra: list[int] = []
    answer = function({"x": (torch.ones(1, dtype=FP16),), "s": "text"}, extra)
    assert answer["y"].dtype is FP16
    assert extra == [1]


def test_every_device_is_switched_off():
    states = []
    function = run_in(FP32)(lambda: states.append([torch.is_autocast_enabled(d) for d in ("cpu", "xpu")]))
    torch.set_autocast_enabled("xpu", True)
    try:
        in_bf16(function)
    finally:
        torch.set_autocast_enabled("xpu", False)
    assert states == [[False, False]]


@pytest.mark.one_graph
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_in_one_graph_it_equals_eager():
    net = Net()
    run_in(FP32, cast_back=True)(net.norm)
    x = torch.randn(2, 4)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    assert in_bf16(torch.compile(net, fullgraph=True, backend=counter), x).equal(in_bf16(net, x))
    assert counter.frame_count == 1
    pool = torch.compile(Pool32(), fullgraph=True, backend="aot_eager")
    assert in_bf16(pool, x.half(), rois=x).dtype is FP16


@pytest.mark.one_graph
@pytest.mark.usefixtures("fresh_dynamo")
def test_an_already_compiled_module_is_reached():
    linear = torch.compile(nn.Linear(2, 2), backend="aot_eager", fullgraph=True)
    assert in_bf16(linear, torch.ones(1, 2)).dtype is BF16
    run_in(FP32)(linear)
    assert in_bf16(linear, torch.ones(1, 2)).dtype is FP32


def ranks_with_a_module_in_fp32() -> None:
    """Check on each rank that the gradients are the mean of those that each rank computes alone, and that the
    module computes in fp32.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    run_in(FP32, cast_back=True)(net.norm)
    alone, x = copy.deepcopy(net), torch.randn(2, 2, 4)[dist.get_rank()]
    for model in (nn.parallel.DistributedDataParallel(net), alone):
        in_bf16(model, x).float().square().sum().backward()
    exact = [grad.equal(grad.bfloat16().float()) for grad in (alone.body.weight.grad, alone.norm.weight.grad)]
    assert exact == [True, False], "where it is computed in bf16, 16 bits hold a gradient"
    for param, other in zip(net.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(other.grad)
        torch.testing.assert_close(param.grad, other.grad / 2)
    leave()


@pytest.mark.dist
def test_gradients_of_a_module_in_fp32_are_reduced_over_ranks():
    ranks = call_on_ranks(2, 90, ranks_with_a_module_in_fp32)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stderr for rank in ranks)


def test_modules_by_name_pattern_and_class():
    net = nn.Sequential(Net(), Net())
    assert apply_fp32_modules(net, ["*.norm", "1.heads.*"]) == ["0.norm", "1.norm", "1.heads.0"]
    assert dtypes_of(net, net[0].norm) == [(BF16, FP32)]
    assert dtypes_of(net, net[0].body) == [(FP32, BF16)]
    assert apply_fp32_modules(Net(), ["Linear"]) == ["body", "norm", "heads.0"]
    assert apply_fp32_modules(Net(), []) == []


@pytest.mark.parametrize(
    ("pattern", "kind", "error"),
    [
        ("*.nrom", ValueError, r"'\*.nrom' is not a name or class of a module in Sequential.*0.norm"),
        ("zzz", ValueError, r"model.named_modules\(\) lists them"),
        ("*.heads", TypeError, "ModuleList has no forward and is never called"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(pattern, kind, error):
    with pytest.raises(kind, match=error):
        apply_fp32_modules(nn.Sequential(Net()), [pattern])


PATCHED = nn.Linear(2, 2)
PATCHED.forward = torch.relu


async def coroutine():
    pass


@pytest.mark.parametrize(
    ("target", "kind", "error"),
    [
        (torch.add, ValueError, "the names of the arguments of .* cannot be read"),
        (Pool(), ValueError, r"Pool.forward has no argument 'roi', did you mean rois\?; it has self, x"),
        (PATCHED, ValueError, "forward of this Linear was replaced on the instance"),
        (3, TypeError, "3 is not a module, module class or function"),
        (int, TypeError, "int'> is not a module"),
        (Pool, TypeError, r"other code uses Pool too; derive a class, class Mine\(Pool\)"),
        (Net().forward, TypeError, r"Net.forward is bound to an object, .* decorate it in its class"),
        (coroutine, TypeError, "coroutine is a generator or coroutine function"),
    ],
)
def test_what_it_cannot_be_applied_to(target, kind, error):
    with pytest.raises(kind, match=error):
        run_in(FP32, keep={"roi"} if kind is ValueError else ())(target)


@pytest.mark.parametrize("given", [nn.Linear, torch.long])
def test_dtypes_that_it_does_not_take(given):
    with pytest.raises(ValueError, match=r"is not a floating-point dtype; write run_in\(torch.float32\)"):
        run_in(given)


class Square(nn.Module):
    def forward(self, x):
        return x @ x


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("inner", [nn.Linear(4, 4), Square(), "decorated"])
def test_torchscript_calls_it(inner):
    """TorchScript compiles the function that functools.wraps has wrapped. The cast would be lost silently."""
    off = type("Off", (Square,), {"forward": autocast("cpu", enabled=False)(Square.forward)})
    inner = nn.Sequential(run_in(FP32)(nn.Identity()), off()) if inner == "decorated" else run_in(FP32)(inner)
    model, x = nn.Sequential(nn.Linear(4, 4), inner), torch.randn(4, 4)
    scripted = torch.jit.script(model)
    assert in_bf16(scripted, x).dtype is FP32
    assert torch.equal(in_bf16(scripted, x), in_bf16(model, x))
    with pytest.raises(RuntimeError, match="Could not export Python function call 'forward'"):
        torch.jit.save(scripted, io.BytesIO())
    with pytest.raises(RuntimeError, match="run_in is not supported in script mode"):
        torch.jit.script(run_in(FP32)(Square.forward))
