"""The recipe names the cache of the generator, and with the setting that it names nothing is left to gain."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from recipes.trainer_and_generator import main

pytestmark = pytest.mark.native


def test_the_cache_is_named_and_then_it_is_rounding(tmp_path):
    told = []
    before, after = main(tmp_path, told.append)
    assert "set kv_cache_dtype to the dtype of the model" in told[0]
    assert "rounding: nothing to gain" in told[1]
    assert after < before / 4
