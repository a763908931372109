"""Add the recipes' programs and ARCHITECTURE.md, which are outside the docs folder, to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
_TO_RECIPE = re.compile(r"\]\(\.\./((?:\.\./)*)recipes/(\w+)\.py\)")
_TO_ARCHITECTURE = re.compile(r"\]\(\.\./((?:\.\./)*)ARCHITECTURE\.md\)")
_TO_DOCS = re.compile(r"\]\(docs/")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page with the source code of each recipe, and a page for ARCHITECTURE.md."""
    for program in sorted(RECIPES.glob("*.py")):
        title = f"# recipes/{program.name}"
        text = f"{title}\n\n```python\n{program.read_text()}```\n"
        files.append(File.generated(config, f"recipes/{program.stem}.md", content=text))
    text = _TO_DOCS.sub("](", ARCHITECTURE.read_text(encoding="utf-8"))
    files.append(File.generated(config, "architecture.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite links to recipes and to ARCHITECTURE.md so that they lead to pages of the site."""
    return _TO_ARCHITECTURE.sub(r"](\1architecture.md)", _TO_RECIPE.sub(r"](\1recipes/\2.md)", markdown))
