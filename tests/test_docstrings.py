"""Every example in a docstring gives the output that it shows."""

import doctest
import importlib
import pkgutil
import sys
from collections.abc import Iterator

import pytest
import torch

import amp_plugin

pytestmark = pytest.mark.native  # some examples need the native core


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(amp_plugin.__path__, "amp_plugin."):
        if not module.name.endswith("__main__"):
            yield module.name


def examples(module_name: str) -> list[doctest.DocTest]:
    """Return the examples of a module. They can use torch, the module's names and the public names."""
    module = importlib.import_module(module_name)
    public = {name: getattr(amp_plugin, name) for name in amp_plugin.__all__}
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(module, module_name, globs={"torch": torch, **public, **vars(module)})
    return [example for example in found if example.examples]


@pytest.mark.parametrize("module_name", ["amp_plugin", *modules()])
def test_the_examples_of_a_module(module_name: str) -> None:
    report: list[str] = []
    if "accelerate" in sys.modules:  # another test in this process may have created an accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    for example in examples(module_name):
        torch.manual_seed(0)
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    assert not report, "".join(report)


def test_examples_are_found() -> None:
    assert [example.name for example in examples("amp_plugin.casting.region")] == [
        "amp_plugin.casting.region.autocast"
    ]
