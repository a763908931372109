"""Without the native core: default rules with torch's kernels, no stale casts, and clear errors otherwise.

``make test-fallback`` runs all tests of this folder without the core. This file covers the rest, in one
process with AMP_PLUGIN_NATIVE=0.
"""

import json

from tests.warm_processes import run_program

PROGRAM = r"""
import json, warnings
warnings.simplefilter("error")
import torch
import amp_plugin
from amp_plugin import OpRules, autocast

BF16, FP16 = torch.bfloat16, torch.float16

def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

weight, one = torch.nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
with autocast("cpu", BF16, rules=OpRules.default("cpu")):
    assert one @ weight == 1
    weight.data.fill_(3)
    assert one @ weight == 3
    with torch.no_grad():
        weight.add_(1)
    assert one @ weight == 4
amp_plugin.set_default_rules(OpRules.default("cpu"))
amp_plugin.set_default_rules(None)
own = OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")
errors = [
    error_of(autocast, "cpu", BF16, rules=own),
    error_of(amp_plugin.set_default_rules, own),
    error_of(amp_plugin.log_casts),
]
with autocast("cpu", BF16):
    assert torch.cat([torch.ones(1), torch.ones(1, dtype=BF16)]).dtype is torch.float32
    errors.append(error_of(torch.cat, [torch.ones(1, dtype=FP16), torch.ones(1, dtype=BF16)]))
print(json.dumps(errors))
"""


def test_what_works_and_what_is_refused(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_program(tmp_path / "program.py", {"AMP_PLUGIN_NATIVE": "0"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warning, because the core was turned off on purpose
    *refused, mixed = json.loads(done.stdout)
    features = ["a rule set other than the default one"] * 2 + ["log_casts"]
    for error, feature in zip(refused, features, strict=True):
        assert error.startswith(
            f"RuntimeError: {feature} needs the native core, which is not loaded: AMP_PLUGIN"
        )
        assert error.endswith("Unset AMP_PLUGIN_NATIVE and start again.")
    assert (
        "Unexpected floating ScalarType in at::autocast::prioritize" in mixed
    )  # this is torch's own error; the op must not silently run in fp32
