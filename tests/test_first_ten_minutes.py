"""The first ten minutes on a GPU, on the device made of host memory; each part finds the fault that is planted for it."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import benchmarks.cuda
from amp_plugin.kernels.cuda.catalogue import LAYOUT, SOURCES
from tests import first_ten_minutes
from tests.gpu_step import ROOT
from tests.host_device import host_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not host_device.LOADED, reason="make test-gpu runs it where there is a GPU"),
]

FLAG = ("norm_check", "measure.cuh", "&table.marks[tensor], found", "&table.marks[tensor / 2], found")
BARRIER = ("norm_check", "tensor_table.cuh", "  __syncthreads();\n  return last;", "  return last;")
PIECES = ("norm_check", "measure.cuh", "norm.join(mine.total, found.total)", "found.total")
QUOTIENT = (
    "adam",
    "step_rows.cuh",
    "grad.lane[i] = divisor.divide(grad.lane[i])",
    "grad.lane[i] *= divisor.inverse",
)

VARIANT = (
    "multiply",
    "multiply.cu",
    '#include "measure.cuh"',
    '#include "measure.cuh"\n#if IN_FLIGHT == 8\n#error no room for eight\n#endif',
)


def ran(folder, *parts, **environment):
    command = (sys.executable, "-m", "tests.first_ten_minutes", *parts, "--figures", str(folder))
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def with_fault(tmp_path, kernel, file, right, wrong):
    """Return what the host device takes a kernel with a fault by."""
    copy = tmp_path / "cuda" / "cuda"
    shutil.copytree(SOURCES, copy)
    (copy.parent / "csrc").mkdir()
    shutil.copy2(LAYOUT, copy.parent / "csrc")
    text = (copy / file).read_text()
    assert text.count(right) == 1
    (copy / file).write_text(text.replace(right, wrong))
    return f"{kernel} {copy}"


def test_all_parts_pass_and_write_their_figures(tmp_path):
    done = ran(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    assert [line.partition(":")[0] for line in lines] == [*first_ten_minutes.PARTS]
    assert "  1 x 100 MB, adam_: GB/s " in done.stdout
    for part in first_ten_minutes.PARTS:
        record = json.loads((tmp_path / f"first-{part}.json").read_text())
        assert record["verdict"] == "passed"
        assert record["figures"]


whole_run = pytest.mark.whole_run


@pytest.mark.parametrize(
    ("part", "fault", "finding"),
    [
        ("ops", FLAG, "flags [0, 0, 2, 0, 0, 0, 0, 0] for [0, 0, 0, 0, 0, 2, 0, 0]"),
        ("ops", QUOTIENT, "gradients are not those of torch._fused_adamw_"),
        pytest.param("streams", FLAG, "a nan in tensor 1: flags [2, 0, 0, 0, 0]", marks=whole_run),
        pytest.param(
            "ops", BARRIER, "norm_check: a shuffle or vote was not reached by the whole warp", marks=whole_run
        ),
        pytest.param("addresses", PIECES, "WRONG: step ", marks=whole_run),
        pytest.param("graphs", FLAG, "replay 5: a nan in tensor 35, flags of [17]", marks=whole_run),
        pytest.param(
            "sweep",
            VARIANT,
            "4 blocks, 8 in flight: RuntimeError: g++ cannot compile multiply.cu: ",
            marks=whole_run,
        ),
    ],
    ids=[
        "wrong flag",
        "wrong quotient",
        "wrong flag among streams",
        "missing barrier",
        "lost pieces",
        "graph",
        "a variant that does not compile",
    ],
)
def test_a_fault_in_a_kernel_is_found(tmp_path, part, fault, finding):
    done = ran(tmp_path, part, HOST_DEVICE_FAULTY=with_fault(tmp_path, *fault))
    assert done.returncode == 1
    assert f"{part}: WRONG: " in done.stdout
    assert finding in done.stdout
    assert json.loads((tmp_path / f"first-{part}.json").read_text())["verdict"].startswith("WRONG")


@pytest.mark.parametrize(
    ("part", "fault", "finding"),
    [
        ("load", "adam is missing", "the CUDA driver cannot load adam (CUDA_ERROR_OF_THE_HOST_DEVICE 500, "),
        ("graphs", "tables are given back early", "a graph that was dropped in flight has the norm"),
        ("graphs", "graphs leak", "400 recaptures have taken"),
        pytest.param(
            "sweep",
            "all builds are alike",
            "4 blocks, 8 in flight: the same machine code as 4 blocks, 4 in flight, so nothing was swept",
            marks=whole_run,
        ),
    ],
)
def test_a_fault_of_the_driver_or_of_a_build_is_found(tmp_path, part, fault, finding):
    done = ran(tmp_path, part, HOST_DEVICE_FAULT=fault)
    assert done.returncode == 1
    assert f"{part}: WRONG: " in done.stdout
    assert finding in done.stdout, done.stdout


@pytest.mark.parametrize("figure", [0.0, math.nan, 40_000.0])
def test_a_bandwidth_that_no_memory_has_is_found(monkeypatch, capsys, figure):
    measured, calls = benchmarks.cuda.bandwidth, itertools.count()

    def planted(sample, moved):
        return (lambda: figure) if next(calls) == 0 else measured(sample, moved)

    monkeypatch.setattr(benchmarks.cuda, "bandwidth", planted)
    assert first_ten_minutes.main(["bandwidth"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"bandwidth: WRONG: 1 x 100 MB, norm_check: {figure:.3g} GB/s is no memory's")


def test_a_missing_cuda_core_is_told_of(monkeypatch, capsys):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(first_ten_minutes, "version", missing)
    assert first_ten_minutes.main(["versions"]) == 1
    assert capsys.readouterr().out.startswith(
        "versions: WRONG: cuda-core is not installed; pip install 'cuda-core>=1.0.1'"
    )


def test_an_old_cuda_core_is_told_of_first(monkeypatch, capsys):
    monkeypatch.setattr(first_ten_minutes, "version", lambda _: "0.3.2")
    assert first_ten_minutes.main(["versions"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "versions: WRONG: cuda-core 0.3.2 is installed; pip install --upgrade 'cuda-core>=1.0.1'"
    )
    assert next(iter(first_ten_minutes.PARTS)) == "versions"


def test_nothing_but_torch_and_the_package_is_needed():
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, tests.first_ten_minutes; print(*sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert not {"pytest", "omegaconf", "lightning", "accelerate"} & {*imported}
    assert Path(ROOT, "tests", "first_ten_minutes.py").exists()
