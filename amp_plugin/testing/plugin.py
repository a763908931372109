"""The pytest plugin, which adds the option ``--amp-record`` and the fixture ``no_lost_numbers``.

pytest loads this module in every run, so the module imports only pytest until the fixture is used.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from amp_plugin.testing.lost_numbers import LostNumbers


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line option that records golden files."""
    parser.getgroup("amp_plugin").addoption(
        "--amp-record",
        action="store_true",
        help="let assert_same_numerics write its golden files instead of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Pass the option on to ``assert_same_numerics``, which has no access to pytest's options."""
    import os  # noqa: PLC0415 - only if the option is given

    if config.getoption("--amp-record"):
        os.environ["AMP_PLUGIN_RECORD"] = "1"
        config.add_cleanup(lambda: os.environ.__delitem__("AMP_PLUGIN_RECORD"))


@pytest.fixture
def no_lost_numbers() -> Iterator[LostNumbers]:
    """Fail the test if a step was skipped, a cast lost a value, or a gradient was not finite.

    The test is slow, because every op is observed. The failure message names the op, the module and the line.
    """
    from amp_plugin.testing.lost_numbers import LostNumbers  # noqa: PLC0415 - loads torch

    with LostNumbers() as watch:
        yield watch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test if its fixture ``no_lost_numbers`` has recorded skipped steps or lost values."""
    result = yield
    watch = getattr(item, "funcargs", {}).get("no_lost_numbers")
    if watch is not None:
        watch.close()
        if text := watch.report():
            pytest.fail(text, pytrace=False)
    return result
