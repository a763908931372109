"""A warning points to the user's line, not to one in the package."""

import pytest
import torch

import amp_plugin
from amp_plugin import GradScaler
from amp_plugin.messages import warn_user


@pytest.mark.parametrize(
    ("package", "line"),
    [
        *((name, __file__) for name in ("amp_plugin.deep", "lightning.pytorch.strategies")),
        *((name, __file__) for name in ("accelerate.accelerator", "torch.optim", "contextlib")),
        ("amp_plugin_of_somebody_else", "neighbour.py"),
    ],
)
def test_lines_of_the_package_and_of_frameworks_are_passed_over(recwarn, package, line):
    inside = {"__name__": package}
    source = "def outer(warn):\n    inner(warn)\n\ndef inner(warn):\n    warn('deep', RuntimeWarning)\n"
    exec(compile(source, "neighbour.py", "exec"), inside)
    inside["outer"](warn_user)
    (seen,) = recwarn
    assert (seen.filename, seen.category, str(seen.message)) == (line, RuntimeWarning, "deep")


def test_each_warning_of_a_scaler_shows_the_users_line(recwarn):
    """Each warning is raised at a different depth below the call."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def iterate(scaler, factor, times):
        for _ in range(times):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
            scaler.update()

    iterate(GradScaler("cpu"), float("inf"), 102)
    GradScaler("cpu").load_state_dict({"epoch": 3})
    texts = ["in a row were skipped", "not a GradScaler's"]
    assert [sum(text in str(seen.message) for seen in recwarn) for text in texts] == [1, 1]
    assert {seen.filename for seen in recwarn} == {__file__}


def test_torchs_warning_of_a_region_shows_the_users_line(recwarn):
    with amp_plugin.autocast("cpu", dtype=torch.float64):
        pass
    (seen,) = recwarn
    assert (seen.filename, "dtype is not supported" in str(seen.message)) == (__file__, True)
