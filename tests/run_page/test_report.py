"""The page of a run: its contents are right, it does not change the run, and its file is always complete."""

import html
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_plugin
from amp_plugin.run_page import headroom, history
from amp_plugin.run_page.dtypes import Survey
from amp_plugin.run_page.headroom import Headroom
from amp_plugin.run_page.report import RunReport
from amp_plugin.scaling import step_log
from amp_plugin.scaling.step_log import StepResult
from tests.warm_processes import ROOT


def text_of(path: Path) -> str:
    """Return the words of a page, without those in its script."""
    body = re.sub(r"<(script|style).*?</\1>", " ", path.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def data_of(path: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL).group(1))["data"]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


def train(
    path, *, steps=12, bad=(), precision="fp16", clip=None, init_scale=2.0**8, factor=1.0, **loop
) -> tuple[nn.Module, RunReport]:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = amp_plugin.GradScaler("cpu", enabled=precision == "fp16", init_scale=init_scale)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    factors = bad if isinstance(bad, dict) else dict.fromkeys(bad, 1e30)

    def passes(x: torch.Tensor, factor: float) -> None:
        with amp_plugin.autocast("cpu", dtype=dtype):
            out = net(x)
            loss = (out * factor).float().square().mean()
        scaler.scale(loss).backward()

    with nullcontext() if path is None else amp_plugin.report(scaler, net, path) as page:
        for step in range(steps):
            x = torch.randn(16, 8)
            given = x, factors.get(step, factor)
            passes(*given)
            if loop.get("accumulates"):
                passes(x, factor)
            if clip:
                scaler.clip_grad_norm_(optimizer, clip)
            take(scaler, optimizer)
    return net, page


def take(scaler: amp_plugin.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def few_steps(path: Path, *, compiled: bool = False, captured: Sequence[int] = ()) -> RunReport:
    net, scaler = make_net(), amp_plugin.GradScaler("cpu", init_scale=2.0**8)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> None:
        scaler.scale(net(x).square().mean()).backward()
        scaler.clip_grad_norm_(optimizer, 0.1)
        take(scaler, optimizer)

    run = torch.compile(step, backend="aot_eager") if compiled else step
    with amp_plugin.report(scaler, net, path) as page:
        for i in range(6):
            with pytest.MonkeyPatch.context() as patch:
                if i in captured:
                    patch.setattr(step_log, "capturing", lambda _: True)
                run(torch.randn(4, 8) * (math.inf if i == 3 else 1.0))
    return page


@pytest.mark.native
# Dynamo finds hooks there
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_steps_compiled_whole_are_drawn_and_the_page_says_what_is_not(tmp_path):
    page = few_steps(tmp_path / "run.html", compiled=True)
    curves, text = data_of(page.path)["curves"], text_of(page.path)
    assert curves["scale"] == [256.0] * 4 + [128.0] * 2
    assert [norm is None for norm in curves["before"]] == [False, False, False, True, False, False]
    assert curves["after"][0] == pytest.approx(0.1, rel=1e-3)
    assert "1 of 6 steps: step 4" in text


def test_captured_steps_are_not_drawn_and_the_page_says_so(tmp_path):
    page = few_steps(tmp_path / "some.html", captured=range(2, 6))
    assert data_of(page.path)["curves"]["step"] == [1, 2]
    assert "Steps captured in a CUDA graph are not drawn" in text_of(page.path)
    assert "The number of skipped steps, including replays, is 1." in text_of(page.path)
    assert "not shown" not in text_of(few_steps(tmp_path / "none.html").path)


def test_the_curves_are_those_of_the_steps(tmp_path):
    _, page = train(tmp_path / "run.html", bad=(5,), clip=0.05)
    curves = data_of(page.path)["curves"]
    assert curves["step"] == [*range(1, 13)]
    assert curves["scale"] == [2.0**8] * 6 + [2.0**7] * 6
    assert curves["before"][5] is curves["loss"][5] is None
    for place in set(range(12)) - {5}:
        assert curves["before"][place] > 0.05
        assert curves["after"][place] == pytest.approx(0.05, rel=1e-3)
        assert math.isfinite(curves["loss"][place])
    (mark,) = data_of(page.path)["skips"]
    assert mark["step"] == 6
    assert "nan in 6 gradients: 4.bias, 4.weight, 1.bias" in mark["parameters"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_run_trains_as_without_a_page(tmp_path, precision):
    bad = (3, 4, 5, 8)
    plain, _ = train(None, bad=bad, precision=precision)
    net, page = train(tmp_path / "run.html", bad=bad, precision=precision)
    assert page.history.skipped == 4
    for name, value in plain.state_dict().items():
        assert torch.equal(value, net.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"init_scale": 2.0**34, "steps": 40}, {"lower init_scale to ", "the loss scale was too high"}),
        ({"bad": range(3)}, set()),  # bad batches are not a reason to lower init_scale
        ({"factor": 0.0}, {"all gradients are zero in each of the 3 steps", "raise init_scale"}),
        ({"factor": 0.0, "precision": "bf16"}, {"all gradients are zero in each of the 3 steps"}),
        ({}, set()),
    ],
)
def test_what_is_said_of_scales_and_of_gradients(tmp_path, options, told):
    _, page = train(tmp_path / "run.html", **{"steps": 3, **options})
    parts = {"lower init_scale to ", "the loss scale was too high", "raise init_scale"}
    text = text_of(page.path)
    assert {part for part in parts | told if part in text} == told
    assert ('id="chart-norm"' in page.path.read_text()) is ("bad" not in options)
    if "init_scale" in options:
        first = page.history.skipped
        digits, power = f"{2 ** (34 - first)}", 34 - first
        assert f"steps 1 to {first}: lower init_scale to {digits} (2^{power}), because these" in text


def test_everything_is_given_back(tmp_path):
    net = make_net()
    scaler = amp_plugin.GradScaler("cpu")
    before = str(vars(scaler.core.log))
    with amp_plugin.report(scaler, net, tmp_path / "run.html"):
        assert str(vars(scaler.core.log)) != before
    assert str(vars(scaler.core.log)) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert {file.name for file in tmp_path.iterdir()} <= {"run.html", ".run.html.lock"}
    assert "no optimizer step yet" in text_of(tmp_path / "run.html")


def test_a_skip_that_raises_is_on_the_page(tmp_path):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = amp_plugin.GradScaler("cpu", enabled=False, on_nonfinite="raise")
    scaler.scale(net(torch.full((4, 8), torch.nan)).sum()).backward()
    with pytest.raises(FloatingPointError), amp_plugin.report(scaler, net, tmp_path / "run.html"):
        scaler.step(optimizer)
    text = text_of(tmp_path / "run.html")
    assert "ended by FloatingPointError: SGD: gradients are not finite" in text
    assert "1 of 1 steps: step 1" in text
    assert "nan in 4 gradients: 4.weight" in text


@pytest.mark.native
def test_dtypes_and_bytes(tmp_path):
    _, page = train(tmp_path / "run.html", steps=2, precision="bf16")
    text = text_of(page.path)
    assert re.search(r"4 Linear fp32 bf16 fp32 fp32 68 \d", text), text[:4000]


class Attends(nn.Module):
    """Multiply matrices outside of its submodules, and return fp32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return (x @ self.weight).float()


class Multiplies(torch.autograd.Function):
    """A product of the user's own, of which autograd knows nothing."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Doubles(nn.Linear):
    def forward(self, x):
        return Multiplies.apply(super().forward(x)).float()


@pytest.mark.native
@pytest.mark.parametrize(
    ("make", "computes"),
    [
        (lambda: nn.GRU(8, 8), "bf16"),  # its results are fp32
        (lambda: nn.LSTM(8, 8), "bf16"),
        (lambda: nn.RNN(8, 8), "bf16"),
        (lambda: nn.Conv1d(8, 8, 1), "bf16"),
        (lambda: nn.MultiheadAttention(8, 2, batch_first=True), "bf16"),
        (lambda: nn.LayerNorm(8), "fp32"),
        (Attends, "bf16"),
        (lambda: Doubles(8, 8), "bf16"),
    ],
)
def test_a_module_computes_in_the_dtype_of_its_products(make, computes):
    """One micro-batch per step is enough, for the whole model, too."""
    net, x = make(), torch.ones(8, 8, 8)
    survey = Survey([net])
    survey.open()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = net(x, x, x) if isinstance(net, nn.MultiheadAttention) else net(x)
    (made[0] if isinstance(made, tuple) else made).float().sum().backward()
    survey.close()
    (row,) = survey.trees([])
    assert row["computes"] == computes


def test_a_parent_computes_in_what_the_modules_within_it_compute_in():
    net = nn.Sequential(nn.GRU(8, 8), nn.Linear(8, 8))
    survey = Survey([net])
    survey.open()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = net[0](torch.ones(2, 2, 8))[0]
    net[1](hidden).sum().backward()
    survey.close()
    (row,) = survey.trees([])
    assert row["computes"] == "bf16 fp32"
    assert [part["computes"] for part in row["inside"]] == ["bf16", "fp32"]


@pytest.mark.parametrize("models", [1, 2])
def test_a_wrapper_has_no_row(models):
    net = make_net()
    compiled = torch.compile(nn.Sequential(torch.compile(net[0], backend="eager"), *net[1:]), backend="eager")
    survey = Survey([compiled] * models)
    tree = survey.trees([])[0]
    plain = Survey([nn.Sequential(*net)]).trees([])[0]
    assert tree["name"] == ("(model)" if models == 1 else "OptimizedModule[0]")
    assert {**tree, "name": ""} == {**plain, "name": ""}


def test_an_error_in_the_survey_is_one_warning(monkeypatch):
    monkeypatch.setattr("amp_plugin.run_page.dtypes.tree_leaves", lambda _: 1 / 0)
    survey = Survey([net := make_net()])
    survey.open()
    with pytest.warns(UserWarning, match="the survey of dtypes has ended: ZeroDivisionError") as warned:
        net(torch.ones(4, 8))
    net(torch.ones(4, 8))
    assert len(warned) == 1


@pytest.mark.parametrize(
    "part", ["history.History.add", "history.History.hear_loss", "headroom.Headroom.read", "report.render"]
)
def test_an_error_in_any_part_is_one_warning_and_ends_the_page_only(part, tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise AttributeError("a fault")

    def steps():
        monkeypatch.setattr(f"amp_plugin.run_page.{part}", failing)
        for _ in range(3):
            scaler.scale(net(torch.ones(4, 8)).float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    net, scaler = make_net(), amp_plugin.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    page = amp_plugin.report(scaler, net, tmp_path / "run.html")
    with pytest.warns(UserWarning, match="ended: AttributeError: a fault") as warned, page:
        steps()
    assert len(warned) == 1
    assert [scaler.last_step(optimizer).number, scaler.skipped_steps()] == [3, 0]


def test_without_the_extra_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ImportError, match="altair.*pip install altair jinja2"):
        amp_plugin.report(amp_plugin.GradScaler("cpu"), make_net(), tmp_path / "run.html")


def test_a_full_disk_ends_no_training(tmp_path, monkeypatch):
    net, scaler = make_net(), amp_plugin.GradScaler("cpu")
    page = amp_plugin.report(scaler, net, tmp_path / "run.html")
    with pytest.warns(UserWarning, match="No space.*training goes on"), page:
        monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("No space")))
    assert "running" in text_of(tmp_path / "run.html")


# -- headroom ------------------------------------------------------------------------------------


def test_bits_are_those_of_the_gradients_that_backward_made():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    room = Headroom([net])
    for param, value in zip(net.parameters(), (2.0**4, 0.0, 2.0**-3), strict=True):
        param.grad = torch.full_like(param, value)
    norm = torch.tensor(4.0)
    told = {"norm": norm, "used_norm": norm, "max_norm": 2.0, "found_inf": torch.zeros(())}
    room.read(1, StepResult(scale_before=torch.tensor(8.0), **told))
    room.note_overflow(2, ["1.bias"])
    bits = room.bits({"0": torch.float16, "1": torch.float16})
    assert bits[:, 0].tolist() == pytest.approx([16 - 4 - 3 - 1, 16 + 3 - 3 - 1], abs=1e-3)  # scale 8, clip 2
    assert bits[1, 1] == -1
    assert bits[0, 1].isnan()
    cells = room.cells({"0": torch.float16, "1": torch.float16})
    assert [row[0] for row in cells["zeros"]] == [0.0, 66.7]


def test_reads_stay_within_their_budget(monkeypatch):
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    clock = itertools.count()  # each reading of this clock adds one second
    monkeypatch.setattr(headroom.time, "perf_counter", lambda: float(next(clock)))
    room, result = Headroom([net]), StepResult(norm=torch.tensor(1.0))
    for _ in range(5000):
        if room.is_due():
            room.read(1, result)
    assert room.reads > 5
    assert room.seconds == pytest.approx(headroom.BUDGET * next(clock), abs=room.seconds / room.reads)


def test_long_runs_stay_small(tmp_path):
    """A page with 10 000 steps and 200 modules has at most 8 MB."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(200)))
    scaler = amp_plugin.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    page = amp_plugin.report(scaler, net, tmp_path / "run.html")
    page.__enter__()
    scaler.register(optimizer)
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    result = scaler.last_step(optimizer)
    (step,) = page.history._points
    page.history.steps = 10_000
    page.history._points[:] = [step._replace(step=i, loss=round(1 / (i + 1), 9)) for i in range(10_000)]
    for i in range(400):  # more reads than the columns can hold
        page._headroom.read(25 * i, result)
    page.__exit__(None, None, None)
    cells = data_of(page.path)["cells"]
    assert len(cells["modules"]) == 200
    assert len(cells["first"]) > 100
    assert len(data_of(page.path)["curves"]["step"]) == 10_000
    assert page.path.stat().st_size < 8_000_000


def test_curves_of_long_runs_keep_every_second_step_of_each_optimizer(monkeypatch):
    monkeypatch.setattr(history, "_MOST_STEPS", 4)
    told, optimizers = history.History(), [torch.optim.SGD([torch.zeros(1)], lr=1.0) for _ in range(2)]
    for number in range(1, 7):
        for place, optimizer in enumerate(optimizers):
            result = StepResult(norm=torch.tensor(1.0))
            result.note_turn(weakref.ref(optimizer), f"{place}: SGD", number, 0)
            told.add(result, None)
    curves = told.curves()
    assert (told.steps, told.per_point) == (12, 4)
    assert [*zip(curves["optimizer"], curves["step"], strict=True)] == [("0: SGD", 4), ("1: SGD", 4)]


# -- one complete page ----------------------------------------------------------------------------

ENDLESS = """
import sys, torch, amp_plugin
from pathlib import Path
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
scaler = amp_plugin.GradScaler("cpu", enabled=False)
with amp_plugin.report(scaler, net, sys.argv[1]) as page:
    print(page.path, flush=True)
    while True:
        scaler.scale(net(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        page.write()
"""


@pytest.mark.dist
def test_the_last_page_is_whole_and_two_runs_into_one_folder_do_not_mix(tmp_path):
    """One run is killed while it writes, after another run began in the same folder."""
    command = [sys.executable, "-c", ENDLESS, tmp_path / "run.html"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    path = Path(program.stdout.readline().strip())
    assert path == tmp_path / "run.html"
    with amp_plugin.report(amp_plugin.GradScaler("cpu"), make_net(), path) as page:
        assert page.path == tmp_path / "run-2.html"
    seen = set()
    deadline = time.monotonic() + 90
    while len(seen) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
        text = path.read_text()
        assert text.startswith("<!doctype html>")
        assert text.endswith("</html>")
        seen.add(data_of(path)["steps"] if 'id="data"' in text else 0)
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    assert len(seen) >= 4
    assert path.read_text().endswith("</html>")
    assert "Sequential" in text_of(page.path)
    assert "Sequential" not in text_of(path)
    with amp_plugin.report(amp_plugin.GradScaler("cpu"), make_net(), path) as page:
        assert page.path == path  # the killed run no longer reserves the name


def test_a_page_under_diagnose_leaves_that_of_the_run_alone(tmp_path):
    """Its steps belong to another run, so it would report no skipped steps."""
    model, scaler = torch.nn.Linear(2, 1), amp_plugin.GradScaler("cpu")
    with amp_plugin.report(scaler, model, tmp_path / "run.html") as page:
        assert page.path == tmp_path / "run.html"
    with amp_plugin.diagnose(), amp_plugin.report(scaler, model, tmp_path / "run.html") as page:
        assert page.path == tmp_path / "run-diagnose.html"
    assert {file.name for file in tmp_path.glob("*.html")} == {"run.html", "run-diagnose.html"}


@pytest.mark.parametrize(("dtype", "largest", "said"), [
    (torch.float16, 0.0, False), (torch.bfloat16, 1.0, False), (torch.bfloat16, 1e35, True), (torch.float16, 1.0, True), (torch.float32, 1.0, False),
])  # fmt: skip
def test_headroom_is_spoken_of_where_an_overflow_may_be_near(dtype, largest, said):
    headroom = Headroom([torch.nn.Linear(2, 1)])
    headroom._add(1, torch.tensor([largest]), torch.zeros(1))
    assert bool(headroom.nearest({"": dtype})) is said


@pytest.mark.parametrize(("dtype", "largest", "share"), [
    (torch.float16, 65500.0, "99 % of the largest fp16 number (65,504)"), (torch.float16, 655.04, "1 % of the largest fp16"),
    (torch.float16, 1.0, "less than 0.01 % of"), (torch.bfloat16, 1e37, "3 % of the largest bf16 number (3.4e+38)"),
])  # fmt: skip
def test_headroom_is_told_as_a_share_of_the_largest_number(dtype, largest, share):
    headroom = Headroom([torch.nn.Sequential(torch.nn.Linear(2, 1))])
    headroom._add(7, torch.tensor([largest]), torch.zeros(1))
    (text,) = headroom.nearest({"0": dtype})
    assert text.startswith(f"module 0: at step 7, the largest gradient in its backward pass reached {share}")


def test_what_to_change_names_the_steps_of_each_line(tmp_path):
    _, page = train(tmp_path / "run.html", init_scale=2.0**34, steps=80, bad={70: 8.0, 75: 1e30})
    lost = page.history.skipped - 2
    text = text_of(page.path)
    assert f"steps 1 to {lost}: lower init_scale to {2 ** (34 - lost)} (2^{34 - lost}), because" in text
    assert "step 71: nothing, because a few skipped steps keep the loss scale as high" in text
    assert "step 76: look below at the modules that overflow" in text
    assert "e+" not in text.partition("This run")[0]
