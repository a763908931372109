"""Which cases `make test` takes of a long list; `make test-whole` takes all of it."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[Any], sample: Collection[int]) -> list[Any]:
    """Return parameters for ``pytest.mark.parametrize``.

    Args:
        cases: A case is one value, or a tuple with a value for each argument of the test.
        sample: The indices of the cases in ``make test``. The other cases are marked ``whole_run``.
    """
    assert all(0 <= index < len(cases) for index in sample)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if index in sample else pytest.mark.whole_run,
        )
        for index, case in enumerate(cases)
    ]
