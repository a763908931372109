"""Every comparison runs, at the smallest sizes."""

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from amp_plugin.casting.installed_kernels import KERNELS
from benchmarks import __main__ as command
from benchmarks import cuda, gradient_path, models
from benchmarks.catalogue import keys, section
from benchmarks.clocks import wall_time
from benchmarks.gradient_path import PROMISED_ON_CUDA
from benchmarks.harness import OURS, Comparison, Gate
from benchmarks.report import RESULTS, Report
from benchmarks.setting import Section, Setting, threads
from tests.host_device import host_device

TINY = Setting(tiny=True)
SECTIONS = {key: section(key) for key in keys("cpu")}

pytestmark = pytest.mark.native


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Install our autocast kernels, as the benchmark command does."""
    KERNELS.install()


LONG = ("compiled", "first_use", "host")  # sections that use torch.compile


@pytest.mark.filterwarnings("ignore:.*")  # warnings of the frameworks, which benchmarks pass on
@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.whole_run] * (key in LONG)) for key in SECTIONS]
)
def test_each_comparison_runs(key):
    section = SECTIONS[key]
    outcomes = command.run(section, TINY).outcomes
    if key == "host" and (reason := host_device.cannot()):
        pytest.skip(reason)
    assert outcomes
    for outcome in outcomes:
        assert all(math.isfinite(spread.median) and spread.median >= 0 for spread in outcome.times.values())
    named = [(outcome.table, outcome.name) for outcome in outcomes]
    assert len(set(named)) == len(named)
    for plot in section.plots:
        assert any(plot.table in outcome.table and outcome.x is not None for outcome in outcomes)


def read(file):
    """Return the report that a file contains."""
    return Report.from_json(file.read_text())


def test_tables_have_the_same_variants_in_each_row_and_the_limits_of_the_pages():
    """The limits in the code equal those in the documentation.

    At these small sizes, two sections have fewer promised limits.
    """
    (kept,) = [report for report in map(read, RESULTS.glob("*.json")) if report.device == "cpu"]
    tables = {}
    for key, of_key in SECTIONS.items():
        promised, shown, names = Counter(), Counter(), set()
        for comparison in of_key.comparisons(TINY):
            tables.setdefault((key, comparison.table), set()).add(tuple(comparison.samples))
            names.add(comparison.name)
            promised.update((gate.measure, gate.against, gate.limit) for gate in comparison.gates)
        for outcome in (row for row in kept.sections[key].outcomes if row.name in names):
            shown.update((gate.measure, gate.against, gate.limit) for gate in outcome.verdicts)
        assert shown <= promised or key in {"host", "first_use"}, key
    assert {place: labels for place, labels in tables.items() if len(labels) > 1} == {}


def test_a_section_runs_on_its_own_number_of_threads():
    before = torch.get_num_threads()
    for count in (3, 0):
        with threads(count):
            assert torch.get_num_threads() == (count or before)
    assert torch.get_num_threads() == before


class Promise(Section):
    """One comparison with a gate and one without."""

    key = "promise"

    def __init__(self, ours):
        self.ours = ours

    def comparisons(self, setting):
        for name, gates in (("kept", (Gate(limit=1.0),)), ("free", ())):
            samples = {OURS: lambda: self.ours, "torch": lambda: 1.0}
            yield Comparison(name=name, table="T", samples=samples, rounds=1, gates=gates)


@pytest.mark.parametrize(("ours", "code"), [(1.05, 0), (1.2, 1)])
def test_the_check_fails_when_a_promise_is_missed_and_writes_nothing(monkeypatch, capsys, ours, code):
    monkeypatch.setattr(command, "keys", lambda device: ["promise"])
    monkeypatch.setattr(command, "section", lambda key: Promise(ours))
    monkeypatch.setattr(command, "prepare", lambda device: None)
    monkeypatch.setattr(command, "write", lambda report: pytest.fail("the check wrote the page"))
    before = command.kept_report("cpu")
    assert command.main(["--check"]) == code
    assert command.kept_report("cpu") == before
    said = capsys.readouterr().out
    assert ("missed: T: kept: 1.20x, at most 1.00x" in said) == bool(code)
    assert "free" not in said


def test_figures_of_another_machine_are_judged_and_drawn(monkeypatch, capsys, tmp_path, report):
    """Figures from a GPU arrive as a file. The pages are written on a machine without a GPU."""
    file = tmp_path / "figures.json"
    file.write_text(replace(report, device="cuda").to_json())
    assert command.main(["cuda", "--promises", "--figures", str(file)]) == 1
    said = capsys.readouterr().out
    assert "kept         Models: fast: 0.50x, at most 1.00x" in said
    assert "MISSED       Models: slow: 2.00x, at most 1.00x" in said
    drawn = []
    monkeypatch.setattr(command, "write", drawn.append)
    assert command.main(["cuda", "--draw", "--figures", str(file)]) == 0
    assert drawn[0].device == "cuda"
    with pytest.raises(SystemExit):
        command.main(["--check", "--figures", str(file)])
    assert "--figures goes with --draw or --promises" in capsys.readouterr().err


def test_on_a_gpu_no_set_may_be_slower_than_torch(monkeypatch):
    on_cuda = SimpleNamespace(device="cuda", sized=TINY.sized, rounds=TINY.rounds, memory_clock=wall_time)
    monkeypatch.setattr(
        gradient_path,
        "Gradients",
        lambda shapes, device: SimpleNamespace(clip_ours=None, clip_theirs=None, scaled_again=None),
    )
    gates = {comparison.name: comparison.gates for comparison in section("clipping").comparisons(on_cuda)}
    assert {"GPT-2 124M, in place", "GPT-2 774M, in place", "GPT-2 1.5B, in place"} <= set(gates)
    assert all(gate.limit >= 1.0 for (gate,) in gates.values())


@pytest.mark.parametrize(
    ("shapes", "count", "numel"),
    [
        (models.resnet50_shapes, 161, 25_557_032),
        (gradient_path.SETS["GPT-2 1.5B"], 580, 1_557_611_200),
    ],
)
def test_the_sets_have_the_sizes_of_the_models(shapes, count, numel):
    assert len(shapes()) == count
    assert sum(math.prod(shape) for shape in shapes()) == numel


def test_the_resnet_has_the_parameters_of_the_papers():
    with torch.device("meta"):
        model = models.ResNet50(width=64, pixels=224, batch=1)
    shapes = [tuple(param.shape) for param in model.parameters()]
    assert sorted(shapes) == sorted(models.resnet50_shapes())


def test_the_check_of_the_kernels_sees_a_wrong_one(monkeypatch):
    grads = [torch.randn(300), torch.randn(7, 5)]
    cuda.check(grads)
    wrong = torch.tensor(1.0), torch.tensor(0.0), torch.zeros(2, dtype=torch.uint8)
    monkeypatch.setattr(cuda.OP, "norm_check", lambda grads, scale: wrong)
    with pytest.raises(ArithmeticError, match="the norm is 1.0, exactly"):
        cuda.check(grads)


def test_bandwidth_counts_what_each_op_reads_and_writes(monkeypatch):
    monkeypatch.setattr(Setting, "device_clock", property(lambda self: lambda call: lambda: call() or 2.0))
    monkeypatch.setattr(cuda, "bandwidth", lambda sample, moved: lambda: moved)
    numel = 3 * 4 + 5 + 1
    for comparison in cuda.Bandwidth().comparisons(TINY):
        times = {"norm_check": 1, "AdamW": 8, "SGD": 6}.get(comparison.name, 2)
        of_torch = [times * 4 * numel] if comparison.name in {"AdamW", "SGD"} else []
        moved = [sample() for sample in comparison.samples.values()]
        assert moved == [times * 4 * numel, 2 * 4 * numel, *of_torch]
    monkeypatch.undo()
    assert cuda.bandwidth(lambda: 100.0, 3e8)() == 3000.0  # 300 MB in 100 us
    for outcome in command.run(cuda.Bandwidth(), TINY).outcomes:
        assert [verdict.measure for verdict in outcome.verdicts] == ["share of theirs"]


def test_launches_of_each_set_are_compared_with_torchs(monkeypatch):
    monkeypatch.setattr(cuda, "launches", lambda call: call() or 3)
    monkeypatch.setattr(cuda, "waits", lambda call: call() or 0)
    outcomes = command.run(cuda.Launches(), TINY).outcomes
    assert len(outcomes) == 12
    assert {outcome.unit: outcome.times[OURS].median for outcome in outcomes} == {"launches": 3, "waits": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_without_a_gpu_the_command_says_what_it_needs():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "cuda"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("the benchmarks for CUDA need a GPU that runs the kernels: ")
    assert "install" in last or "driver" in last


def test_what_is_promised_on_a_gpu_is_measured():
    names = {
        comparison.name for key in ("clipping", "steps") for comparison in SECTIONS[key].comparisons(TINY)
    }
    assert set(PROMISED_ON_CUDA) <= names
