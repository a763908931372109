"""What a scaler hands out about a step is made by keywords and cannot be changed: several readers share it."""

import dataclasses

import pytest

from amp_plugin import StepRecord
from amp_plugin.scaling.overflows import FirstModules, OverflowReport
from amp_plugin.scaling.words import Words

MADE = {
    OverflowReport: {"checked": 2},
    FirstModules: {"numbers": 2},
    StepRecord: {"step": 1, "optimizer": "0: SGD", "verdict": "landed", "skipped": False},
    Words: {"step": "step()"},
}


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_a_record_is_made_by_keywords_and_stays_as_it_is(kind):
    given = MADE[kind]
    record = kind(**given)
    for name in (*given, "a_new_attribute"):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(record, name, 3)
    with pytest.raises(TypeError):
        kind(*given.values())
    assert not hasattr(record, "__dict__")  # a run of a million steps makes a million of them
