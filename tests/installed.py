"""Does an installed wheel or sdist work in an environment that has nothing else?

``make test-installed`` runs this file outside of the repository, in an environment with torch and the
package. It needs neither pytest nor the sources. It prints one line per part, and stops at the first part
that fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import amp_plugin
from amp_plugin.kernels.build import native_core


def train(scaler_class: Callable[..., object], autocast: Callable[..., object]) -> list[torch.Tensor]:
    """Train a small model in fp16 with a scale that overflows at first. Return its weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_class("cpu", init_scale=2.0**24, growth_interval=4)
    for batch in torch.randn(12, 32, 8):
        with autocast("cpu", dtype=torch.float16):
            loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def check_location() -> None:
    """Check that the imported package is the installed one."""
    assert Path(amp_plugin.__file__).is_relative_to(sysconfig.get_path("purelib")), amp_plugin.__file__


def check_core(*, inside: bool) -> None:
    """Check that the native core works, and that a wheel's core is not compiled again."""
    core = native_core()
    assert core.loaded, core.reason
    assert core.library is not None
    if inside:
        assert core.seconds == 0.0, core.library
        assert core.library.is_relative_to(Path(amp_plugin.__file__).parent), core.library


def check_training() -> None:
    """Check that training gives torch.amp's weights, bit for bit, after the same skipped steps."""
    ours = train(amp_plugin.GradScaler, amp_plugin.autocast)
    theirs = train(torch.amp.GradScaler, torch.autocast)
    assert all(map(torch.equal, ours, theirs))


def check_commands() -> None:
    """Check that the command runs, and that its ``check`` finds a mistake."""
    program = Path(sys.executable).with_name("amp-plugin")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.strip() == amp_plugin.__version__
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder, "wrong.py")
        wrong.write_text("from torch.cuda.amp import GradScaler\nscaler = GradScaler()\n")
        assert (
            subprocess.run([program, "check", wrong], stdout=subprocess.DEVNULL, check=False).returncode == 1
        )


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core-inside", action="store_true", help="the package brings a compiled core along")
    inside = parser.parse_args().core_inside
    os.environ.pop("AMP_PLUGIN_NATIVE", None)
    for name, part in {
        "the installed package": check_location,
        "the native core": lambda: check_core(inside=inside),
        "training beside torch.amp": check_training,
        "the commands": check_commands,
    }.items():
        part()
        print(f"{name}: right", flush=True)


if __name__ == "__main__":
    main()
