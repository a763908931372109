"""The machine code for sm_90: instructions and bytes per element, memory accesses, registers.

How each is counted:

instructions per element
    The shortest path through one iteration of the loop over whole groups, for the widths of loads and stores
    of the storage format, divided by the number of elements. Instructions that a predicate turns off count.
    Paths that call a routine do not: they handle numbers outside float32's normal range.
bytes per element
    The bytes that the loads and stores of that iteration move, divided by the number of elements.
trips to memory
    How often a thread stops for a load before its last one is issued, plus one: see ``Round.trips``.
registers, stack
    The output of ``cuobjdump -res-usage``. Stack bytes are registers that were spilled anywhere in the kernel.
"""

import functools
import itertools
import shutil
from collections import Counter

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core")

from amp_plugin.kernels.cuda import Kernel, all_kernels, rule_names, tuning_of
from amp_plugin.kernels.cuda.compile import cached_cubin
from tests.kernels.machine_code import MachineCode, Round, program, usage_of

REGISTERS = 65536  # per multiprocessor
THREADS = 256
GROUP = 4  # elements that a thread steps together
STATES = {
    "fp32": [16],
    "bf16": [8],
    "8 bits": [4, 4],
}  # bytes per access for a group of one state; for 8 bits: the codes, and their unit
GRADIENTS = {"fp32": 16, "16 bits": 8}
WEIGHTS = {"fp32": [16], "pair": [8, 8]}
# largest number of instructions per element
MOST = {("bf16", "pair"): 80, ("8 bits", "fp32"): 112, ("8 bits", "pair"): 117}


@pytest.fixture(scope="module", autouse=True)
def tools():
    for name in ("cuobjdump", "nvdisasm"):
        try:
            assert shutil.which(program(name))
        except Exception:  # noqa: BLE001 - a wheel that is not installed, or has no such file
            pytest.skip(f"needs nvidia-cuda-{name}")


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    """Return a function that gives the file of a kernel's machine code."""
    folder = tmp_path_factory.mktemp("cubins")

    @functools.cache
    def file_of(kernel):
        file = folder / f"{kernel.title}.cubin"
        file.write_bytes(cached_cubin(kernel, "sm_90"))
        return file

    return file_of


@pytest.mark.parametrize("kernel", list(all_kernels()), ids=lambda kernel: kernel.title)
def test_registers_and_spills(cubin, kernel, capsys):
    usage = usage_of(cubin(kernel))
    with capsys.disabled():
        print(f"\n{kernel.title:20s} {usage.registers:3d} registers, {usage.stack:3d} bytes of stack", end="")
    assert usage.registers * THREADS * tuning_of(kernel).blocks <= REGISTERS


def forms(states):
    """Yield the name of each storage format of a step, and the widths that it loads and stores."""
    for (state, widths), (gradient, width), (weight, parts), divided in itertools.product(
        STATES.items(), GRADIENTS.items(), WEIGHTS.items(), (False, True)
    ):
        moved = Counter(parts + widths * states)
        yield (state, gradient, weight, divided), moved + Counter([width]), moved + Counter([width] * divided)


def rounds_of(cubin, kernel) -> list[Round]:
    return [found for loop in MachineCode(cubin(kernel), kernel.name).loops for found in loop.rounds()]


def test_a_step_of_adam(cubin, capsys):
    rounds = rounds_of(cubin, Kernel(name="step", rule="adam"))
    for form, loads, stores in forms(states=2):
        found = min(
            (one for one in rounds if (loads, stores) in one.moves()), key=lambda one: len(one.instructions)
        )
        state, gradient, weight, divided = form
        count = len(found.instructions) / GROUP
        moved = sum(width * n for moves in (loads, stores) for width, n in moves.items()) / GROUP
        if state == "8 bits":
            moved -= 2 * 2 * 4 / GROUP * 31 / 32  # the 32 threads of a warp load the same unit
            # The next group is prefetched from each tensor. Its units are next to its codes.
            prefetches = sum(one.opcode.startswith("CCTL.E.PF2") for one in found.instructions)
            assert prefetches >= sum(loads.values()) - 2
        with capsys.disabled():
            print(
                f"\n{state:6s} states, {gradient:7s} gradients, {weight:4s} {'divided' if divided else '':7s}: "
                f"{count:5.1f} instructions, {moved:4.1f} bytes, {found.trips} trip",
                end="",
            )
        assert found.trips == 1
        assert found.spills == 0
        assert count <= MOST.get((state, weight), 90)


@pytest.mark.parametrize("rule", rule_names())
def test_a_step_loads_all_before_it_uses_any(cubin, rule):
    """This applies to groups, which use loads of 8 bytes or more.

    Elements at a tensor's ends are moved one by one.
    """
    rounds = rounds_of(cubin, Kernel(name="step", rule=rule))
    groups = [one for one in rounds if any(load.width >= 8 and load.is_load for load in one.instructions)]
    assert groups
    assert {one.trips for one in groups} == {1}


@pytest.mark.parametrize("name", ["unscale", "multiply"])
def test_two_elements_of_16_bits_are_rounded_by_one_instruction(cubin, name, capsys):
    kernel = Kernel(name=name, norm="Squares" if name == "unscale" else "")
    halves = [
        one
        for one in rounds_of(cubin, kernel)
        if sum(found.opcode.startswith("F2FP") for found in one.instructions) == 16
    ]
    assert len(halves) == 2  # fp16 and bf16
    for one in halves:
        count = len(one.instructions) / 32
        with capsys.disabled():
            print(f"\n{name}: {count:.1f} instructions of an element of 16 bits, {one.trips} trip", end="")
        assert one.trips == 1
        assert count <= 7


@pytest.mark.parametrize(("name", "most"), [("norm_check", 3.5), ("unscale", 7.0), ("multiply", 5.0)])
def test_loops_over_gradients(cubin, name, most, capsys):
    """Float32 has the fastest loop of a kernel, with 16 elements per iteration.

    No loop waits for memory twice.
    """
    rounds = rounds_of(cubin, Kernel(name=name, norm="" if name == "multiply" else "Squares"))
    loops = [one for one in rounds if any(loads == {16: 4} for loads, _ in one.moves())]
    assert len(loops) >= 6  # six dtypes
    assert {one.trips for one in loops} == {1}
    count = min(len(one.instructions) for one in loops) / 16
    with capsys.disabled():
        print(f"\n{name}: {count:.1f} instructions of an element", end="")
    assert count <= most
