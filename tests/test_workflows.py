"""Can the steps of the workflows be run by hand? Is everything that they download pinned?"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_step_that_runs_code_is_a_target_of_the_makefile(workflow: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for step in steps(workflow):
        if "run" in step:
            make, target, *_ = step["run"].split()
            matrix = yaml.safe_load(workflow.read_text())["jobs"]
            named = [
                word
                for job in matrix.values()
                for word in job.get("strategy", {}).get("matrix", {}).get("target", [])
            ]
            for name in named if target == "${{" else [target]:
                assert make == "make"
                assert name.split()[0] in targets


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_action_is_pinned_by_the_hash_of_its_commit(workflow: Path) -> None:
    for line in workflow.read_text().splitlines():
        if "uses:" in line:
            assert re.search(r"uses: [\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_one_action_has_one_hash() -> None:
    pins = {match for path in WORKFLOWS for match in re.findall(r"uses: (\S+)@(\w+)", path.read_text())}
    assert len(pins) == len({action for action, _ in pins})


def test_the_owner_of_the_repository_is_written_by_one_command(tmp_path: Path) -> None:
    files = ("Makefile", "pyproject.toml", ".github/CODEOWNERS")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    subprocess.run(["make", "owner", "OWNER=somebody"], cwd=tmp_path, check=True, capture_output=True)
    project, owners = ((tmp_path / name).read_text() for name in files[1:])
    assert "https://github.com/somebody/amp_plugin" in project
    assert "* @somebody" in owners
    assert "OWNER" not in project + owners
    refused = subprocess.run(["make", "owner"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "give OWNER=name" in refused.stderr


def test_the_version_stands_in_one_place() -> None:
    version = re.search(r'__version__ = "(.*?)"', (ROOT / "amp_plugin" / "__init__.py").read_text())[1]
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    holders = [
        name
        for name in tracked
        if (ROOT / name).suffix in {".py", ".toml", ".cff", ".yml"} and version in (ROOT / name).read_text()
    ]
    assert holders == ["amp_plugin/__init__.py"]
