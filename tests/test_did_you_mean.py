"""The hint behind an unknown name, and that it is written once."""

from __future__ import annotations

from pathlib import Path

from amp_plugin.did_you_mean import did_you_mean

ROOT = Path(__file__).parent.parent


def test_the_nearest_names_come_first() -> None:
    known = ["max_norm", "max_value", "width"]
    assert did_you_mean("max_nrom", known) == "; did you mean max_norm?"
    assert did_you_mean("max_nalue", known, at_most=2) == "; did you mean max_value or max_norm?"


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert did_you_mean("seed", ["max_norm", "width"]) == ""
    assert did_you_mean(3, []) == ""


def test_an_alias_wins_over_a_name_that_looks_alike() -> None:
    assert did_you_mean("gpu", ["cpu", "cuda"]) == "; did you mean cpu?"
    assert did_you_mean("gpu", ["cpu", "cuda"], aliases={"gpu": "cuda"}, separator=", ") == (
        ", did you mean cuda?"
    )


def test_the_hint_is_made_in_one_place() -> None:
    own = {ROOT / "amp_plugin/did_you_mean.py"}
    sources = {*(ROOT / "amp_plugin").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")}
    assert own <= sources
    others = [path for path in sources - own if "difflib" in path.read_text()]
    assert others == []
