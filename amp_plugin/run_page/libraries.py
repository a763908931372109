"""Check that the packages that draw the run report are installed. The check does not import torch."""

from importlib.util import find_spec


def require_libraries() -> None:
    """Raise an ImportError if a package that draws the run report is missing."""
    for package in ("altair", "jinja2", "vl_convert"):
        if find_spec(package) is None:
            packages = "altair jinja2 vl-convert-python"
            msg = f"a report needs {package}, which is not installed; run: pip install {packages}"
            raise ImportError(msg)
