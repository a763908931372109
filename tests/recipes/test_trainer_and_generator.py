"""The recipe names the generator's cache as the cause. After its cure, only rounding is left.

The TRL recipe shows the gap for each precision.
"""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from recipes.trainer_and_generator import main
from recipes.trl_rollouts import gap, policy

pytestmark = pytest.mark.native


@pytest.mark.whole_run
def test_the_cache_is_named_and_then_it_is_rounding(tmp_path):
    told = []
    before, after = main(tmp_path, told.append)
    assert "set kv_cache_dtype to the dtype of the model" in told[0]
    assert "rounding alone explains the gap" in told[1]
    assert after < before / 4


def test_rollouts_in_fp16_are_nearer_to_training_than_in_bf16():
    fp16, bf16 = (gap(policy(), dtype, weights_too=False) for dtype in (torch.float16, torch.bfloat16))
    assert 0 < 10 * fp16 < bf16
