"""`diagnose --compare eager` compares compiled code with the same code run eagerly."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from amp_plugin.numerics.compiled import CompiledComparison
from tests.commands import diagnose as amp
from tests.samples import sampled

BLOCKS = 6


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Blocks with a norm that writes buffers, dropout, attention and a residual branch."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(x), 0.1, self.training)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return torch.softmax(self.head(x), -1)


def train(net: nn.Module, backend: Any, *, bf16: bool = False, steps: int = 3) -> list[float]:
    compiled = torch.compile(net, backend=backend)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = compiled(torch.randn(8, 16))[:, 0].log().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def changing(name: str, number: int, factor: float) -> Callable[..., Any]:
    """Return a backend that multiplies the result of the ``number``-th op with this name, like a wrong
    kernel.
    """

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graph = module.graph
        nodes = [node for node in graph.nodes if name == getattr(node.target, "__name__", node.target)]
        if nodes[number:]:
            node = nodes[number]
            with graph.inserting_after(node):
                wrong = graph.call_function(torch.mul, (node, factor))
            node.replace_all_uses_with(wrong)
            wrong.args = (node, factor)
            module.recompile()
        return aot_eager(module, inputs)

    return backend


@pytest.mark.parametrize(
    ("backend", "bf16"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", True, marks=[pytest.mark.slow, pytest.mark.whole_run]),
        pytest.param("inductor", False, marks=[pytest.mark.slow, pytest.mark.whole_run]),
    ],
)
def test_right_code_is_not_blamed(backend: str, bf16: bool) -> None:
    with CompiledComparison() as comparison:
        train(Net(), backend, bf16=bf16)
    assert comparison.differences == []
    gradients = len(list(Net().parameters()))
    # the result, two statistics of the norm, and the gradients
    assert comparison.compared >= 3 * (1 + 2 + gradients)
    assert comparison.not_compared == {}
    assert "rounding explains every difference" in comparison.report()


DEPTHS = list(itertools.product((0, BLOCKS // 2, BLOCKS - 1), (False, True)))


@pytest.mark.parametrize(("number", "bf16"), sampled(DEPTHS, (0, 3, 4)))
def test_a_wrong_branch_is_named_at_any_depth(number: int, bf16: bool) -> None:
    with CompiledComparison() as comparison:
        train(Net(), changing("tanh", number, 1.2), bf16=bf16, steps=1)
    (found,) = comparison.differences
    # in bf16, rounding hides the change in the result, but not in a gradient
    assert found.result.startswith("result 0 of graph 0") or bf16
    assert found.relative > found.allowed
    assert found.op == "tanh"
    assert not found.reason
    assert "x + torch.tanh(block(x))" in str(found)
    assert Path(__file__).name in str(found)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 1.05 * grad


def wrong_backward(module: torch.fx.GraphModule, inputs: Any) -> Any:
    right = aot_eager(module, inputs)
    names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    is_wrong = ["head" in name and "weight" in name for name in names]
    assert sum(is_wrong) == 1

    def run(*given: Any) -> Any:
        return right(*(Wrong.apply(v) if wrong else v for v, wrong in zip(given, is_wrong, strict=True)))

    return run


def test_a_wrong_gradient_is_named_by_its_parameter() -> None:
    with CompiledComparison() as comparison:
        train(Net(), wrong_backward, steps=1)
    (found,) = comparison.differences
    assert found.result == "the gradient of head.weight of graph 0 (fp32)"
    assert found.relative == pytest.approx(0.05, rel=1e-3)
    assert found.reason
    assert "self.head(x)" in str(found)


def test_a_buffer_that_is_written_wrongly_is_named() -> None:
    total = torch.ones(3)

    def count(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.exp())
        return x * 2

    with CompiledComparison() as comparison:
        torch.compile(count, backend=changing("exp", 0, 1.01))(torch.randn(3))
    (found,) = comparison.differences
    assert "total" in found.result
    assert found.op == "exp"


def test_the_program_computes_what_it_computes_without() -> None:
    losses = []
    for region in (nullcontext(), CompiledComparison()):
        torch.manual_seed(1)
        torch._dynamo.reset()
        with region:
            losses.append(train(Net(), "aot_eager"))
    assert losses[0] == losses[1]


def test_graphs_that_float64_cannot_run_are_compared_with_eager_code() -> None:
    library = torch.library.Library("compiled_comparison", "FRAGMENT")
    library.define("halved(Tensor x) -> Tensor")
    library.impl("halved", lambda x: {torch.float32: x / 2}[x.dtype], "CompositeExplicitAutograd")
    library.impl("halved", torch.empty_like, "Meta")

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.ops.compiled_comparison.halved(x))

    for backend, found in (("aot_eager", 0), (changing("tanh", 0, 1.2), 1)):
        torch._dynamo.reset()
        with CompiledComparison() as comparison:
            torch.compile(layer, backend=backend)(torch.randn(4, 16))
        assert comparison.compared == 1
        assert len(comparison.differences) == found


def test_integers_that_differ_are_counted() -> None:
    def pick(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).argmax()

    with CompiledComparison() as comparison:
        torch.compile(pick, backend=changing("relu", 0, -1.0))(torch.tensor([1.0, 2.0, 3.0]))
    assert comparison.not_compared == {"an integer result, which differs from eager code": 1}
    assert "differs from eager code (1 call)" in comparison.report()


def test_a_number_of_a_bf16_graph_is_not_blamed_for_luck() -> None:
    """A single number may happen to be closer to float64 in eager code.

    Here there are 15 losses, each from its own graph.
    """

    class InFp32(torch.fx.Interpreter):
        """Computes in fp32, as a fused kernel does, where eager code rounds to bf16 after each op."""

        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

    def keeps_fp32(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return InFp32(module).run

    for seed in range(15):
        torch.manual_seed(seed)
        torch._dynamo.reset()
        with CompiledComparison() as comparison, torch.no_grad():
            net = Net(blocks=2).eval()
            with torch.autocast("cpu", torch.bfloat16):
                torch.compile(lambda x, net=net: net(x).std(), backend=keeps_fp32)(torch.randn(8, 16))
        assert comparison.compared == 1
        assert comparison.differences == []


def test_code_that_was_compiled_in_the_region_goes_on_after_it() -> None:
    compiled = torch.compile(torch.tanh, backend=changing("tanh", 0, 2.0))
    with CompiledComparison() as comparison:
        compiled(torch.ones(3))
    assert len(comparison.differences) == 1
    assert torch.equal(compiled(torch.ones(3)), 2 * torch.tanh(torch.ones(3)))
    assert comparison.compared == 1


SCRIPT = """\
import torch
from tests.numerics.test_compiled_comparison import changing

@torch.compile(backend=changing("softmax", 0, FACTOR))
def scores(x):
    return torch.softmax(x, -1)

print(scores(torch.randn(4, 4)).shape)
"""


@pytest.mark.parametrize(("factor", "code"), [("1.5", 1), ("1.0", 0)])
def test_the_command(factor: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FACTOR", factor))
    result = amp("--compare", "eager", str(script))
    assert result.exit_code == code, result.output
    assert ("train.py:6 in scores: return torch.softmax(x, -1)" in result.stdout) == bool(code)
    torch._dynamo.reset()
    answer = json.loads(amp("--compare", "eager", "--json", str(script)).stdout)
    assert [found["op"] for found in answer["differences"]] == ["softmax"] * code


def test_a_program_that_compiles_nothing_is_told() -> None:
    with CompiledComparison() as comparison:
        torch.ones(2).sum()
    assert "nothing was compiled" in comparison.report()
