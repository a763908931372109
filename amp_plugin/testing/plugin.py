"""The plugin of pytest: an option, and a fixture that fails a test in which numbers were lost.

pytest loads this module in every run, so it imports nothing but pytest until the fixture is used.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from amp_plugin.testing.lost_numbers import LostNumbers


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes golden files anew."""
    parser.getgroup("amp_plugin").addoption(
        "--amp-record",
        action="store_true",
        help="let assert_same_numerics write its golden files in place of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hand the option to assert_same_numerics, which has no request."""
    import os  # noqa: PLC0415 - only where the option is given

    if config.getoption("--amp-record"):
        os.environ["AMP_PLUGIN_RECORD"] = "1"
        config.add_cleanup(lambda: os.environ.__delitem__("AMP_PLUGIN_RECORD"))


@pytest.fixture
def no_lost_numbers() -> Iterator[LostNumbers]:
    """Fail the test if a step was skipped, a cast lost a value, or a gradient was not finite.

    The test runs in a region that watches every op, so it is slow. What was found names op, module and line.
    """
    from amp_plugin.testing.lost_numbers import LostNumbers  # noqa: PLC0415 - loads torch

    with LostNumbers() as watch:
        yield watch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test with the fixture if something was lost."""
    result = yield
    watch = getattr(item, "funcargs", {}).get("no_lost_numbers")
    if watch is not None:
        watch.close()
        if text := watch.report():
            pytest.fail(text, pytrace=False)
    return result
