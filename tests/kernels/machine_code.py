"""The disassembled machine code of a kernel: its loops, and the instructions of one iteration."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import distribution
from pathlib import Path


def program(name: str) -> Path:
    """Return the path of ``cuobjdump`` or ``nvdisasm``, which NVIDIA's wheels contain."""
    files = distribution(f"nvidia-cuda-{name}").files or []
    return Path(str(next(file for file in files if file.name == name).locate()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The resources of one thread of a kernel: registers, and bytes of stack for spilled registers."""

    registers: int
    stack: int


def usage_of(cubin: Path) -> Usage:
    """Ask ``cuobjdump`` how many registers and how many bytes of stack a kernel uses."""
    told = _run(program("cuobjdump"), "-res-usage", cubin)
    return Usage(
        registers=int(re.search(r"REG:(\d+)", told)[1]), stack=int(re.search(r"STACK:(\d+)", told)[1])
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One instruction. Its first operand is the one it writes, unless it is a store or a branch."""

    address: int
    predicate: str  # the predicate, or "" if it is always executed
    opcode: str
    operands: str
    target: str = ""  # the label that a branch jumps to

    @property
    def is_load(self) -> bool:
        return self.opcode.startswith("LDG.")

    @property
    def is_store(self) -> bool:
        return self.opcode.startswith("STG.")

    @property
    def width(self) -> int:
        """Return the bytes that a load or store moves for one thread."""
        parts = self.opcode.split(".")
        return next((bytes_ for name, bytes_ in _WIDTHS.items() if name in parts), 4)

    def reads_any(self, registers: Iterable[str]) -> bool:
        read = self.operands if self.is_store else self.operands.partition(",")[2]
        wide = 4 if ".128" in self.opcode and self.is_store else 2
        names = {
            f"R{int(number) + i}"
            for number in re.findall(r"\bR(\d+)", read)
            for i in range(wide if self.is_store or ".64" in self.opcode or self.opcode[0] == "D" else 1)
        }
        return not names.isdisjoint(registers)

    @property
    def loaded(self) -> set[str]:
        """Return the registers that a load fills."""
        first = int(re.match(r"R(\d+)", self.operands)[1])
        return {f"R{first + i}" for i in range(max(1, self.width // 4))}


_MOST_PREDICATES = 6
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")


@dataclass
class Block:
    """A basic block: instructions that are executed one after another."""

    instructions: list[Instruction] = field(default_factory=list)
    following: list[int] = field(default_factory=list)  # the numbers of the blocks that can follow

    @property
    def is_rare(self) -> bool:
        """Return whether it calls a routine, which handles divisions and roots of numbers outside the fast
        path's range.
        """
        return any(one.opcode.startswith("CALL") for one in self.instructions)


@dataclass(frozen=True, slots=True)
class Round:
    """One iteration of a loop along one of its paths: the instructions that a thread executes."""

    instructions: tuple[Instruction, ...]

    def moves(self) -> list[tuple[Counter[int], Counter[int]]]:
        """Return how many loads and stores of each width are possible, one entry per choice of predicates.

        A load whose predicate is false still takes time as an instruction, but moves nothing.
        """
        named: list[tuple[Instruction, str, bool]] = []  # with the predicate's value at that point
        versions: Counter[str] = Counter()
        for one in self.instructions:
            if one.is_load or one.is_store:
                name = one.predicate.lstrip("@!")
                named.append((one, f"{name} {versions[name]}" if name else "", "!" not in one.predicate))
            elif written := re.match(r"U?P\d", one.operands):
                versions[written[0]] += 1
                versions.update(re.findall(r"^\S+, (U?P\d)", one.operands))
        predicates = sorted({predicate for _, predicate, _ in named if predicate})
        if len(predicates) > _MOST_PREDICATES:
            return []  # single elements at the ends of a tensor
        found = []
        for values in itertools.product((True, False), repeat=len(predicates)):
            value = {"": True, **dict(zip(predicates, values, strict=True))}
            on = [one for one, predicate, wanted in named if value[predicate] == wanted]
            loads = Counter(one.width for one in on if one.is_load)
            found.append((loads, Counter(one.width for one in on if one.is_store)))
        return found

    @property
    def spills(self) -> int:
        """Return how many instructions move registers to the stack or back."""
        return sum(one.opcode.startswith(("LDL", "STL")) for one in self.instructions)

    @property
    def trips(self) -> int:
        """Return how often the thread waits for memory: before its last load is issued, and once more.

        A thread executes in order. If an instruction reads a register that a load is still filling, the
        thread stops there. A load after that point is another trip to memory.
        """
        trips, has_waited, pending = 0, True, set()
        for one in self.instructions:
            if pending and one.reads_any(pending):
                has_waited, pending = True, set()
            if one.is_load:
                trips += has_waited
                has_waited = False
                pending |= one.loaded
        return trips


class MachineCode:
    """The disassembled code of one kernel."""

    def __init__(self, cubin: Path, name: str) -> None:
        text = _run(program("nvdisasm"), "-c", cubin)
        (section,) = re.findall(rf"\.text\.{name}:\n(.*?)(?=\n//-----|\Z)", text, re.DOTALL)
        self.blocks = list(_blocks_of(section.splitlines()))

    @cached_property
    def loops(self) -> list[Loop]:
        """Return the innermost loops that load from global memory."""
        loops: dict[int, set[int]] = {}
        for end, head in _back_edges(self.blocks):
            loops.setdefault(head, set()).update(_body(self.blocks, head, end))
        found = [Loop(self.blocks, head, body) for head, body in loops.items()]
        load = [loop for loop in found if loop.loads]
        return [loop for loop in load if not any(other.head in loop.body - {loop.head} for other in load)]


class Loop:
    """A loop. If it contains another loop, one iteration of that loop counts."""

    def __init__(self, blocks: list[Block], head: int, body: set[int]) -> None:
        self.blocks, self.head, self.body = blocks, head, body

    @property
    def loads(self) -> bool:
        return any(one.is_load for number in self.body for one in self.blocks[number].instructions)

    def rounds(self) -> list[Round]:
        """Return the shortest iteration for each set of widths that are loaded and stored.

        The same loop handles several storage formats. A branch that all threads take alike selects one of
        them. Paths that call a routine are left out: they handle numbers outside the fast path's range.
        """
        best: dict[int, dict[tuple[object, ...], tuple[int, tuple[int, ...]]]] = {self.head: {(): (0, ())}}
        done = []
        for number in self._in_order():
            block = self.blocks[number]
            if block.is_rare:
                continue
            moves = tuple(
                ("L" if one.is_load else "S", one.width)
                for one in block.instructions
                if one.is_load or one.is_store
            )
            for before, (length, path) in best.pop(number, {}).items():
                signature = tuple(sorted((*before, *moves)))
                here = (length + len(block.instructions), (*path, number))
                for following in block.following:
                    if following == self.head:
                        done.append((signature, here))
                    elif following in self.body:
                        known = best.setdefault(following, {})
                        known[signature] = min(known.get(signature, here), here)
        shortest: dict[object, tuple[int, tuple[int, ...]]] = {}
        for signature, here in done:
            shortest[signature] = min(shortest.get(signature, here), here)
        return [
            Round(tuple(one for number in path for one in self.blocks[number].instructions))
            for _, path in shortest.values()
        ]

    def _in_order(self) -> list[int]:
        """Return the blocks of an iteration, each after all blocks that lead to it."""
        seen: set[int] = set()
        order: list[int] = []
        stack = [(self.head, iter(self.blocks[self.head].following))]
        seen.add(self.head)
        while stack:
            number, following = stack[-1]
            for after in following:
                if after in self.body and after not in seen:
                    seen.add(after)
                    stack.append((after, iter(self.blocks[after].following)))
                    break
            else:
                order.append(number)
                stack.pop()
        return order[::-1]


def _run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def _blocks_of(lines: Iterable[str]) -> Iterator[Block]:
    """Split the code at labels and after branches."""
    blocks, labels, current = [Block()], {}, 0
    meeting: dict[str, str] = {}  # where diverged threads of a warp join again
    targets: list[list[str]] = [[]]
    falls = [True]

    def start() -> None:
        nonlocal current
        if blocks[-1].instructions:
            blocks.append(Block())
            targets.append([])
            falls.append(True)
        current = len(blocks) - 1

    for line in lines:
        if label := _LABEL.match(line.strip()):
            start()
            labels[label[1]] = current
        elif instruction := _LINE.search(line):
            address, predicate, opcode, operands = instruction.groups()
            if opcode == "NOP":
                continue
            named = re.findall(r"\.L_x_\d+", line)
            blocks[-1].instructions.append(
                Instruction(
                    address=int(address, 16), predicate=predicate or "", opcode=opcode, operands=operands
                )
            )
            kind = opcode.split(".")[0]
            if kind == "BSSY":
                meeting[operands.split(",")[0]] = named[0]
            elif kind in {"BRA", "BRX", "BSYNC", "EXIT", "RET"}:
                targets[-1] = [meeting[operands]] if kind == "BSYNC" else named
                # the branch has a condition
                falls[-1] = bool(predicate) or "," in operands or ".DIV" in opcode
                start()
            elif kind == "CALL":
                start()
    for number, block in enumerate(blocks):
        block.following = [labels[name] for name in targets[number] if name in labels]
        if falls[number] and number + 1 < len(blocks):
            block.following.append(number + 1)
    yield from blocks


def _back_edges(blocks: list[Block]) -> Iterator[tuple[int, int]]:
    """Yield the edges that lead back to a block on the path to their start."""
    state, stack = {0: 1}, [(0, iter(blocks[0].following))]
    while stack:
        number, following = stack[-1]
        for after in following:
            if state.get(after) == 1:
                yield number, after
            elif after not in state:
                state[after] = 1
                stack.append((after, iter(blocks[after].following)))
                break
        else:
            state[number] = 2
            stack.pop()


def _body(blocks: list[Block], head: int, end: int) -> set[int]:
    """Return the blocks that can reach the end of a loop without passing its head."""
    before: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for after in block.following:
            before.setdefault(after, []).append(number)
    body, waiting = {head, end}, [end]
    while waiting:
        number = waiting.pop()
        if number == head:
            continue
        for earlier in before.get(number, []):
            if earlier not in body:
                body.add(earlier)
                waiting.append(earlier)
    return body
