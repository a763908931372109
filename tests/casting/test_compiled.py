"""Regions in compiled code give the dtypes and bits of eager code, and the graphs of torch.autocast."""

import io
import itertools
import time
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import amp_plugin
from amp_plugin import OpRules
from amp_plugin.casting.rules import rules_with_content
from tests.warm_processes import call

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("fresh_dynamo"),
    # warnings of torch itself: inductor scripts functions, and Dynamo reads .grad of inputs
    pytest.mark.filterwarnings(
        "ignore:`torch.jit",
        "ignore::DeprecationWarning:torch",
        "ignore:`isinstance.treespec:FutureWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf",
    ),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEFAULT = OpRules.default("cpu")
SOFTMAX32 = DEFAULT.with_rule("aten::softmax.int", "fp32")
LINEAR32 = DEFAULT.with_rule("aten::linear", "fp32")
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def region(rules, dtype=BF16):
    return amp_plugin.autocast("cpu", dtype=dtype, rules=rules)


# The rules of a region, and of the regions inside it.
RULES = {"default": [None], "own": [SOFTMAX32], "nested": [None, [SOFTMAX32, [LINEAR32], [None]]]}


class Model(nn.Module):
    """A model that uses each weight once.

    Compiled code keeps no casts. So the gradients of a weight that is used twice would be added in another
    dtype than in eager code.
    """

    def __init__(self, how, rules, *inner):
        super().__init__()
        self.how, self.rules, self.held = how, rules, region(rules)
        self.linear = nn.Linear(8, 8)
        self.inner = nn.ModuleList(Model(how, *sets) for sets in inner)
        self.decorated = self.held(self.block)

    def forward(self, x):
        if self.how == "decorator":
            return self.decorated(x)
        with region(self.rules) if self.how == "inside" else self.held:
            return self.block(x)

    def block(self, x):
        outputs = [self.linear(x), self.linear.weight.softmax(-1)]
        for inner in self.inner:
            outputs += inner(x)
        with torch.autocast("cpu", dtype=FP16):
            outputs.append((x @ x.T).softmax(-1))
        return [*outputs, (x @ x.T).softmax(-1)]


def make_model(how, rules):
    torch.manual_seed(0)
    return Model(how, *RULES[rules])


def step(model, forward):
    model.zero_grad()
    outputs = forward(X)
    sum(output.float().square().sum() for output in outputs).backward()
    return [*(output.detach() for output in outputs), *(p.grad for p in model.parameters())]


def assert_same(ours, theirs, bits=True):
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if bits else torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.01)


# "nested" covers both default rules and own ones
PLACES = [
    ("nested", "inside"),
    ("nested", "held"),
    ("nested", "decorator"),
    ("default", "inside"),
    ("own", "held"),
]
BACKENDS = [*itertools.product(["eager", "aot_eager"], PLACES), ("inductor", ("nested", "inside"))]


def marked(choice, place):
    """Mark a case in which a region is created while Dynamo traces."""
    return pytest.param(choice, place, marks=[pytest.mark.one_graph] * (place[1] == "inside"))


@pytest.mark.parametrize(("backend", "place"), [marked(*case) for case in BACKENDS])
def test_forward_and_backward_equal_eager(backend, place):
    rules, how = place
    model = make_model(how, rules)
    eager = step(model, model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_same(step(model, compiled), eager, bits=backend != "inductor")


# Without strict=True, Python itself runs the model, and a decorator acts as a block there. Only Dynamo sees
# how a region is opened, as in the test above. The program that it passes on is the same.
EXPORTS = [*(marked(True, place) for place in (PLACES[0], *PLACES[3:])), (False, PLACES[0])]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 warns while it loads
@pytest.mark.parametrize(("strict", "place"), EXPORTS)
def test_exported_programs_equal_eager(strict, place):
    rules, how = place
    model = make_model(how, rules)
    with torch.no_grad():
        eager = model(X)
        program = torch.export.export(model, (X,), strict=strict)
        assert_same(program.module()(X), eager)
        assert_same(program.run_decompositions().module()(X), eager)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        assert_same(torch.export.load(file).module()(X), eager)


class Layer(nn.Linear):
    """A layer that opens a region inside a region of another dtype."""

    def __init__(self, autocast):
        super().__init__(8, 8)
        self.autocast = autocast

    def forward(self, x):
        with self.autocast("cpu", dtype=BF16):
            y = super().forward(x)
            with self.autocast("cpu", dtype=FP16, cache_enabled=False):
                return y + x @ x.T @ x


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.one_graph)])
def test_a_region_with_default_rules_is_exported_as_torchs(strict):
    def nodes(autocast):
        graphs = torch.export.export(Layer(autocast), (X,), strict=strict).graph_module
        modules = [module for module in graphs.modules() if isinstance(module, torch.fx.GraphModule)]
        return [(str(node.target), str(node.args)) for part in modules for node in part.graph.nodes]

    ours = nodes(amp_plugin.autocast)
    assert ours == nodes(torch.autocast)
    assert sum("autocast" in target for target, _ in ours) >= 2


def count_frames(program):
    """Return the number of graphs for each call of a program, and the number of recompilations."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    return [(compiled(x), counter.frame_count)[1] for x in (X, X, X[:3], X[:4], X.double())]


@pytest.mark.parametrize("how", [pytest.param("inside", marks=pytest.mark.one_graph), "held", "decorator"])
def test_frames_and_recompiles_are_those_of_torch(how):
    def program(make):
        held = make()
        body = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))

        def forward(x):
            with make() if how == "inside" else held:
                return body(x.float())

        return held(lambda x: body(x.float())) if how == "decorator" else forward

    theirs = count_frames(program(lambda: torch.autocast("cpu", dtype=BF16)))
    assert theirs[0] == theirs[1] == 1
    assert theirs[-1] > 1
    for rules in (None, SOFTMAX32):
        assert count_frames(program(lambda rules=rules: region(rules))) == theirs


def test_rules_that_change_are_compiled_again_and_equal_ones_are_not():
    def forward(x, rules):
        with region(rules):
            return x.softmax(-1) @ x.T

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    again = DEFAULT.with_rule("aten::softmax.int", "fp32")
    for rules, frames in ((SOFTMAX32, 1), (LINEAR32, 2), (SOFTMAX32, 2), (again, 2)):
        assert_same([compiled(X, rules)], [forward(X, rules)])
        assert counter.frame_count == frames


def test_a_graph_names_rules_by_their_content():
    graphs = []

    def forward(x):
        with region(SOFTMAX32):
            return x.softmax(-1)

    torch.compile(forward, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)(X)
    (node,) = [node for node in graphs[0].graph.nodes if "use_rules" in str(node.target)]
    assert node.args == ("cpu", SOFTMAX32.content)
    assert '"aten::softmax.int": "fp32"' in SOFTMAX32.content
    assert len(SOFTMAX32.content) < 200


def test_rules_are_read_from_their_content():
    emptied = OpRules(device_type="cpu", rules={"aten::mm.default": "fp32"}, keep={})
    kept = SOFTMAX32.with_rule("aten::linear", keep=["bias"])
    for rules in (SOFTMAX32, emptied, kept, OpRules.named("torch-2.11", "cuda").as_policy_of("cpu")):
        assert rules_with_content.__wrapped__(rules.content) == rules


def test_code_around_which_regions_are_opened_tells_many_rule_sets_apart():
    """There are more rule sets than dtypes. So two dtypes together encode the rule set for Dynamo."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")

    def forward(x):
        return x.softmax(-1), x @ x.T

    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    sets = [None, SOFTMAX32, LINEAR32.with_rule("aten::mm", "fp32")]
    sets += [DEFAULT.with_rule(op, "unchanged") for op in sorted(DEFAULT.rules)][:50]
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        for rules in [*sets, *sets[:10]]:
            with region(rules):
                assert [y.dtype for y in compiled(X)] == [y.dtype for y in forward(X)]
    assert counter.frame_count == len(sets)


def look_at_rules_of_two_devices():
    """Print whether code compiled inside a CUDA region sees both devices' rules, and what later rule sets do."""
    warnings.simplefilter("ignore")  # CUDA is not available
    for_cuda = OpRules.default("cuda").with_rule("aten::softmax.int", "unchanged")
    seen = []

    @torch._dynamo.allow_in_graph
    def look(x):
        seen.append([torch.get_autocast_dtype(device) for device in ("maia", "mtia")])
        return x + 0

    def forward(x, rules):
        with region(rules):
            return look(x.softmax(-1))

    forward(X, SOFTMAX32)
    with amp_plugin.autocast("cuda", rules=for_cuda):
        forward(X, SOFTMAX32)
        torch.compile(forward, backend="eager", fullgraph=True)(X, SOFTMAX32)
        print(seen[0] != seen[1], seen[-1] == seen[1])
        try:
            for op in sorted(DEFAULT.rules)[:40]:
                forward(X, DEFAULT.with_rule(op, "unchanged"))
        except RuntimeError as error:
            print(error)
    print(torch.is_autocast_enabled("cpu"))


def test_rules_of_an_accelerator_stay_in_force_around_those_of_the_cpu():
    # rule sets keep their numbers for the life of the process
    answer = call(look_at_rules_of_two_devices, frameworks=True)
    both, error, *_, state = answer.stdout.splitlines()
    assert (both, state) == ("True True", "False")
    assert "the first 29 rule sets of a process can be in force on the CPU and on an accelerator" in error


@pytest.mark.parametrize("rules", [None, SOFTMAX32], ids=["default", "own"])
def test_a_break_inside_a_region(rules):
    """If the region has its own rules, the function runs eagerly."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    inner = torch.compile(lambda x: x.softmax(-1), backend=counter)

    def forward(x):
        with region(rules):
            y = x @ x.T
            torch._dynamo.graph_break()
            return inner(y)

    assert_same([torch.compile(forward, backend="aot_eager")(X)], [forward(X)])
    assert counter.frame_count == 1


def test_what_dynamo_could_not_trace_leaves_no_rules_behind():
    def forward(x):
        with region(SOFTMAX32):
            y = x @ x.T
            torch._dynamo.graph_break()
            return y

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(forward, backend="eager", fullgraph=True)(X)
    with torch.autocast("cpu", dtype=BF16):
        assert (X @ X.T).softmax(-1).dtype is BF16


def test_wrong_rules_are_named():
    for_cuda = OpRules.default("cuda")

    def forward(x):
        with amp_plugin.autocast("cpu", rules=for_cuda):
            return x @ x.T

    with pytest.raises(ValueError, match="rules for 'cuda' were given to a region on 'cpu'"):
        torch.compile(forward, backend="eager")(X)


def test_blocks_of_a_model_compiled_one_by_one():
    class Block(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    model = nn.Sequential(Block(8, 8), Block(8, 8))
    forward = region(SOFTMAX32)(lambda x: [model(x)])
    eager = step(model, forward)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same(step(model, forward), eager)


def test_nested_compile_region():
    linear = nn.Linear(8, 8)
    block = region(SOFTMAX32)(lambda x: linear(x).softmax(-1))
    nested = torch.compiler.nested_compile_region(block)
    compiled = torch.compile(lambda x: [nested(nested(x))], backend="aot_eager", fullgraph=True)
    assert_same(compiled(X), [block(block(X))])


@pytest.mark.one_graph
@pytest.mark.filterwarnings("ignore:.*compiled_autograd")
def test_compiled_autograd():
    model = make_model("inside", "nested")
    eager = step(model, model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        assert_same(step(model, compiled), eager)


def test_run_in_and_custom_functions_inside():
    @amp_plugin.run_in(FP32)
    def in_fp32(x):
        return x @ x.T

    class Twice(torch.autograd.Function):
        @staticmethod
        @amp_plugin.custom_fwd(cast_inputs=FP32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x @ x.T

        @staticmethod
        @amp_plugin.custom_bwd
        def backward(ctx, grad):
            return (grad + grad.T) @ ctx.saved_tensors[0]

    linear = nn.Linear(8, 8)

    def forward(x):
        with region(SOFTMAX32):
            y = linear(x)
            return [y.softmax(-1), in_fp32(y), Twice.apply(y), y @ y.T]

    eager = step(linear, forward)
    assert_same(step(linear, torch.compile(forward, backend="aot_eager", fullgraph=True)), eager)


def softmax_by(rule, number):
    """Compile a softmax with a region inside and outside of it. Print dtypes and the hits of disk caches."""
    warnings.simplefilter("ignore")
    rules = DEFAULT.with_rule("aten::softmax.int", rule)

    def bare(x):
        return torch.softmax(x @ x * number, 0)

    def with_region(x):
        with region(rules):
            return bare(x)

    counters = torch._dynamo.utils.counters
    with torch.no_grad():
        print(torch.compile(with_region, fullgraph=True)(torch.randn(4, 4)).dtype)
        # AOTAutograd's cache does not accept autocast blocks
        print(counters["inductor"]["fxgraph_cache_hit"])
        counters.clear()
        with region(rules):
            print(torch.compile(bare, fullgraph=True)(torch.randn(4, 4)).dtype)
    print(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])


@pytest.mark.slow
@pytest.mark.whole_run
def test_another_process_finds_the_graphs_of_the_same_rules_only():
    """Processes may give the same number to different rules, and they share the caches of inductor and
    AOTAutograd.

    A new number in the program keeps this run apart from earlier ones. A new cache folder would do that too,
    but inductor would then test the compiler again.
    """
    number = time.time_ns() / 1e18

    def run(rule):
        answer = call(softmax_by, rule, number, frameworks=True)
        assert answer.returncode == 0, answer.stderr
        inside, hits, around, hits_around = answer.stdout.split()
        assert inside == around
        return inside, int(hits) > 0, int(hits_around) > 0

    assert run("lower_precision") == ("torch.bfloat16", False, False)
    assert run("fp32") == ("torch.float32", False, False)
    assert run("fp32") == ("torch.float32", True, True)
