"""For errors such as "expected scalar type Half but found Float", diagnose names the op and its dtypes, and
prints lines that cure it.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_plugin
from amp_plugin.numerics.finding import Finding
from amp_plugin.numerics.refusals import finding_in_trace
from tests.commands import amp as run
from tests.commands import diagnose as amp
from tests.warm_processes import call


def in_place(h):
    y = torch.zeros(4, 4)
    y[h > 0] = h[h > 0]
    return y


def batched(h):
    return torch.baddbmm(torch.zeros(1, 4, 4), h[None], h[None])


BODIES = {  # an op that torch refuses in an fp16 block -> the op that needs a rule, and the rule
    "masked_scatter": (lambda h: torch.zeros(4, 4).masked_scatter(h > 0, h), "aten::masked_scatter", "promote"),
    "index_add": (lambda h: torch.zeros(4, 4).index_add(0, torch.arange(4), h), "aten::index_add", "promote"),
    "scatter": (lambda h: torch.zeros(4, 4).scatter(0, torch.zeros(4, 4).long(), h), "aten::scatter", "promote"),
    "lerp": (lambda h: torch.lerp(h, torch.zeros(4, 4), 0.5), "aten::lerp", "promote"),
    "det": (torch.linalg.det, "aten::linalg_det", "fp32"),
    "slogdet": (lambda h: torch.linalg.slogdet(h)[1], "aten::linalg_slogdet", "fp32"),
    "sparse.mm": (lambda h: torch.sparse.mm(torch.eye(4).to_sparse(), h), "aten::_sparse_mm", "promote"),
    "masked_fill": (lambda h: h.masked_fill(h > 0, -1e9), "aten::masked_fill", "fp32"),
}  # fmt: skip


class Body(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.op = op

    def forward(self, h):
        return self.op(h)


class Net(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.net, self.body = nn.Linear(4, 4), Body(op)

    def forward(self, x):
        return self.body(self.net(x)).float().sum()


def refused(model: nn.Module, dtype: torch.dtype = torch.float16) -> Finding | None:
    """Run a model in a block under diagnose. Return the finding about torch's error."""
    diagnosis = amp_plugin.diagnose()
    try:
        with diagnosis, torch.autocast("cpu", dtype=dtype):
            model(torch.randn(4, 4))
    except (RuntimeError, ValueError):
        (finding,) = diagnosis.findings
        assert finding.kind == finding.cause == "dtype"
        return finding
    return None


def try_cures() -> None:
    """Paste every cure for every op, in a process that has no other rules."""
    for name, (op, rule_name, rule) in BODIES.items():
        finding = refused(Net(op))
        assert finding is not None, name
        assert rule_name in finding.rule_names, (name, finding.rule_names)
        assert f"the rule {rule} " in finding.advice, (name, finding.advice)
        assert finding.module == "Net.body", name
        assert len(finding.cures) == 2, name
        for cure in finding.cures:
            model = Net(op)
            exec(cure.code, {"model": model})
            assert refused(model) is None, f"{name}: {cure}"
            amp_plugin.set_default_rules(None)
        print("cured", name)


@pytest.mark.native
def test_each_cure_runs_as_it_is_and_cures():
    answer = call(try_cures, frameworks=True)
    assert answer.stdout.splitlines() == [f"cured {name}" for name in BODIES], answer.stderr


def test_an_op_in_place_gets_a_cast_to_write(tmp_path):
    finding = refused(Net(in_place))
    assert (finding.op, finding.cures) == ("aten::index_put_.default", ())
    assert "call .to(dtype) on the other inputs of aten::index_put_.default" in finding.advice
    assert "fp32 and fp16" in finding.headline


def test_in_bf16_and_outside_of_a_block():
    assert refused(Net(BODIES["index_add"][0]), torch.bfloat16).rule_names == ("aten::index_add",)
    with pytest.raises(RuntimeError), amp_plugin.diagnose() as diagnosis:
        nn.Linear(4, 4).half()(torch.ones(2, 4))
    assert "open an autocast block" in diagnosis.findings[0].advice
    assert diagnosis.findings[0].cures == ()


def test_an_error_that_the_program_catches_is_none():
    with amp_plugin.diagnose() as diagnosis, torch.autocast("cpu", dtype=torch.float16):
        h = nn.Linear(4, 4)(torch.ones(4, 4))
        try:
            torch.linalg.det(h)
        except RuntimeError:
            torch.linalg.det(h.float())
    assert diagnosis.findings == []


def test_another_error_after_one_that_was_caught_is_none():
    def program():
        with contextlib.suppress(RuntimeError):
            torch.linalg.det(torch.ones(2, 2).half())
        torch.ones(2).view(3)

    with pytest.raises(RuntimeError, match="shape"), amp_plugin.diagnose() as diagnosis:
        program()
    assert diagnosis.findings == []


@pytest.mark.parametrize(
    "op",
    [lambda h: torch.tensordot(h, torch.ones(4, 4), 1), lambda h: functional.scaled_dot_product_attention(h[None], *2 * [torch.ones(1, 4, 4).double()])],
    ids=["tensordot", "attention"],
)  # fmt: skip
def test_what_torch_refuses_before_it_calls_an_op(op):
    model = Net(op)
    finding = refused(model)
    assert finding.module == "Net.body"
    assert finding.place.file == __file__
    assert "in this line before it called an op" in finding.advice
    (cure,) = finding.cures
    assert 'get_submodule("body")' in cure.code


def test_the_module_in_fp32_cures_what_is_refused_before_an_op():
    model = Net(lambda h: torch.tensordot(h, torch.ones(4, 4), 1))
    finding = refused(model)
    exec(finding.cures[0].code, {"model": model})
    assert refused(model) is None


class Product(torch.autograd.Function):
    """A product as an autograd Function without custom_fwd and custom_bwd."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def backward_of(function) -> list[Finding]:
    diagnosis = amp_plugin.diagnose()
    with contextlib.suppress(RuntimeError), diagnosis:
        with amp_plugin.autocast("cpu", dtype=torch.float16):
            x = nn.Linear(4, 4)(torch.ones(2, 4))
            loss = function.apply(x, nn.Parameter(torch.ones(4, 1))).float().sum()
        loss.backward()
    return diagnosis.findings


@pytest.mark.native
def test_an_autograd_function_without_custom_fwd_is_told_of_it():
    (finding,) = backward_of(Product)
    assert finding.op == "aten::mm.default"
    assert "decorate its forward with amp_plugin.custom_fwd" in finding.advice
    (cure,) = finding.cures
    mended = type("Product", (Product,), {})
    exec(cure.code, {"Product": mended})
    assert backward_of(mended) == []


ENCODER = """\
import torch
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 1).eval()
mask = torch.zeros(2, 5, dtype=torch.bool)
mask[0, 3:] = True
# CURE
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    model(torch.randn(2, 5, 8), src_key_padding_mask=mask)
"""


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fused_kernel_that_refuses_a_block_does_so_under_diagnose(tmp_path):
    """Its inner ops are autocast, but not below a dispatch mode.

    Then the program would run only under diagnose.
    """
    script = tmp_path / "train.py"
    script.write_text(ENCODER)
    result = amp(str(script))
    assert result.exit_code == 1
    assert "expected scalar type Float but found BFloat16" in result.stderr
    assert "torch refused to run aten::_transformer_encoder_layer_fwd.default" in result.stdout
    for cure in result.stdout.partition("paste")[2].split("# or"):
        code = "\n".join(
            line.strip() for line in cure.strip().splitlines() if not line.strip().startswith("#")
        )
        script.write_text(ENCODER.replace("# CURE", code))
        assert amp(str(script)).exit_code == 0, code
        amp_plugin.set_default_rules(None)


def test_an_op_that_keeps_statistics_takes_a_rule():
    name = "aten::fused_moving_avg_obs_fake_quant"
    rules = amp_plugin.OpRules.default("cpu").with_rule(name, "fp32")
    assert rules[f"{name}.default"] == "fp32"
    with pytest.raises(ValueError, match="in-place and out= forms are never autocast"):
        rules.with_rule("aten::masked_scatter_", "fp32")


def from_trace(model: nn.Module, dtype: torch.dtype = torch.float16) -> Finding | None:
    """Return the message of `amp-plugin run` about the error that a model raises, or None."""
    try:
        with torch.autocast("cpu", dtype=dtype):
            model(torch.randn(4, 4))
    except (RuntimeError, TypeError, ValueError) as error:
        if (finding := finding_in_trace(error)) is not None:
            return finding
        raise
    return None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*BODIES, "in place", "batched"])
def test_run_names_module_line_and_dtypes_and_its_cure_runs(name, dtype):
    op = {"in place": in_place, "batched": batched}.get(name) or BODIES[name][0]
    finding = from_trace(Net(op), dtype)
    if finding is None:
        pytest.skip("torch takes these dtypes")
    assert (finding.kind, finding.module) == ("dtype", "Net.body")
    assert finding.place.file == __file__
    assert finding.reached
    (cure,) = finding.cures
    model = Net(op)
    exec(cure.code, {"model": model})
    assert from_trace(model, dtype) is None


class Encoder(nn.Module):
    """A library's module that is called in a block. Its own code refuses inputs in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(4, 4), nn.GRUCell(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.rnn(x.half())


def test_run_names_the_module_of_a_library():
    finding = from_trace(Encoder())
    assert finding.module == "Encoder.rnn"
    assert finding.place.file == __file__


@pytest.mark.parametrize(
    "error", [RuntimeError("shape '[3]' is invalid"), ValueError("no such file"), KeyError("Half and Float")]
)
def test_run_says_nothing_of_other_errors(error):
    with pytest.raises(type(error)) as caught:
        raise error
    assert finding_in_trace(caught.value) is None


def to_numpy():
    model = nn.Linear(4, 4)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(torch.ones(2, 4)).numpy()


def test_a_result_in_bf16_that_goes_to_numpy_is_told_of_float_and_eval_precision():
    with pytest.raises(TypeError, match="unsupported ScalarType") as caught, amp_plugin.diagnose() as seen:
        to_numpy()
    for finding in (finding_in_trace(caught.value), *seen.findings):
        assert finding.place.file == __file__
        assert "call .float() before .numpy()" in finding.advice
        assert 'eval_precision="fp32"' in finding.advice
        assert finding.cures == ()
    assert len(seen.findings) == 1


class Contrastive(nn.Module):
    """A loss with a parameter of its own, which the program made float16."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(2, dtype=torch.float16))

    def forward(self, x):
        return (x * self.temperature[0].float()).square().mean()


def step_scaled(kind, cure=""):
    model, loss_fn = nn.Linear(4, 2), Contrastive()
    exec(cure, locals())
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1)
    scaler = kind("cpu", init_scale=8.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_fn(model(torch.ones(3, 4)))
    scaler.scale(loss).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, amp_plugin.GradScaler])
def test_float16_gradients_that_a_scaler_refuses_are_named_by_their_module(kind):
    with pytest.raises(ValueError, match="unscale FP16") as caught, amp_plugin.diagnose() as seen:
        step_scaled(kind)
    for finding in (finding_in_trace(caught.value), *seen.findings):
        assert (finding.module, finding.place.file) == ("Contrastive", __file__)
        assert "Contrastive.temperature is float16" in finding.advice
        assert ".to(dtype)" not in finding.advice
        (cure,) = finding.cures
        step_scaled(kind, cure.code)
    assert len(seen.findings) == 1


PROGRAM = """
import torch

class Head(torch.nn.Module):
    def forward(self, h):
        y = torch.zeros(4, 4)
        y[h > 0] = h[h > 0]
        return y

model = torch.nn.Sequential(torch.nn.Linear(4, 4), Head())
with torch.autocast("cpu", torch.float16):
    model(torch.ones(4, 4))
"""


def test_run_prints_it_after_the_traceback(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    done = run("run", "train.py")
    assert done.exit_code == 1
    error, _, said = done.stderr.partition("amp-plugin run: torch refused")
    assert "RuntimeError: Index put requires" in error
    for part in (
        "fp16 and fp32",
        "Sequential.1",
        "train.py:7 in forward: y[h > 0] = h[h > 0]",
        'get_submodule("1")',
    ):
        assert part in said
