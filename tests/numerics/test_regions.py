"""What the regions of ``diagnose``, ``shadow_run`` and ``record_run`` have in common."""

import pytest
import torch
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amp_plugin import diagnose, shadow_run
from amp_plugin.numerics.compare import record_run


@pytest.fixture(params=["diagnose", "shadow_run", "record_run"])
def make(request, tmp_path):
    regions = {"diagnose": diagnose, "shadow_run": shadow_run}
    return regions.get(request.param, lambda: record_run(tmp_path / "run.pt"))


def stance() -> str:
    return eval_frame._stance.stance


def test_compiled_functions_run_eagerly_in_it_and_as_before_around_it(make):
    with torch.compiler.set_stance("fail_on_recompile"):
        region = make()
        assert stance() == "fail_on_recompile"
        with region:
            assert stance() == "force_eager"
        assert stance() == "fail_on_recompile"


def test_an_error_closes_it(make):
    before = stance()
    with pytest.raises(KeyError, match="of the program"), make():
        raise KeyError("of the program")
    assert stance() == before


def test_fake_tensors_pass(make):
    with make(), FakeTensorMode():
        assert type(torch.ones(2) + 1) is FakeTensor
