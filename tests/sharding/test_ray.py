"""Ray Train starts the ranks: a smoke test of its torch trainer on two workers."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.dist
def test_two_workers_step_and_skip_together(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    command = [sys.executable, "-m", "tests.sharding.ray_run", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert str(first) == str(second)  # inf and nan too
    assert [skipped for skipped, *_ in first["steps"]] == [False, True, False, False]
    assert [scale for _, scale, _ in first["steps"]] == [8.0, 4.0, 4.0, 4.0]
