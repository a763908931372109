"""Autocast works wherever torch runs: compile, checkpoint, functorch, export, tracing, tensor subclasses."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_plugin
from amp_plugin.casting.installed_kernels import KERNELS
from amp_plugin.casting.rules_in_force import uninstall_kernels
from amp_plugin.casting.threads import checkpoint_contexts
from amp_plugin.kernels.build import native_core
from tests.process_groups import group_of_one

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # warnings of torch itself: inductor and jvp script functions, and Dynamo reads .grad of inputs
    pytest.mark.filterwarnings(
        "ignore:`torch.jit",
        "ignore:The .grad attribute of a Tensor that is not a leaf",
        "ignore::DeprecationWarning:torch",
    ),
]

BF16 = torch.bfloat16
SOFTMAX32 = amp_plugin.OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def step(model, forward):
    model.zero_grad()
    output = forward()
    output.float().square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class TestCompile:
    def test_dtype_change_recompiles(self, model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        seen = []
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with amp_plugin.autocast("cpu", dtype=dtype):
                seen.append(compiled(X).dtype)
        assert seen == [torch.bfloat16, torch.float16, torch.bfloat16]

    @pytest.mark.native
    def test_default_rules_change_recompiles(self):
        compiled = torch.compile(lambda x: torch.softmax(x @ x, 0), backend="aot_eager", fullgraph=True)
        seen = []
        for chosen in (None, SOFTMAX32, None):
            amp_plugin.set_default_rules(chosen)
            with torch.autocast("cpu"):
                seen.append(compiled(torch.randn(4, 4)).dtype)
        assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]

    def test_exception_inside_a_compiled_region_then_a_weight_update(self):
        """There, torch does not restore its nesting level, and uses stale weights afterwards (pytorch
        195488).
        """
        x, w = torch.ones(3, 3), nn.Parameter(torch.ones(3, 3))

        def forward(x):
            with amp_plugin.autocast("cpu", dtype=BF16):
                x @ w
                raise KeyError

        try:
            with pytest.raises(KeyError):
                torch.compile(forward, backend="eager")(x)
            torch.set_autocast_enabled("cpu", False)
            for value in (1.0, 2.0):
                with torch.no_grad():
                    w.fill_(value)
                with amp_plugin.autocast("cpu", dtype=BF16):
                    assert (x @ w)[0, 0] == 3 * value
        finally:
            while nesting() > 0:  # restore the nesting level that torch did not
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()

    def test_code_that_stays_eager_is_not_traced_through_ours(self):
        """The region of a graph break is entered outside Dynamo, so no frame of the package is compiled."""
        frames = []

        def forward(x):
            with amp_plugin.autocast("cpu", dtype=BF16):
                raise KeyError

        # as in a new process, the region checks its arguments and installs our kernels
        KERNELS.checked.clear()
        compiled = torch.compile(forward, backend=lambda graph, _: frames.append(graph) or graph.forward)
        with pytest.raises(KeyError):
            compiled(torch.ones(2))
        assert frames == []


def nesting():
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class TestCheckpoint:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_same_gradients_as_without(self, model, use_reentrant, dtype):
        def run(use):
            x = X.clone().requires_grad_()

            def forward():
                with amp_plugin.autocast("cpu", dtype=dtype):
                    return checkpoint(model, x, use_reentrant=use_reentrant) if use else model(x)

            return [*step(model, forward), x.grad]

        assert_same(run(True), run(False))

    @pytest.mark.native
    @pytest.mark.parametrize("cache_enabled", [True, False])
    @pytest.mark.parametrize("default_rules", [False, True])
    @pytest.mark.parametrize("backward_inside", [False, True])
    def test_a_weight_used_twice_in_a_reentrant_one(self, cache_enabled, default_rules, backward_inside):
        """The gradients of both uses are added in torch.autocast's dtype and order."""

        def gradient(autocast):
            torch.manual_seed(0)
            w = torch.nn.Parameter(torch.randn(32, 32))
            x = torch.randn(32, 32, requires_grad=True)
            with autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
                loss = checkpoint(lambda x: ((x @ w).tanh() @ w).float(), x, use_reentrant=True).sum()
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            return w.grad

        expected = gradient(torch.autocast)
        amp_plugin.set_default_rules(amp_plugin.OpRules.default("cpu") if default_rules else None)
        assert torch.equal(gradient(amp_plugin.autocast), expected)

    @pytest.mark.native
    @pytest.mark.parametrize("by_default", [True, False])
    def test_own_rules_reach_the_recomputation(self, by_default):
        """Default rules reach it without help. Rules of a region reach it through context_fn."""
        w = torch.randn(4, 4, requires_grad=True)
        seen = []

        def block(x):
            y = torch.softmax(x @ w, 0)
            seen.append(y.dtype)
            return y * y  # saves y, so the recomputation must reach this op

        amp_plugin.set_default_rules(SOFTMAX32 if by_default else None)
        extra = {} if by_default else {"context_fn": checkpoint_contexts}
        with amp_plugin.autocast("cpu", rules=SOFTMAX32):
            loss = checkpoint(block, torch.randn(4, 4), use_reentrant=False, **extra).sum()
        loss.backward()
        assert seen == [torch.float32, torch.float32]


class TestFunctorch:
    @pytest.mark.parametrize(
        "transform", ["vmap", "grad", "jvp", "jacrev", "hessian", "functional_call", "inference_mode"]
    )
    def test_same_as_torch(self, transform):
        torch.manual_seed(0)
        # without LayerNorm: torch cannot vmap its backward with mixed dtypes (pytorch 184890)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        params = {name: p.detach() for name, p in model.named_parameters()}

        def call(x, params=params):
            return torch.func.functional_call(model, params, (x,))

        def loss(x, params=params):
            return call(x, params).float().square().sum()

        transforms = {
            "vmap": lambda: [torch.vmap(model)(X.unsqueeze(1))],
            "grad": lambda: torch.func.grad(loss, argnums=1)(X, params).values(),
            "jvp": lambda: torch.func.jvp(loss, (X,), (torch.ones_like(X),)),
            "jacrev": lambda: [torch.func.jacrev(call)(X[0])],
            "hessian": lambda: [torch.func.hessian(loss)(X[0])],
            "functional_call": lambda: [call(X)],
            "inference_mode": lambda: [torch.inference_mode()(model)(X)],
        }

        def run(autocast):
            with autocast("cpu", dtype=BF16):
                return list(transforms[transform]())

        assert_same(run(amp_plugin.autocast), run(torch.autocast))


class TestCapture:
    @pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
    @pytest.mark.parametrize("grad", [False, True])
    def test_jit_trace(self, model, grad):
        """torch's cache breaks the trace with grad: "Cannot insert a Tensor that requires grad" (pytorch
        50231).
        """

        class Twice(nn.Module):
            def __init__(self, autocast):
                super().__init__()
                self.model, self.autocast = model, autocast

            def forward(self, x):
                with self.autocast("cpu", dtype=BF16):
                    return self.model(x) + self.model(x)

        uninstall_kernels()  # so that the trace opens the first region of the process
        with torch.set_grad_enabled(grad):
            traced = torch.jit.trace(Twice(amp_plugin.autocast), (X,))
            assert_same([traced(2 * X).detach()], [Twice(torch.autocast)(2 * X).detach()])

    def test_make_fx_sees_the_same_ops(self, model):
        from torch.fx.experimental.proxy_tensor import make_fx

        def graph(autocast):
            def forward(x):
                with autocast("cpu", dtype=BF16):
                    return model(x) + model(x)

            traced = make_fx(forward)(X)
            assert traced(X).dtype is BF16
            return sorted(str(node.target) for node in traced.graph.nodes)

        # torch's without its cache, because the trace does not know the cached casts
        assert graph(amp_plugin.autocast) == graph(partial(torch.autocast, cache_enabled=False))

    def test_make_fx_before_dispatch_records_torchs_blocks_and_no_op_of_ours(self, model):
        from torch.fx.experimental.proxy_tensor import make_fx

        def graph(autocast):
            def forward(x):
                with autocast("cpu", dtype=BF16):
                    return model(x)

            nodes = make_fx(forward, pre_dispatch=True)(X).graph.nodes
            return [getattr(node.target, "__name__", str(node.target)) for node in nodes]

        KERNELS.checked.clear()
        assert graph(amp_plugin.autocast) == graph(torch.autocast)


@pytest.mark.native
class TestFunctionModes:
    @pytest.mark.parametrize("mode", ["set_default_device", "with device", "another"])
    def test_rules_and_kept_casts_hold(self, model, mode, request):
        if mode == "set_default_device":
            request.addfinalizer(lambda: torch.set_default_device(None))
            torch.set_default_device("cpu")
        modes = {"with device": torch.device("cpu"), "another": torch.overrides.BaseTorchFunctionMode()}
        with (
            modes.get(mode, nullcontext()),
            amp_plugin.autocast("cpu", dtype=BF16, rules=SOFTMAX32),
        ):
            for _ in range(2):
                assert model(X).softmax(-1).dtype is torch.float32
            assert native_core().extension.kept_cast_count() == 4  # weights and biases of two Linears

    def test_own_rules_are_followed_where_blocks_are_recorded(self):
        from torch.fx.experimental.proxy_tensor import make_fx

        def forward(x, rules):
            with amp_plugin.autocast("cpu", dtype=BF16, rules=rules):
                return (x @ x).softmax(-1)

        x = torch.ones(4, 4)
        for rules, dtype in ((None, BF16), (SOFTMAX32, torch.float32)):
            traced = make_fx(partial(forward, rules=rules), pre_dispatch=True)(x)
            assert traced(x).dtype is dtype


class TestOtherTensors:
    @pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested", "jagged", "fake", "mkldnn"])
    @pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*[nN]ested")
    def test_same_as_torch_op_by_op(self, kind):
        dense = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        make = {
            "sparse_coo": dense.to_sparse,
            "sparse_csr": dense.to_sparse_csr,
            "nested": lambda: torch.nested.nested_tensor([dense, dense[:2]]),
            "jagged": lambda: torch.nested.nested_tensor([dense, dense[:2]], layout=torch.jagged),
            "mkldnn": dense.to_mkldnn,
            "fake": lambda: torch._subclasses.FakeTensorMode().from_tensor(dense),
        }[kind]

        ops = {
            "mm": lambda x: torch.mm(x, dense),
            "linear": lambda x: nn.functional.linear(x, dense),
            "cat": lambda x: torch.cat([x, x]),
            "mse": lambda x: nn.functional.mse_loss(x, x),
            "sum": lambda x: x.sum(),
        }

        def outcome(autocast, op):
            x = make()
            try:
                with autocast("cpu", dtype=BF16):
                    y = op(x)
                return y.dtype, y.layout
            except Exception as error:  # noqa: BLE001 - the error is what is compared
                return type(error).__name__

        for name, op in ops.items():
            assert outcome(amp_plugin.autocast, op) == outcome(torch.autocast, op), name

    def test_dtensor(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

        with group_of_one():
            mesh = init_device_mesh("cpu", (1,))
            torch.manual_seed(0)
            weight = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
            x = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])

            def run(autocast):
                weight.grad = None
                with autocast("cpu", dtype=BF16):
                    y = x @ weight
                y.float().sum().backward()
                return [y.full_tensor().detach(), weight.grad.full_tensor()]

            assert_same(run(amp_plugin.autocast), run(torch.autocast))
