"""Every code block in the documentation runs, and every link inside the repository resolves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import amp_plugin
from amp_plugin.check.checker import check_source
from amp_plugin.check.settings import Settings
from amp_plugin.check.sources import Source
from docs.api_tables import with_tables
from docs.llms_txt import TARGET, llms_txt
from tests.warm_processes import run_program

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"^<!-- begin .*?^<!-- end .*?$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# A user who copies a first loop sees it train from the first step: none of its losses overflows in fp16.
FIRST_LOOPS = {"README.md", "docs/start/quick_start.md", "docs/start/pytorch.md", "docs/how/accumulate.md"}
WATCH = """\
from amp_plugin.scaling.grad_scaler import GradScaler
_step, _skips = GradScaler.step, []
def _watched(self, optimizer, *args, **kwargs):
    result = _step(self, optimizer, *args, **kwargs)
    _skips.append(self.last_step(optimizer).skipped)
    return result
GradScaler.step = _watched
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_python_of_a_page_runs_and_first_loops_skip_no_step(page: Path, tmp_path: Path) -> None:
    """A page is read from top to bottom, so its code blocks form one program."""
    program, text = tmp_path / "page.py", "\n".join(blocks(page, "python"))
    if name(page) in FIRST_LOOPS:
        text = f"{WATCH}{text}\nassert _skips and not any(_skips), _skips\n"
    program.write_text(text)
    answer = run_program(program, {"PYTHONPATH": str(ROOT)}, tmp_path, frameworks=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_links_of_a_page_resolve(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for target in LINK.findall(prose):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)} links to {target}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in headings(file), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(ROOT / "docs")], ids=name)
def test_a_page_is_easy_to_read_as_text(page: Path) -> None:
    lines = page.read_text().split("\n")
    if page.parent.name == "how":
        assert len(lines) <= 151, f"{name(page)} answers one question in at most 150 lines; move details"
    prose = GENERATED.sub("", FENCE.sub("", page.read_text())).split("\n")
    text = [line for line in prose if not line.startswith(("|", "#", "![", "<!--"))]
    assert [line for line in text if len(re.sub(r"\]\([^)]*\)", "]", line)) > 110] == []


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub and mkdocs generate them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()).strip() for title in titles)
    return {title.replace(" ", "-") for title in plain}


def test_every_name_that_users_import_has_a_section_in_the_reference() -> None:
    sections = re.findall(
        r"^<!--\s*:::\s*([\w.]+)\s*-->$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE
    )
    described = [section.rpartition(".")[2] for section in sections]
    assert len(described) == len(set(described))
    programs = "\n".join(text for page in PAGES for text in blocks(page, "python"))
    imported = re.findall(r"^ *from amp_plugin[\w.]* import ([\w, ]+)", programs, re.MULTILINE)
    used = {name.partition(" as ")[0].strip() for names in imported for name in names.split(",")}
    public = {name for name in dir(amp_plugin) if not name.startswith("_")}
    assert "autocast" in public & used
    assert (public | used) - set(described) == set()


def test_the_tables_of_the_reference_are_those_of_the_docstrings() -> None:
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python -m docs.api_tables"


def test_the_list_of_pages_is_that_of_the_menu() -> None:
    assert TARGET.read_text(encoding="utf-8") == llms_txt(), "run: python -m docs.llms_txt"


@pytest.mark.parametrize("page", [ROOT / "AGENTS.md", ROOT / "README.md"], ids=name)
def test_the_check_finds_nothing_in_loops_to_copy(page: Path) -> None:
    """Each block is also checked alone, because users copy single blocks."""
    programs = blocks(page, "python")
    assert len(programs) > 2
    for text in (*programs, "\n".join(programs)):
        source = Source(Path("train.py"), text, tuple(text.split("\n")))
        assert [found.code for found in check_source(source, Settings())] == []


def test_the_readme_names_commands_that_exist() -> None:
    shell = "\n".join(blocks(ROOT / "README.md", "bash"))
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for target in re.findall(r"^make (\w+)", shell, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    (extras,) = re.findall(r"pip install '\.\[(.*)\]'", shell)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.whole_run
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout + answer.stderr == ""
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()
    loaded = re.compile(r"""(?:src|<link[^>]*href)=["']?(https?:)?//""")
    for page in (tmp_path / "site").rglob("*.html"):
        assert not loaded.search(page.read_text()), f"{page.name} would load from elsewhere"
    assert (tmp_path / "site" / "search" / "search_index.js").exists()  # the search also works from disk


def test_the_changelog_lists_what_was_added_once() -> None:
    """Additions have stood there twice, in other words, after git had combined two changes of the text."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    added = text[text.index("### Added") : text.index("### Changed")]
    groups = re.findall(r"^([A-Z][^\n]*:)$", added, re.MULTILINE)
    assert len(set(groups)) == len(groups)
    names = re.findall(
        r"^- `(GradScaler\.\w+|on_spike=|log=|precision=\"auto\"|log_formats\(\))", added, re.MULTILINE
    )
    assert len(set(names)) == len(names) > 3
    links = re.findall(r"\]\(([^)\s]+)\)", added)
    assert len(set(links)) == len(links) > 9
