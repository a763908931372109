"""torch's own lists for tests, even if expecttest, which they import, is not installed."""

import importlib
import importlib.util
import sys
import types
import unittest
import warnings


def torchs_own(module: str) -> types.ModuleType:
    """Return a module of ``torch.testing._internal``.

    Its lists use only one thing of expecttest: the base class of torch's test cases, none of which is run
    here.
    """
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"torch.testing._internal.{module}")
