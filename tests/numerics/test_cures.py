"""Each cure that a finding prints is pasted unchanged, and then the overflow is gone."""

import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_plugin
from amp_plugin.numerics.advise import cures_of
from amp_plugin.numerics.finding import Finding
from tests.warm_processes import call

OPS = {
    "add": lambda x: x + x,
    "baddbmm": lambda x: torch.baddbmm(x.unsqueeze(1), x.unsqueeze(2), x.unsqueeze(1)),
    "conv": lambda x: functional.conv1d(x.unsqueeze(1), x[:, :3].unsqueeze(1)),
    "conv transposed": lambda x: functional.conv_transpose1d(x.unsqueeze(1), x[:1, :3].unsqueeze(1)),
    "cosh": lambda x: (x / 1e3).cosh(),
    "cumsum": lambda x: x.cumsum(-1),
    "dot": lambda x: x[0] @ x[1],
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "exp": lambda x: (x / 1e3).exp(),
    "linear": lambda x: functional.linear(x, x),
    "linear with bias": lambda x: functional.linear(x, x, x[:, 0]),
    "matmul": lambda x: x @ x.mT,
    "matmul of batches": lambda x: x.unsqueeze(0) @ x.mT.unsqueeze(0),
    "mul": lambda x: x * x,
    "mv": lambda x: x @ x[0],
    "norm": lambda x: x.norm(dim=-1),
    "square": lambda x: x.square(),
    "sub": lambda x: x - (-x),
    "sum": lambda x: x.sum(-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
}


class Scaled(nn.Module):
    """Returns the result of an op divided by its largest element, which gives nan if that is infinite."""

    def __init__(self, op) -> None:
        super().__init__()
        self.op = op

    def forward(self, x):
        y = self.op(x)
        return y / y.abs().amax()


class Block(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.norm = Scaled(op)

    def forward(self, x):
        return self.norm(x.half())


class Net(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), nn.Identity(), Block(op)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def finding_in(model: nn.Module, x: torch.Tensor) -> Finding | None:
    """Run a model in a torch.autocast block and in our region, and assert that the results are equal."""
    found = []
    for block in (torch.autocast, amp_plugin.autocast):
        with amp_plugin.diagnose(keep_going=True) as diagnosis, block("cpu", dtype=torch.float16):
            model(x)
        found.append(diagnosis.findings)
    assert len(found[0]) == len(found[1]) <= 1
    return found[0][0] if found[0] else None


@pytest.fixture
def plain():
    """Provide a program whose default rules are forgotten afterwards."""
    yield
    amp_plugin.set_default_rules(None)


def try_cures() -> None:
    """Paste every cure for every op, in a process that has no other rules.

    Print the cures that do not work.
    """
    x = torch.linspace(30_000, 40_000, 32).reshape(4, 8)
    for name, op in OPS.items():
        finding = finding_in(Net(op), x)
        assert (finding.module, finding.dtype) == ("Net.blocks.2.norm", torch.float16), name
        assert len(finding.cures) == 2, name
        for cure in finding.cures:
            model = Net(op)
            exec(cure.code, {"model": model})
            assert finding_in(model, x) is None, f"{name}: {cure}"
            amp_plugin.set_default_rules(None)
        print("cured", name)


@pytest.mark.native
def test_each_cure_runs_as_it_is_and_cures():
    answer = call(try_cures, frameworks=True)
    assert answer.stdout.splitlines() == [f"cured {name}" for name in OPS], answer.stderr


def test_the_lines_stand_in_the_text_to_be_copied(plain):
    finding = finding_in(Net(OPS["mul"]), torch.full((4, 8), 300.0))
    assert "give aten::mul the rule fp32 or run Net.blocks.2.norm in fp32" in finding.advice
    for cure in finding.cures:
        assert textwrap.indent(cure.code, " " * 10) in str(finding)


def test_what_is_no_matter_of_range_has_no_cure_in_fp32(plain):
    for op in (lambda x: (x - x).log(), lambda x: 1 / (x - x)):
        assert finding_in(Net(op), torch.full((4, 8), 300.0)).cures == ()
    with amp_plugin.diagnose(keep_going=True) as diagnosis, torch.autocast("cpu", dtype=torch.bfloat16):
        Net(lambda x: x.bfloat16().float().mul(1e38).bfloat16().mul(2.0))(torch.full((4, 8), 3.0))
    assert diagnosis.findings[0].cures == ()
    assert "clamp its input" in diagnosis.findings[0].advice


def test_where_no_rule_helps_the_module_or_a_cast_does(plain):
    """In-place ops keep their dtype under any rule, and outside of regions no rule applies."""
    finding = finding_in(Net(lambda x: x.clone().mul_(x)), torch.full((4, 8), 300.0))
    assert (finding.rule_names, len(finding.cures)) == ((), 1)
    assert "run Net.blocks.2.norm in fp32" in finding.advice
    with amp_plugin.diagnose(keep_going=True) as diagnosis:
        Net(OPS["mul"])(torch.full((4, 8), 300.0))
    assert diagnosis.findings[0].cures == ()
    assert "in an autocast block (none is open here) or call float()" in diagnosis.findings[0].advice


def test_a_gradient_that_overflows_is_cured_where_its_forward_op_is(plain):
    def overflow(model: nn.Module) -> list[Finding]:
        x = torch.full((4, 8), 0.125, requires_grad=True)
        with amp_plugin.diagnose(keep_going=True) as diagnosis:
            with torch.autocast("cpu", dtype=torch.float16):
                y = model(x)
            (y.float().sum() * 1000.0).backward()
        return diagnosis.findings

    class Half(nn.Module):
        def forward(self, x):
            return x.half()

    class Steep(nn.Module):
        def forward(self, x):
            return (x * 1e-3) * 1e3

    (finding,) = overflow(nn.Sequential(Half(), nn.Sequential(Steep())))
    assert (finding.direction, finding.forward_op) == ("backward", "aten::mul.Tensor")
    for cure in finding.cures:
        model = nn.Sequential(Half(), nn.Sequential(Steep()))
        exec(cure.code, {"model": model})
        assert overflow(model) == []
        amp_plugin.set_default_rules(None)
    assert len(finding.cures) == 2


def test_a_gradient_that_is_too_large_for_a_cast_is_a_matter_of_the_loss(plain):
    x = torch.ones(2, requires_grad=True)
    with amp_plugin.diagnose(keep_going=True) as diagnosis:
        (x.half().float().sum() * 1e6).backward()
    assert diagnosis.findings[0].op == "aten::_to_copy.default"
    assert diagnosis.findings[0].advice.endswith("skipped again and again, make the loss smaller.")


def test_wrappers_are_no_part_of_the_path(plain):
    finding = finding_in(nn.DataParallel(Net(OPS["mul"])), torch.full((4, 8), 300.0))
    assert finding.module == "Net.blocks.2.norm"
    assert 'model.get_submodule("blocks.2.norm")' in finding.cures[0].code


CURES = ["", *(cure.code for cure in cures_of("Net", "blocks.2.norm", ("aten::mul",), "cpu"))]


@pytest.mark.native
@pytest.mark.parametrize("code", CURES, ids=range(3))
def test_the_cures_under_accelerate(code, plain):
    pytest.importorskip("accelerate")
    model = Net(OPS["mul"])
    exec(code if "model" in code else "", {"model": model})
    accelerator = amp_plugin.AmpAccelerator(cpu=True, mixed_precision="fp16")
    prepared = accelerator.prepare(model)
    exec(code if "model" not in code else "")  # the accelerator has already set its own rules
    with amp_plugin.diagnose(keep_going=True) as diagnosis:
        prepared(torch.full((4, 8), 300.0))
    accelerator.end_training()
    assert len(diagnosis.findings) == (not code)


@pytest.mark.native
@pytest.mark.filterwarnings("ignore")  # warnings of Lightning itself: deprecated names, advice about workers
@pytest.mark.parametrize("code", CURES, ids=range(3))
def test_the_cures_under_lightning(code, plain):
    lightning = pytest.importorskip("lightning.pytorch")
    from tests.adapters.lightning_models import make_trainer

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.weight = Net(OPS["mul"]), nn.Parameter(torch.ones(()))

        def training_step(self, batch, index):
            return self.net(batch * self.weight).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trained = Trained()
    exec(code, {"model": trained.net})
    with amp_plugin.diagnose(keep_going=True) as diagnosis:
        make_trainer(amp_plugin.AmpPrecision("fp16")).fit(trained, torch.full((1, 8), 300.0))
    assert any(finding.direction == "forward" for finding in diagnosis.findings) is (not code)
