"""Do programs that do not use amp_plugin train the same under ``amp-plugin run`` as without it?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
APART = Path(sys.prefix, "apart")  # `make` installs fastai here, where other programs do not find it


def printed(*words, folder, path):
    """Return a program's output, and the lines that amp-plugin printed."""
    path = os.pathsep.join(str(part) for part in (ROOT, *path))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@pytest.mark.whole_run
@pytest.mark.parametrize("name", ["closures", "kohya", "fastai_loop"])
def test_a_program_trains_as_without_us(name, tmp_path):
    path = [APART] if name == "fastai_loop" else []
    if path and not Path(APART, "fastai").is_dir():
        pytest.skip("fastai is not there; make installs it")
    program = str(PROGRAMS / f"{name}.py")
    stock, _ = printed(program, folder=tmp_path, path=path)
    ours, said = printed("-m", "amp_plugin", "run", program, folder=tmp_path, path=path)
    assert ours == stock
    assert len(stock.splitlines()) >= 12
    assert "torch.autocast in" in said
    assert "GradScaler" in said
