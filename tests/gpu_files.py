"""For ``pytest -p tests.gpu_files -m "gpu ..."``: files without a test marked ``gpu`` are passed over.

What they import takes longer than the tests, and is not on every machine with a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.option.markexpr.startswith("gpu") and collection_path.suffix == ".py"
    return True if chosen and "pytest.mark.gpu" not in collection_path.read_text() else None
