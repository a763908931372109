"""Do programs that do not use amp_plugin train the same under ``amp-plugin run`` as without it?"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


def printed(*words, folder):
    """Return a program's output, and the lines that amp-plugin printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@pytest.mark.whole_run
@pytest.mark.parametrize("name", ["closures", "kohya", "fastai_loop"])
def test_a_program_trains_as_without_us(name, tmp_path):
    if name == "fastai_loop" and find_spec("fastai") is None:
        pytest.skip("fastai is not installed: pip install fastai 'fastprogress<1.1'")
    program = str(PROGRAMS / f"{name}.py")
    stock, _ = printed(program, folder=tmp_path)
    ours, said = printed("-m", "amp_plugin", "run", program, folder=tmp_path)
    assert ours == stock
    assert len(stock.splitlines()) >= 12
    assert "torch.autocast in" in said
    assert "GradScaler" in said
