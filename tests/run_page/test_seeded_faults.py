"""The page of the one run in which a step went wrong names the op and the line."""

import html
import re
from pathlib import Path

import pytest
import torch

import amp_plugin
from tests.run_page.seeded_faults import FAULTS, STEPS, Fault, Net

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def page_of(fault: Fault, folder: Path) -> str:
    """Train for some steps, and return the text of the page's section on what went wrong."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=fault.lr)
    scaler = amp_plugin.GradScaler("cpu", enabled=fault.precision == "fp16", init_scale=256.0)
    dtype = DTYPES[fault.precision]

    def forward_and_backward(x: torch.Tensor, step: int) -> None:
        with amp_plugin.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = fault.loss(net, x, step)
        scaler.scale(loss).backward()

    with amp_plugin.report(scaler, net, folder / "run.html") as page:
        for step in range(STEPS):
            batch = torch.randn(8, 8)
            if fault.recorded:
                scaler.recorded(forward_and_backward, batch, step)
            else:
                forward_and_backward(batch, step)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return wrong_in(page.path)


def wrong_in(path: Path) -> str:
    section = re.search(r"<h2>What went wrong</h2>.*?</section>", path.read_text(), re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", section.group())) if section else ""


@pytest.mark.native
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_op_and_the_line_are_named(fault: Fault, tmp_path: Path) -> None:
    text = page_of(fault, tmp_path)
    assert re.search(rf"(::_?|\b)({fault.op})\b", text.partition("line")[0])
    assert re.search(rf"seeded_faults\.py:{fault.line}\b", text)
