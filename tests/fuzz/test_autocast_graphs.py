"""Random op graphs give the same bits under amp_plugin's autocast and under torch's (a short run).

``make fuzz`` does the long run. If there is a difference, a small program that shows it is printed.
"""

import pytest

from amp_plugin import OpRules, autocast
from tests.fuzz import comparison
from tests.fuzz.two_sides import DTYPES, Ours, Theirs

pytestmark = pytest.mark.native


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_any_graph(first):
    found = next(comparison.GRAPHS.failures(1, range(first, first + 50)), None)
    if found is not None:
        pytest.fail(f"\n{found}", pytrace=False)


class KeepsCastsOverWrites(Theirs):
    def written(self):
        pass


class CastsEachUse(Ours):
    """A broken autocast: it keeps no casts."""

    def autocast(self, dtype, **options):
        return super().autocast(dtype, **{**options, "cache_enabled": False})


class FollowsOtherRules(Ours):
    """A broken autocast: its rules differ for softmax, which it computes in fp32."""

    _rules = OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")

    def autocast(self, dtype, *, enabled=True, cache_enabled=True):
        return autocast("cpu", DTYPES[dtype], enabled, cache_enabled, rules=self._rules)


class StaysOn(Ours):
    """A broken autocast: it ignores ``enabled=False``."""

    def autocast(self, dtype, **options):
        return super().autocast(dtype, **{**options, "enabled": True})


@pytest.mark.parametrize("broken", [KeepsCastsOverWrites, CastsEachUse, FollowsOtherRules, StaysOn])
def test_a_broken_autocast_is_found(broken):
    assert comparison.GRAPHS.finds(broken)


def test_a_weight_cast_to_two_dtypes_is_recomputed():
    """torch raises an error here: its cache ignores dtypes, so its float16 region finds the bfloat16 cast in
    backward.
    """
    program = """
from tests.fuzz.two_sides import *
w0, x0 = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8, requires_grad=True)
def f(a):
    with side.autocast("bf16"):
        b = torch.mm(x0.detach(), w0)
    with side.autocast("fp16"):
        return torch.addmm(a, b, w0)
checkpoint(f, x0 + x0, use_reentrant=False).float().sum().backward()
"""
    theirs, torchs_error = comparison.run(program, Theirs())
    ours, error = comparison.run(program, Ours())
    assert "have different metadata" in torchs_error
    assert error == ""
    assert ours["w0.grad"].isfinite().all()
    assert theirs.get("w0.grad") is None
    assert comparison.difference(program) == ""
