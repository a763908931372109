"""Which module may import which, and that private names stay in their files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.import_graph import Import, circles, imports_of, modules_of
from tests.plain_sources import long_functions, vague_names
from tests.private_reads import private_reads

ROOT = Path(__file__).parent.parent

# Part of the project -> the other parts that it imports.
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
NAMES = {
    "amp_plugin.did_you_mean",
    "amp_plugin.environment_variables",
    "amp_plugin.options",
    "amp_plugin.patterns",
    "amp_plugin.precision",
    "amp_plugin.user_warnings",
}
ROOMS = {f"amp_plugin.{room}" for room in ("casting", "kernels", "scaling", "sharding", "weights")}
CORE = {"amp_plugin", "amp_plugin.device_speed", *ROOMS, *NAMES}
ADAPTERS = {"amp_plugin.adapters", "amp_plugin.adapters.accelerate", "amp_plugin.adapters.lightning"}
PARTS: dict[str, set[str]] = {
    "amp_plugin.did_you_mean": set(),
    "amp_plugin.environment_variables": {"amp_plugin.did_you_mean", "amp_plugin.options"},
    "amp_plugin.options": {"amp_plugin.casting", "amp_plugin.did_you_mean", "amp_plugin.precision"},
    "amp_plugin.patterns": {"amp_plugin.did_you_mean"},
    "amp_plugin.precision": {"amp_plugin.did_you_mean"},
    "amp_plugin.user_warnings": set(),
    "amp_plugin.device_speed": {"amp_plugin.user_warnings"},
    "amp_plugin.kernels": NAMES,
    "amp_plugin.casting": {"amp_plugin.kernels", *NAMES},
    "amp_plugin.weights": {"amp_plugin.kernels", *NAMES},
    "amp_plugin.scaling": {"amp_plugin.kernels", "amp_plugin.weights", *NAMES},
    "amp_plugin.sharding": {"amp_plugin.casting", "amp_plugin.weights", *NAMES},
    "amp_plugin": {  # the public names
        "amp_plugin.adapters.accelerate",
        "amp_plugin.adapters.lightning",
        "amp_plugin.casting",
        "amp_plugin.did_you_mean",
        "amp_plugin.numerics",
        "amp_plugin.scaling",
        "amp_plugin.sharding",
        "amp_plugin.tuning",
        "amp_plugin.weights",
    },
    "amp_plugin.program": {"amp_plugin.casting"},
    "amp_plugin.numerics": {"amp_plugin.precision", "amp_plugin.casting", "amp_plugin.scaling"},
    "amp_plugin.tuning": {
        "amp_plugin.casting",
        "amp_plugin.did_you_mean",
        "amp_plugin.kernels",
        "amp_plugin.numerics",
        "amp_plugin.program",
    },
    "amp_plugin.cli": CORE | {"amp_plugin.numerics", "amp_plugin.program", "amp_plugin.tuning"},
    "amp_plugin.__main__": {"amp_plugin.cli"},
    "amp_plugin.adapters": CORE | {"amp_plugin.numerics"},
    "amp_plugin.adapters.accelerate": CORE | {"amp_plugin.adapters", "accelerate"},
    "amp_plugin.adapters.lightning": CORE | {"amp_plugin.adapters"} | LIGHTNING,
    "recipes": CORE | ADAPTERS | {"accelerate", "transformers"} | LIGHTNING,
}
# Nobody else imports these; torch, the standard library and the like are free for all.
WATCHED = {"accelerate", "benchmarks", "tests", "transformers", *LIGHTNING, *PARTS}


def against_parts(imports: Sequence[Import], parts: Mapping[str, set[str]], watched: set[str]) -> list[str]:
    """Describe the imports between parts that the table does not allow."""
    found = []
    for imported in imports:
        source, target = part_of(imported.importer, watched), part_of(imported.imported, watched)
        if target not in {source, None} and target not in parts.get(str(source), set()):
            found.append(f"{imported}, which {source} may not")
    return found


def part_of(module: str, parts: set[str]) -> str | None:
    """Return the innermost part a module is in; at the top of amp_plugin: the module."""
    holders = [part for part in parts if module == part or module.startswith(f"{part}.")]
    innermost = max(holders, key=len, default=None)
    return module if innermost == "amp_plugin" else innermost


# -- this project -------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["amp_plugin", "recipes"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    found = circles(imports_of(ROOT / package))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", ["amp_plugin", "recipes"])
def test_a_part_imports_only_the_parts_it_may(package: str) -> None:
    found = against_parts(imports_of(ROOT / package), PARTS, WATCHED)
    assert not found, "\n".join(found)


def test_the_design_document_has_the_same_folders() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    folders = {folder for folder, _ in rows}
    assert folders == {file.parent.name for file in (ROOT / "amp_plugin").glob("*/__init__.py")}
    for folder, text in rows:
        named = set(re.findall(r"`(\w+)`", text))
        stated = folders - named - {folder} if text.startswith("all but") else named
        allowed = {part.removeprefix("amp_plugin.") for part in PARTS[f"amp_plugin.{folder}"]}
        assert stated == allowed & folders, folder


def test_no_private_name_is_read_across_files() -> None:
    found = private_reads(ROOT / "amp_plugin", "scaling", "adapters")
    assert not found, "\n".join(found)


def test_functions_are_short() -> None:
    found = long_functions(ROOT / "amp_plugin", most=40)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["amp_plugin", "benchmarks"])
def test_values_are_called_what_they_are(folder: str) -> None:
    found = vague_names(ROOT / folder)
    assert not found, "\n".join(found)


# -- the checks themselves ----------------------------------------------------------------------


def package_of(folder: Path, **sources: str) -> Path:
    """Write a package ``app``; ``a__b="..."`` is its module ``a/b.py``."""
    package = folder / "app"
    for name, source in {"__init__": "", **sources}.items():
        file = package / f"{name if name == '__init__' else name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return package


def test_modules_are_named_by_their_place(tmp_path: Path) -> None:
    package = package_of(tmp_path, one="", sub__two="")
    (package / "sub/__init__.py").touch()
    assert set(modules_of(package)) == {"app", "app.one", "app.sub", "app.sub.two"}


@pytest.mark.parametrize(
    "back",
    [
        "import app.one",
        "import app.one as other",
        "from app import one",
        "from app.one import first",
        "from . import one",
        "from .one import first",
        "def late():\n    from app.one import first",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from app.one import first",
        "try:\n    import app.one\nexcept ImportError:\n    pass",
    ],
)
def test_every_kind_of_import_closes_a_circle(back: str, tmp_path: Path) -> None:
    package = package_of(tmp_path, one="from app.two import second", two=back, three="import app.one")
    assert circles(imports_of(package)) == [
        "2 modules in a circle: app.one, app.two; app.one -> app.two -> app.one"
    ]


def test_a_circle_by_way_of_a_package_and_its_shortest_way(tmp_path: Path) -> None:
    package = package_of(
        tmp_path,
        sub__one="from ..sub import two",
        sub__two="from .three import third\nimport app.sub.one",
        sub__three="from app.sub.one import first",
    )
    (lines,) = circles(imports_of(package))
    assert lines.startswith("3 modules in a circle: app.sub.one, app.sub.three, app.sub.two; ")
    assert lines.endswith("app.sub.one -> app.sub.two -> app.sub.one")


def test_an_import_without_a_way_back_is_no_circle(tmp_path: Path) -> None:
    package = package_of(
        tmp_path, one="import torch\nfrom app import two, three", two="import app.three", three=""
    )
    assert circles(imports_of(package)) == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("amp_plugin.casting.region", "amp_plugin.kernels.build", True),
        ("amp_plugin.casting.region", "amp_plugin.scaling.loss_scale", False),
        ("amp_plugin.scaling.steps", "amp_plugin.casting", False),
        ("amp_plugin.scaling.steps", "amp_plugin", False),
        ("amp_plugin.scaling.penalty", "lightning.fabric", False),
        ("amp_plugin.kernels.build", "amp_plugin.casting.rules", False),
        ("amp_plugin.kernels.build", "torch.nn", True),
        ("amp_plugin.adapters.endless_skips", "amp_plugin.scaling.loss_scale", True),
        ("amp_plugin.adapters.endless_skips", "accelerate.utils", False),
        ("amp_plugin.adapters.endless_skips", "amp_plugin.adapters.lightning.monitor", False),
        ("amp_plugin.adapters.lightning.monitor", "amp_plugin.adapters.endless_skips", True),
        ("amp_plugin.adapters.lightning.monitor", "pytorch_lightning", True),
        ("amp_plugin.adapters.lightning.monitor", "accelerate", False),
        ("amp_plugin.adapters.lightning.monitor", "amp_plugin.adapters.accelerate", False),
        ("amp_plugin.adapters.accelerate.settings", "amp_plugin.adapters.lightning.settings", False),
        ("amp_plugin.adapters.accelerate.settings", "recipes.config", False),
        ("amp_plugin.cli", "amp_plugin.adapters.lightning", False),
        ("amp_plugin.new", "amp_plugin.casting.rules", False),
        ("amp_plugin.casting.region", "amp_plugin.new", False),
        ("recipes.clipping", "amp_plugin.adapters.lightning", True),
        ("recipes.clipping", "tests.process_groups", False),
    ],
)
def test_an_import_of_a_part_that_may_not_be_is_found(importer: str, imported: str, allowed: bool) -> None:
    found = against_parts([Import(importer=importer, imported=imported, place="x.py:1")], PARTS, WATCHED)
    part = part_of(importer, WATCHED)
    assert found == ([] if allowed else [f"x.py:1 imports {imported}, which {part} may not"])


OWNER = """
class Owner:
    _limit: int = 3
    __slots__ = ("_slot",)

    def __init__(self):
        self._state, self.name = 1, 2

    def _act(self):
        self._late: int = 3

def _function():
    pass
"""


@pytest.mark.parametrize("name", ["_limit", "_slot", "_state", "_act", "_late"])
@pytest.mark.parametrize(
    "read",
    [
        "owner.{}",
        "owner.{} = 1",
        "self.owner.{}",
        "getattr(owner, '{}', None)",
        "def f(owner):\n    return [x.{} for x in owner]",
    ],
)
def test_a_private_attribute_read_in_another_file_is_found(read: str, name: str, tmp_path: Path) -> None:
    package = package_of(tmp_path, owner=OWNER, reader=read.format(name))
    line = 1 + read.count("\n")
    assert private_reads(package) == [f"app/reader.py:{line} reads {name} of app/owner.py"]


def test_a_private_name_imported_from_another_file_is_found(tmp_path: Path) -> None:
    sources = {
        "owner": OWNER,
        "one": "from app.owner import _function",
        "two": "from .owner import _function",
    }
    found = private_reads(package_of(tmp_path, **sources))
    assert found == ["app/one.py:1 imports _function", "app/two.py:1 imports _function"]


@pytest.mark.parametrize(
    "source",
    [
        "self._state",
        "cls._limit",
        "super()._act()",
        "getattr(self, '_state')",
        "owner.name",
        "owner.__class__",
        "tensor._version",  # no class of the package has it
        "module._function()",
        "class Other:\n    def f(self, other):\n        self._state = other._state",
        "from torch import _C",
        "for _ in range(3): pass",
    ],
)
def test_reads_of_ones_own_and_of_others_names_are_none(source: str, tmp_path: Path) -> None:
    assert private_reads(package_of(tmp_path, owner=OWNER, reader=source)) == []


def test_a_long_function_is_found_and_its_docstring_is_not_counted(tmp_path: Path) -> None:
    package = package_of(
        tmp_path,
        short='def short():\n    """Say.\n\n    More.\n    """\n    return 1',
        long="class Owner:\n    def long(self):\n        a = 1\n        return a",
    )
    assert long_functions(package, most=2) == ["app/long.py:2 long has 3 lines"]
    assert long_functions(package, most=3) == []


@pytest.mark.parametrize(
    "source", ["for one in []: pass", "[each for each in []]", "it = 1", "a, thing = 1, 2"]
)
def test_a_name_that_says_nothing_is_found(source: str, tmp_path: Path) -> None:
    (found,) = vague_names(package_of(tmp_path, one=source))
    assert re.fullmatch(r"app/one\.py:1 calls a value '(one|each|it|thing)'", found)


def test_only_the_folders_asked_for_are_looked_at(tmp_path: Path) -> None:
    package = package_of(tmp_path, owner=OWNER, a__one="owner._state", b__two="owner._state")
    assert private_reads(package, "b") == ["app/b/two.py:1 reads _state of app/owner.py"]
