"""Let Griffe recognize the ``Example:`` section of a docstring.

Griffe, which reads the docstrings for the site, knows only the heading ``Examples:``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section ``Example:`` to ``Examples:`` in every docstring that Griffe reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
