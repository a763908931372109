"""Without the native core: the default rules on torch's kernels, and clear errors for the rest.

One process with AMP_PLUGIN_NATIVE=0 answers everything; the tests look at its answers.
"""

from __future__ import annotations

import json

import pytest

from tests.warm_processes import run_program

PROGRAM = r"""
import json, threading, warnings
warnings.simplefilter("error")
import torch
from torch import nn
import amp_plugin
from amp_plugin import OpRules, autocast

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bf16", FP16: "fp16", torch.float32: "fp32"}
answers = {}

def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

def bits_of(region):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GELU(), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 3))
    with region:
        loss = nn.functional.cross_entropy(net(torch.randn(5, 2, 8)), torch.tensor([0, 1, 2, 0, 1]))
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    return [loss.item().hex(), flat.sum().item().hex(), flat.norm().item().hex(), str(loss.dtype)]

answers["same bits"] = [
    bits_of(autocast("cpu", BF16)) == bits_of(torch.autocast("cpu", BF16, cache_enabled=False)),
    bits_of(autocast("cpu", FP16)) == bits_of(torch.autocast("cpu", FP16, cache_enabled=False)),
    bits_of(autocast("cpu", BF16)) == bits_of(autocast("cpu", enabled=False)),
]

one = autocast("cpu", BF16)
seen = []
def mm():
    return NAMES[(torch.ones(2, 2) @ torch.ones(2, 2)).dtype]
with one:
    with one:
        seen.append(mm())
    with autocast("cpu", FP16):
        seen.append(mm())
    seen.append(mm())
    threads = [threading.Thread(target=lambda: (one.__enter__(), seen.append(mm()), one.__exit__(None, None, None))) for _ in range(2)]
    [t.start() for t in threads]; [t.join() for t in threads]
seen.append(mm())
answers["nested, re-entered, threads"] = seen

weight = nn.Parameter(torch.ones(1, 1))
with autocast("cpu", BF16):
    first = (torch.ones(1, 1) @ weight).item()
    weight.data.fill_(3)
    second = (torch.ones(1, 1) @ weight).item()
    with torch.no_grad():
        weight.add_(1)
    third = (torch.ones(1, 1) @ weight).item()
answers["updated weights"] = [first, second, third]

@autocast("cpu", BF16)
def generator():
    yield mm()
    yield mm()
steps = generator()
answers["generator"] = [next(steps), mm(), next(steps)]

with autocast("cpu", BF16, rules=OpRules.default("cpu")):
    answers["default rules by name"] = mm()
amp_plugin.set_default_rules(OpRules.default("cpu"))
amp_plugin.set_default_rules(None)
compiled = torch.compile(lambda x: x @ x, backend="eager", fullgraph=True)
with autocast("cpu", BF16):
    answers["compiled"] = NAMES[compiled(torch.ones(2, 2)).dtype]

own = OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")
answers["own rules"] = error_of(lambda: autocast("cpu", BF16, rules=own))
answers["own default rules"] = error_of(lambda: amp_plugin.set_default_rules(own))
answers["log"] = error_of(amp_plugin.log_casts)
with autocast("cpu", BF16):
    mixed = lambda: torch.cat([torch.ones(1, dtype=FP16), torch.ones(1, dtype=BF16)])
    answers["mixed halves"] = error_of(mixed)
    answers["promote"] = NAMES[torch.cat([torch.ones(1), torch.ones(1, dtype=BF16)]).dtype]
linear = amp_plugin.run_in(torch.float32)(nn.Linear(2, 2))
with autocast("cpu", BF16):
    answers["run_in"] = NAMES[linear(torch.ones(1, 2)).dtype]
    answers["report"] = [NAMES[row.outputs[0]] for row in amp_plugin.dtype_report(nn.Linear(2, 2), torch.ones(1, 2)).rows()]
answers["state is left as found"] = [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    program = tmp_path_factory.mktemp("fallback") / "program.py"
    program.write_text(PROGRAM)
    done = run_program(program, {"AMP_PLUGIN_NATIVE": "0"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # switched off on purpose: no warning
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("same bits", [True, True, False]),
        ("nested, re-entered, threads", ["bf16", "fp16", "bf16", "bf16", "bf16", "fp32"]),
        ("updated weights", [1.0, 3.0, 4.0]),
        ("generator", ["bf16", "fp32", "bf16"]),
        ("default rules by name", "bf16"),
        ("compiled", "bf16"),
        ("promote", "fp32"),
        ("run_in", "fp32"),
        ("report", ["bf16"]),
        ("state is left as found", [False, True]),
    ],
)
def test_works(answers, what, answer):
    assert answers[what] == answer


def test_raises_with_the_way_out(answers):
    for what, feature in (
        ("own rules", "a rule set other than the default one"),
        ("own default rules", "a rule set other than the default one"),
        ("log", "log_casts"),
    ):
        assert answers[what].startswith(f"RuntimeError: {feature} needs the native core, which is not loaded")
        assert answers[what].endswith("Unset AMP_PLUGIN_NATIVE and start again.")
    # torch's own, and never silently fp32
    assert "Unexpected floating ScalarType in at::autocast::prioritize" in answers["mixed halves"]
