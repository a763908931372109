"""The hint behind an unknown name, written once; a warning shows the line of the user, not of the package."""

from __future__ import annotations

from pathlib import Path

import torch

import amp_plugin
from amp_plugin import GradScaler
from amp_plugin.messages import warn_user

ROOT = Path(__file__).parent.parent


def test_a_warning_of_a_caller_outside_shows_its_line(recwarn):
    warn_user("look here", RuntimeWarning)
    (seen,) = recwarn
    assert (seen.filename, seen.category, str(seen.message)) == (__file__, RuntimeWarning, "look here")


def test_a_warning_from_deep_in_the_package_shows_the_users_line(recwarn, tmp_path, monkeypatch):
    source = "def outer(warn):\n    inner(warn)\n\ndef inner(warn):\n    warn('deep')\n"
    inside = {"__name__": f"{amp_plugin.__name__}.deep"}
    exec(compile(source, "deep.py", "exec"), inside)
    inside["outer"](warn_user)
    neighbour = {"__name__": f"{amp_plugin.__name__}_of_somebody_else"}
    exec(compile(source, "neighbour.py", "exec"), neighbour)
    neighbour["outer"](warn_user)
    assert [seen.filename for seen in recwarn] == [__file__, "neighbour.py"]


def test_each_warning_of_a_scaler_shows_the_users_line(recwarn):
    """Each is raised at another depth below the call."""
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


def test_lines_of_frameworks_are_passed_over(recwarn):
    source = "def outer(warn):\n    warn('deep')\n"
    for package in ("lightning.pytorch.strategies", "accelerate.accelerator", "torch.optim", "contextlib"):
        inside = {"__name__": package}
        exec(compile(source, "framework.py", "exec"), inside)
        inside["outer"](warn_user)
    assert {seen.filename for seen in recwarn} == {__file__}


def test_the_hint_is_made_in_one_place() -> None:
    own = {ROOT / "amp_plugin/messages.py"}
    sources = {*(ROOT / "amp_plugin").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")}
    assert own <= sources
    others = [path for path in sources - own if "difflib" in path.read_text()]
    assert others == []
