"""Make a page from the text, the code and the saved outputs of each notebook."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
LINK = re.compile(r"\]\(([\w/.]+)\.ipynb\)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page and its pictures for each notebook. The notebook itself stays on the site for download."""
    for notebook in sorted(DOCS.rglob("*.ipynb")):
        folder = notebook.parent.relative_to(DOCS)
        text, pictures = page(json.loads(notebook.read_text(encoding="utf-8")), notebook.stem)
        files.append(File.generated(config, str(folder / f"{notebook.stem}.md"), content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, str(folder / name), content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Change links to a notebook into links to the page made from it."""
    return LINK.sub(r"](\1.md)", markdown)


def page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's page as Markdown, and a dict from the path of each picture to its PNG bytes.

    Args:
        notebook: The content of a notebook of format 4.
        name: The file name of the notebook, without ``.ipynb``.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for kind, content in outputs(cell):
            if kind == "text":
                parts.append(f"```text\n{content}\n```")
            else:
                path = f"images/{name}-{len(pictures) + 1}.png"
                pictures[path] = base64.b64decode(content)
                parts.append(f"![What the cell above draws]({path})")
    return "\n\n".join(parts) + "\n", pictures


def outputs(cell: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each output of a code cell as ``("text", printed text)`` or ``("png", base64 string)``."""
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield "png", data["image/png"]
        elif text := COLOURS.sub("", "".join(output.get("text", data.get("text/plain", "")))).rstrip():
            yield "text", text
