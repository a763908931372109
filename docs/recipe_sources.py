"""Put the recipes' programs into the site, for the links of pages to ``recipes/NAME.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RECIPES = Path(__file__).parent.parent / "recipes"
LINK = re.compile(r"\]\(\.\./((?:\.\./)*)recipes/(\w+)\.py\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page with the source of each recipe."""
    for program in sorted(RECIPES.glob("*.py")):
        text = f"# recipes/{program.name}\n\n```python\n{program.read_text()}```\n"
        files.append(File.generated(config, f"recipes/{program.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to a recipe's file lead to its page."""
    return LINK.sub(r"](\1recipes/\2.md)", markdown)
