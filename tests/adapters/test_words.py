"""Do errors name calls that the user can make?

They must name those of the entry point in use, and no other.
"""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import amp_plugin
from amp_plugin import AmpAccelerator, AmpPrecision, FabricAmpPrecision
from amp_plugin.adapters.ignite import IgnitePrecision
from amp_plugin.adapters.session import EntryPoint
from amp_plugin.scaling.words import PLAIN

DOORS = [AmpAccelerator, AmpPrecision, FabricAmpPrecision, IgnitePrecision]
ROOMS = [
    *("casting", "kernels", "numerics", "run_page", "sharding", "tuning", "weights"),
    "scaling",
]
FRAMEWORK = re.compile(
    r"\b(lightning|fabric|(?-i:Trainer)|accelerat(e|or)|ignite|\w*Amp(Accelerator|Kwargs|Precision|Monitor))\b",
    re.IGNORECASE,
)
MODULES = {"accelerate", "lightning"}  # package names that the code looks up in sys.modules


def test_each_entry_point_is_looked_at():
    def last(kind):
        """Return the classes of the package that have no subclasses in it."""
        own = [sub for sub in kind.__subclasses__() if sub.__module__.startswith("amp_plugin.")]
        return {leaf for sub in own for leaf in last(sub)} or {kind}

    assert {kind for kind in last(EntryPoint) if ".for_pytorch_lightning" not in kind.__module__} == {*DOORS}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_a_entry_point_has_words_of_its_own(door):
    left_out = {"endless"} if door is FabricAmpPrecision else set()  # Fabric has no call that ends a run
    # with ignite, models are wrapped as in a plain loop
    shared = {"reduce"} if door is IgnitePrecision else set()
    same = {
        word.name for word in fields(PLAIN) if getattr(door.words, word.name) == getattr(PLAIN, word.name)
    }
    assert same == left_out | shared


def texts(file):
    """Return the strings of a file, except docstrings, with their line numbers."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value


@pytest.mark.parametrize("room", ROOMS)
def test_a_text_below_the_entry_points_names_no_framework(room):
    files = sorted((Path(amp_plugin.__file__).parent / room).rglob("*.py"))
    assert files
    named = [
        f"{file.name}:{line}: {text}"
        for file in files
        for line, text in texts(file)
        if FRAMEWORK.search(text) and text not in MODULES
    ]
    assert not named


def test_an_error_of_the_scaler_names_the_call_of_the_door():
    amp = IgnitePrecision("fp16")
    with pytest.raises((RuntimeError, AssertionError, ValueError), match=r"amp\.backward\(loss\)"):
        amp.scaler.update()
