"""The notebook docs/start/tour.ipynb runs at a small size, and was saved with its outputs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from docs.notebook_pages import page

pytestmark = pytest.mark.native

NOTEBOOK = Path(__file__).parent.parent / "docs" / "start" / "tour.ipynb"
FEW = "steps = 32"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    small = "parameters" in cell["metadata"].get("tags", [])
    return FEW if small else "".join(cell["source"])


@pytest.fixture
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the variables that the notebook has defined after its last cell."""
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    matplotlib.use("agg")
    assert [source(cell) for cell in code_cells()].count(FEW) == 1
    defined: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("tour"))
        for number, cell in enumerate(code_cells()):
            exec(compile(source(cell), f"<cell {number}>", "exec"), defined)
    matplotlib.pyplot.close("all")
    return defined


def test_the_cells_show_what_the_text_says(variables: dict[str, Any]) -> None:
    assert variables["skipped"][:5] == [0, 1, 2, 3, 4]
    assert len(variables["skipped"]) < 20
    assert variables["losses"][-1] < 0.7 * variables["losses"][0]
    four, one = variables["four_regions"], variables["one_region"]
    assert sum(one.values()) < 0.8 * sum(four.values())
    assert {"Reader.digit", "Reader.attention.1.key"} <= set(four)
    named = {*variables["overflow"].inf, *variables["overflow"].nan}
    assert "digit.weight" in named
    assert len(named) < 6
    (finding,) = variables["diagnosis"].findings
    assert (finding.op, finding.module) == ("aten::bmm.default", "attention.1")
    assert math.isfinite(variables["cured"].item())
    changed = variables["tuning"].rules.diff(variables["OpRules"].default("cpu"))
    assert changed == {"aten::matmul.default": ("fp32", "lower_precision")}
    stored, loaded = variables["runs"].values()
    for shares, lengths, least, most in ((*stored, 0.9, 1.0), (*loaded, 0.0, 0.2)):
        assert least <= shares[-1] <= most
        assert len(lengths) == variables["steps"] // 4
    assert stored[1][-1] > 2 * loaded[1][-1]


def test_the_page_has_the_outputs_of_one_whole_run() -> None:
    counts = [cell["execution_count"] for cell in code_cells()]
    assert counts == list(range(1, len(counts) + 1))
    text, pictures = page(json.loads(NOTEBOOK.read_text(encoding="utf-8")), "tour")
    assert [*pictures] == [f"images/tour-{number}.png" for number in range(1, 4)]
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    for shown in ("aten::bmm.default made inf", "digit.weight", "steps skipped", "aten::matmul: fp32"):
        assert shown in text
    assert "\x1b" not in text
