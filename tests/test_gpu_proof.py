"""The pack for a machine with a GPU contains the files that it needs, and no others."""

import subprocess
import sys
import tarfile

import pytest
import torch

from tests import gpu_proof


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proof")
    archive = folder / "proof.tar.gz"
    assert gpu_proof.main([str(archive)]) == 0
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "there", filter="data")
    return folder / "there"


def test_the_sources_travel_and_figures_of_other_gpus_do_not(unpacked):
    assert (unpacked / "amp_plugin" / "kernels" / "csrc").is_dir()
    assert (unpacked / "tests" / "on_gpu.py").is_file()
    assert not list((unpacked / "benchmarks" / "results").glob("nvidia-*.json"))
    assert list((unpacked / "benchmarks" / "results").glob("*.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_it_runs_from_an_empty_folder_up_to_where_it_needs_the_card(unpacked, tmp_path):
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    command = [unpacked / "run.sh", "first-ten-minutes", "--results", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "torch sees no CUDA device" in done.stdout


def test_a_pack_that_is_too_large_is_refused_and_removed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_proof, "MOST", 2**20)
    assert gpu_proof.main([str(tmp_path / "proof.tar.gz")]) == 1
    assert "more than 1; name fewer packages" in capsys.readouterr().err
    assert not (tmp_path / "proof.tar.gz").exists()
