"""`import torch` calls amp_plugin_autoload in every program.

It takes no time, and never makes the import fail.
"""

import os
import shutil
import stat
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import amp_plugin_autoload
from tests.warm_processes import ROOT, call

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLES = [{}, {"AMP_PLUGIN_TAKEOVER": "as-written"}, {"AMP_PLUGIN_RULES": "rules.yaml"}]
LOAD = """
from importlib.metadata import EntryPoint
EntryPoint("amp_plugin", {value!r}, "torch.backends").load()()
print("torch is imported")
"""


def entry_point() -> str:
    (value,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "torch.backends"
    ].values()
    return value


def remove(file: Path) -> None:
    file.unlink()


def cut_short(file: Path) -> None:
    text = file.read_bytes()
    # cut inside the docstring, because a complete part of the file could still run
    file.write_bytes(text[: text.index(b'"""', 3)])


def fill_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def raise_at_once(file: Path) -> None:
    file.write_text("raise SystemError('of a broken file')")


def as_unreadable_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x80")


BROKEN = [
    ("amp_plugin/__init__.py", fill_with_zeros),
    ("amp_plugin", shutil.rmtree),
    ("amp_plugin/messages.py", as_unreadable_text),
    ("amp_plugin/patches.py", cut_short),
    ("amp_plugin/casting/bound_rules.py", remove),
    ("amp_plugin/adapters/takeover.py", raise_at_once),
]


@pytest.mark.parametrize(("name", "break_it"), BROKEN, ids=lambda given: getattr(given, "__name__", given))
@pytest.mark.parametrize("variables", VARIABLES, ids=lambda given: "".join(given) or "plain")
def test_a_broken_file_is_a_line_and_no_error(tmp_path: Path, name, break_it, variables) -> None:
    shutil.copytree(
        ROOT / "amp_plugin", tmp_path / "amp_plugin", ignore=shutil.ignore_patterns("csrc", "__pycache__")
    )
    shutil.copy(ROOT / "amp_plugin_autoload.py", tmp_path)
    break_it(tmp_path / name)
    environment = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path), **variables}
    command = [
        sys.executable,
        "-S",
        "-W",
        "error",
        "-c",
        LOAD.format(value=entry_point()),
    ]  # without any installed package
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "torch is imported\n"), done.stderr
    said = done.stderr.splitlines()
    if variables:
        assert said[0].startswith(f"amp_plugin: {next(iter(variables))} cannot be followed, ")
        assert said[0].endswith("; install it again")
    assert len(said) == len(variables)


def bind_without(package: str) -> None:
    """Do what `import torch` does if a package is missing."""
    for name in [
        name for name in sys.modules if name.startswith("amp_plugin") or name.partition(".")[0] == package
    ]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]
    EntryPoint("amp_plugin", entry_point(), "torch.backends").load()()
    print("torch is imported")


@pytest.mark.parametrize("package", ["yaml", "filelock"])
def test_a_missing_dependency_is_a_line_and_no_error(tmp_path: Path, package: str) -> None:
    (tmp_path / "rules.yaml").write_text("device_type: cpu\nrules: {}\n")
    environment = {"AMP_PLUGIN_RULES": str(tmp_path / "rules.yaml"), "AMP_PLUGIN_TAKEOVER": "fp16"}
    done = call(bind_without, package, environment=environment)
    assert done.stdout == "torch is imported\n", done.stderr
    variables = "AMP_PLUGIN_RULES and AMP_PLUGIN_TAKEOVER"
    assert f"amp_plugin: {variables} cannot be followed, ModuleNotFoundError: " in done.stderr
    assert package in done.stderr


def bind_in_a_home_that_cannot_be_written() -> None:
    """Run the takeover as a user who cannot write to a cache, and use a scaler."""
    os.setgid(65534)
    os.setuid(65534)
    import torch

    EntryPoint("amp_plugin", entry_point(), "torch.backends").load()()
    print(torch.amp.GradScaler("cpu").get_scale())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_read_only_home_stops_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
    for folder in tmp_path.parents[:-2]:
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    environment = {
        "HOME": str(home),
        "XDG_CACHE_HOME": "",
        "AMP_PLUGIN_TAKEOVER": "fp16",
        "AMP_PLUGIN_CACHE_DIR": "",
    }
    done = call(bind_in_a_home_that_cannot_be_written, environment=environment)
    assert done.stdout == "65536.0\n", done.stderr


@pytest.mark.parametrize("variable", ["AMP_PLUGIN_RULES", "AMP_PLUGIN_TAKEOVER"])
def test_a_wrong_value_is_an_error_of_who_has_set_it(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from amp_plugin.casting import bound_rules

    bound_rules.bind_environment.cache_clear()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv(variable, "no-such-word")
    with pytest.raises(ValueError, match="no-such-word"):
        amp_plugin_autoload.bind()


def test_a_line_that_cannot_be_printed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (None, Path(os.devnull).open()):  # noqa: SIM115 - closed, and not for writing
        monkeypatch.setattr(sys, "stderr", stream)
        if stream is not None:
            stream.close()
        amp_plugin_autoload._say("text")


def test_it_costs_less_than_a_millisecond() -> None:
    """Other processes also use the processor, so the shortest of several times counts."""

    value = entry_point()

    def milliseconds() -> float:
        sys.modules.pop("amp_plugin_autoload", None)
        begin = time.perf_counter()
        EntryPoint("amp_plugin", value, "torch.backends").load()()
        return (time.perf_counter() - begin) * 1e3

    assert min(milliseconds() for _ in range(10)) < 1


def test_it_loads_no_module_where_no_variable_is_set() -> None:
    code = f"import sys; before = {{*sys.modules}}; {LOAD.format(value=entry_point()).strip().replace(chr(10), '; ')}"
    code += "; print({*sys.modules} - before)"
    code = code.replace("before =", "import importlib.metadata, os; before =", 1)
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "torch is imported\n{'amp_plugin_autoload'}\n", done.stderr
