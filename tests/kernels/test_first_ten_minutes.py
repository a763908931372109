"""The checks of the first ten minutes on a GPU, which are impossible without one.

``make test-gpu`` runs each test here in a process of its own, because a kernel that fails ends all work of
its process. On the host device they run with fewer repetitions, and each test finds a fault that is planted
for it.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import benchmarks.cuda
from amp_plugin.kernels import ops  # noqa: F401 -- defines them
from amp_plugin.kernels.cuda import LAYOUT, RULES, SOURCES
from amp_plugin.kernels.cuda.register import cuda_core
from benchmarks.setting import Setting
from tests.host_device import host_device
from tests.kernels import test_cuda_steps as steps
from tests.warm_processes import ROOT

pytestmark = pytest.mark.gpu
whole_run = pytest.mark.whole_run
OP = torch.ops.amp_plugin
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 15, 17, 1023, 1024, 1025, 70_001)
# tests.on_gpu sets this if the step runs alone
ALONE = host_device.LOADED or "ALONE_ON_THE_GPU" in os.environ
MOST = 30_000.0  # GB/s; faster than any memory, so a higher figure means that the work was not done


def often(on_a_gpu: int, on_the_host: int) -> int:
    """Return how many repetitions to make on this device."""
    return on_the_host if host_device.LOADED else on_a_gpu


@pytest.fixture(autouse=True)
def all_kernels():
    assert cuda_core(0).loaded, cuda_core(0).reason


def number(value: float) -> Tensor:
    """Return a float32 number on the device."""
    return torch.tensor(value, device="cuda")


def some(seed: int, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return tensors on the host, which depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def moved(host: list[Tensor]) -> list[Tensor]:
    """Return copies on the device."""
    return [tensor.to("cuda") for tensor in host]


def test_ops():
    """Every op agrees with the CPU's, and steps agree with torch's fused ones.

    It also runs under compute-sanitizer.
    """
    for dtype in DTYPES:
        if host_device.LOADED:  # there the order of threads can be chosen; a GPU chooses it itself
            torch.ops.host_device.descending(dtype is torch.bfloat16)
        for p in (2.0, 1.0, 3.0, 0.0, float("inf"), float("-inf")):
            for bad in (None, float("nan"), float("inf")):
                measured_alike(dtype, p, bad)
    steps_alike()
    scalars_alike()


def measured_alike(dtype: torch.dtype, p: float, bad: float | None) -> None:
    """Measure, unscale and multiply gradients, one of which has a bad element."""
    host = some(0, dtype=dtype)
    if bad is not None:
        host[5][-1] = bad
    ours = moved(host)
    what = f"{dtype}, p = {p}, {bad} in tensor 5"
    for op in (OP.norm_check, OP.unscale_):
        got, right = op(ours, number(0.3), p), op(host, torch.tensor(0.3), p)
        flags, wanted = got[2].tolist(), right[2].tolist()
        assert flags == wanted, f"{op}: flags {flags} for {wanted}, {what}"
        assert got[1].item() == right[1].item(), f"{op}: found_inf {got[1].item()}, {what}"
        close(got[0], right[0], f"{op}: norm, {what}", rtol=1e-6)
    found = OP.multiply_(ours, number(1.7)).item()
    assert found == OP.multiply_(host, torch.tensor(1.7)).item(), f"multiply_: found_inf {found}, {what}"
    for mine, right in zip(ours, host, strict=True):
        close(mine, right, f"unscale_ and multiply_, {what}", rtol=0.0)


def close(mine: Tensor, right: Tensor, what: str, *, rtol: float, atol: float = 0.0) -> None:
    """Assert that a tensor on the device is close to one on the host."""
    torch.testing.assert_close(
        mine.cpu(), right.cpu(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def steps_alike() -> None:
    """Take steps of Adam and SGD on both devices and with torch's own step.

    Split weights in halves and join them.
    """
    device = torch.device("cuda", 0)
    for amsgrad, decoupled in itertools.product((False, True), repeat=2):
        steps.test_adam_stays_close_to_torchs_fused_kernel(device, amsgrad, decoupled)
    for how, grad, aligned in itertools.product(steps.STORED, DTYPES, (True, False)):
        steps.test_adam_is_the_cpus_bit_for_bit(device, how, grad, aligned)
        steps.test_sgd_is_the_cpus_bit_for_bit(device, how, {}, aligned)
    steps.test_pairs_are_split_and_joined_bit_for_bit(device, True)


def scalars_alike() -> None:
    """Update a scale, and compute a clip factor."""
    scale = number(4.0)
    tracker, tolerance = (torch.ones(1, dtype=torch.int32, device="cuda") for _ in range(2))
    OP.update_scale_(scale, tracker, tolerance, number(1.0), 2.0, 0.5, 3, 1.0, 64.0, 1, 0)
    assert (scale.item(), tracker.item()) == (2.0, 0), "update_scale_ is wrong"
    close(OP.clip_factor(number(4.0), 1.0, number(8.0)), torch.tensor(32.0), "clip_factor", rtol=1e-6)


def test_streams():
    """Four streams launch while another one keeps the card busy.

    Norms keep their bits, and a nan is found.
    """
    groups = [moved(some(seed, (1, 977, 4097, 30_011, 300_007))) for seed in range(4)]
    wanted = [OP.norm_check(group, number(1.0))[0].item() for group in groups]
    bad = [group[:] for group in groups]
    for seed, group in enumerate(bad):
        group[seed] = group[seed].clone()
        group[seed][-1] = float("nan")
    one, lanes, hog = number(1.0), [torch.cuda.Stream() for _ in range(4)], torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(often(500, 1)):
        results = []
        with torch.cuda.stream(hog):
            del_me = torch.full((often(2**26, 2**12),), 1.0, device="cuda").mul_(2)
        for _ in range(50):
            for stream, group, other in zip(lanes, groups, bad, strict=True):
                with torch.cuda.stream(stream):
                    results.append((OP.norm_check(group, one)[0], OP.norm_check(other, one)[2]))
        torch.cuda.synchronize()
        del del_me
        for i, (norm, flags) in enumerate(results):
            seed = i % 4
            assert norm.item() == wanted[seed], (
                f"stream {seed}: a norm of {norm.item()}, {wanted[seed]} before"
            )
            seen = flags.tolist()
            assert seen == [2 * (k == seed) for k in range(5)], f"a nan in tensor {seed}: flags {seen}"


def test_addresses():
    """Tensors that move at each step are measured behind a stream that sleeps.

    No upload overtakes a launch.
    """
    rounds, sides = often(2000, 60), [torch.cuda.current_stream(), torch.cuda.Stream()]
    one, host = number(1.0), some(5, tuple(range(1, 121)))
    exact = [part.double().norm().item() for part in host]
    torch.cuda.synchronize()
    for step in range(rounds):
        with torch.cuda.stream(sides[step % 2]):
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            order = [(step * 7 + k) % len(host) for k in range(20 + step % 100)]
            norms = [
                (OP.norm_check([host[i].to("cuda", non_blocking=True) for i in part], one)[0], part)
                for part in (order[::2], order[1::2])
            ]
            for norm, part in norms:  # read on the stream that measured it
                right = sum(exact[i] ** 2 for i in part) ** 0.5
                assert abs(norm.item() / right - 1) < 1e-6, (
                    f"step {step}: the norm {norm.item()}, not {right}"
                )


def test_graphs():
    """A graph of 300 tensors is replayed with changing gradients, dropped while it runs, and captured again
    and again.
    """
    grads, one = moved(some(6, tuple(1 + 37 * i for i in range(300)))), number(0.5)
    OP.norm_check(grads, one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm, _, flags = OP.norm_check(grads, one)
    replays = often(1000, 20)
    for step in range(replays):
        torch._foreach_mul_(grads, 1.0 + 0.01 * (step % 3 - 1))
        bad = step * 7 % 300
        grads[bad][0] = float("nan") if step % 5 == 0 else 1.0
        eager = OP.norm_check(grads, one)
        graph.replay()
        same = torch.equal(norm.nan_to_num(7.0), eager[0].nan_to_num(7.0))
        assert same, f"replay {step}: norm {norm.item()} for {eager[0].item()}"
        seen = flags.nonzero().flatten().tolist()
        assert seen == [bad] * (step % 5 == 0), f"replay {step}: a nan in tensor {bad}, flags of {seen}"
        grads[bad][0] = 1.0
    with host_device.late_work() if host_device.LOADED else contextlib.nullcontext():
        dropped_in_flight(grads, one)
    recaptured(grads, one)


def dropped_in_flight(grads: list[Tensor], one: Tensor) -> None:
    """A graph that is dropped while it runs keeps its table. The next graph gets another table."""
    wanted, others = OP.norm_check(grads, one)[0].item(), [grad * 2 for grad in grads]
    wanted_of_others, side = OP.norm_check(others, one)[0].item(), torch.cuda.Stream()
    for _ in range(often(50, 5)):
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            norm = OP.norm_check(grads, one)[0]
        kept = torch.zeros((), device="cuda")
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        first.replay()
        kept.copy_(norm)
        first.reset()
        with torch.cuda.stream(side):  # not with torch.cuda.graph, which waits for the device
            second.capture_begin()
            again = OP.norm_check(others, one)[0]
            second.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        second.replay()
        assert kept.item() == wanted, f"a graph dropped in flight has the norm {kept.item()}, not {wanted}"
        assert again.item() == wanted_of_others, f"the graph captured behind it has the norm {again.item()}"


def recaptured(grads: list[Tensor], one: Tensor) -> None:
    """Capture and drop graphs. After the first few, the card's free memory must stay the same.

    Free memory depends on all programs, so it is measured only if this process is alone. The driver may take
    memory once, so the smaller of two losses counts. A leak would be in both.
    """

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            OP.norm_check(grads, one)

    live = [torch.cuda.CUDAGraph() for _ in range(2)]
    norms = []
    for graph, part in zip(live, (grads, grads[150:]), strict=True):
        with torch.cuda.graph(graph):
            norms.append(OP.norm_check(part, one)[0])
    wanted = [OP.norm_check(part, one)[0].item() for part in (grads, grads[150:])]
    for _ in range(10):
        capture()
    count, free = often(600, 400), []
    for captures in (0, count, count):
        for _ in range(captures):
            capture()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    lost = min(free[0] - free[1], free[1] - free[2])
    if ALONE:
        assert lost <= 2 * 2**20, f"{count} recaptures have taken {lost / 2**20:.1f} MiB of the card"
    else:
        print("other programs may run beside, so the card's free memory was not compared")
    for graph, norm, right in zip(live, norms, wanted, strict=True):
        graph.replay()
        assert norm.item() == right, (
            f"a living graph's norm is {norm.item()} after others have gone, not {right}"
        )


def test_bandwidth():
    """Measure all ops at 100 MB and at 1 GB with the shipped settings.

    Print each op's bandwidth relative to copy_.
    """
    for name in ("1 x 100 MB", "1 x 1 GB")[: often(2, 1)]:
        for op, rates in believable(name).items():
            print(f"{name}, {op}: " + ", ".join(f"{key} {rate:.3g}" for key, rate in rates.items()))


def believable(name: str) -> dict[str, dict[str, float]]:
    """Return bandwidths relative to copy_ over a set of gradients.

    Refuse figures that no memory can reach.
    """
    found = benchmarks.cuda.shares(Setting(device="cuda", tiny=host_device.LOADED), name)
    for op, rates in found.items():
        rate = rates["GB/s"]
        assert 0 < rate < MOST, f"{name}, {op}: {rate:.3g} GB/s is no memory's"
        for key, share in rates.items():
            assert 0 < share < math.inf, f"{name}, {op}: {key} {share:.3g}"
    return found


@whole_run
def test_sweep():
    """Measure other numbers of blocks and of loads in flight, each in its own process."""
    builds: dict[str, str] = {}
    for blocks, in_flight in itertools.product((2, 4, 5, 8)[often(0, 1) : often(4, 2)], (4, 8)):
        tuned = "from amp_plugin.kernels import cuda as c; "
        tuned += f"tuning = c.Tuning(blocks={blocks}, in_flight={in_flight}); "
        tuned += "c.TUNINGS.update({kernel.name: tuning for kernel in c.all_kernels()})"
        code = f"{tuned}\nfrom tests.kernels.test_first_ten_minutes import swept\nswept()"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        label = f"{blocks} blocks, {in_flight} in flight"
        assert done.returncode == 0, f"{label}: {done.stderr}"
        build, rates = json.loads(done.stdout.splitlines()[-1])
        other = builds.setdefault(build, label)
        assert other == label, f"{label}: the same machine code as {other}, so nothing was swept"
        print(f"{label}: " + ", ".join(f"{op} {found['share']:.2f}" for op, found in rates.items()))


def swept() -> None:
    """Print a hash of the machine code, and the bandwidths relative to copy_ at 100 MB, as JSON."""
    host_device.install_if_loaded()
    core = cuda_core(0)
    from amp_plugin.kernels.cuda import compile  # noqa: A004 -- needs cuda-core

    assert core.loaded, core.reason
    code = b"".join(compile.all_cubins(core.architecture).values())
    print(json.dumps([f"{hashlib.sha256(code).hexdigest()} {core.identity}", believable("1 x 100 MB")]))


# -- planted faults, on the host device ----------------------------------------------------------

FLAG = ("norm_check", "measure.cuh", "&table.marks[tensor], found", "&table.marks[tensor / 2], found")
PIECES = ("norm_check", "measure.cuh", "norm.join(mine.total, found.total)", "found.total")
MULTIPLIED = "grad = each([&](float x) { return x * divisor.inverse; }, grad)"
QUOTIENT = ("step", "step_rows.cuh", "grad = divisor.divide(grad)", MULTIPLIED)


def with_fault(folder, kernel, file, right, wrong):
    """Return the environment that makes the host device use a kernel with a fault."""
    copy = folder / "cuda" / "cuda"
    shutil.copytree(SOURCES, copy)
    (copy.parent / "csrc").mkdir()
    shutil.copy2(LAYOUT, copy.parent / "csrc")
    shutil.copytree(RULES, copy.parent / "csrc" / "rules")
    text = (copy / file).read_text()
    assert text.count(right) == 1
    (copy / file).write_text(text.replace(right, wrong))
    return f"{kernel} {copy}"


@pytest.mark.skipif(not host_device.LOADED, reason="faults are planted in the device made of host memory")
@pytest.mark.parametrize(
    ("test", "fault", "finding"),
    [
        ("ops", FLAG, "flags [0, 0, 2, 0, 0, 0, 0, 0] for [0, 0, 0, 0, 0, 2, 0, 0]"),
        ("graphs", "tables are given back early", "a graph dropped in flight has the norm"),
        pytest.param("ops", QUOTIENT, "gradients are not those of torch's fused kernel", marks=whole_run),
        pytest.param("ops", "step is missing", "the CUDA driver cannot load step adam", marks=whole_run),
        pytest.param("streams", FLAG, "a nan in tensor 1: flags [2, 0, 0, 0, 0]", marks=whole_run),
        pytest.param("addresses", PIECES, "AssertionError: step ", marks=whole_run),
        pytest.param("bandwidth", "the clock stands still", "GB/s is no memory's", marks=whole_run),
        pytest.param("graphs", "graphs leak", "400 recaptures have taken", marks=whole_run),
        pytest.param(
            "sweep", "all builds are alike", "the same machine code as 4 blocks, 4 in flight", marks=whole_run
        ),
    ],
)
def test_a_planted_fault_is_found(tmp_path, test, fault, finding):
    planted = {"HOST_DEVICE_FAULT": fault}
    if isinstance(fault, tuple):
        planted = {"HOST_DEVICE_FAULTY": with_fault(tmp_path, *fault)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.host_device.plugin", "--noconftest"]
    command += ["-p", "no:cacheprovider", f"{__file__}::test_{test}"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **planted}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert finding in done.stdout, done.stdout
