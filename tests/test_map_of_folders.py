"""Does the map of the package name each of its folders and modules, so that a newcomer finds the right one?"""

from pathlib import Path

import amp_plugin

ROOT = Path(amp_plugin.__file__).parent
MAP = (ROOT.parent / "docs" / "lab" / "design.md").read_text(encoding="utf-8").partition("## ")[0]


def test_it_names_each_folder_and_each_module_of_the_root():
    folders = {f"`{folder.name}/`" for folder in ROOT.iterdir() if (folder / "__init__.py").is_file()}
    modules = {f"`{module.name}`" for module in ROOT.glob("*.py") if not module.stem.startswith("__")}
    assert len(folders) > 8
    assert len(modules) > 5
    assert not {name for name in folders | modules if name not in MAP}
