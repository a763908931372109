"""Search for a random case that fails, and make it small."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A problem: a description without numbers, and the program that shows it."""

    text: str
    kind: str
    program: str


class Failure(NamedTuple):
    """A small case that fails, and the command that finds it again."""

    again: str
    problem: Problem

    def __str__(self) -> str:
        return f"# {self.again}\n{self.problem.program}\n# {self.problem.text}\n"


class Fuzzer(NamedTuple):
    """Functions that generate a case, run it, and return the smaller cases to try if it fails."""

    name: str
    generate: Callable[[random.Random], Any]
    problem: Callable[..., Problem | None]  # given a case, and the class to test in place of ours
    smaller: Callable[[Any], Iterable[Any]]

    def draw(self, seed: int, index: int) -> Any:
        return self.generate(random.Random(f"{seed}-{index}"))

    def failures(self, seed: int, indices: range) -> Iterator[Failure]:
        """Run cases and yield those that fail, made small."""
        for index in indices:
            case = self.draw(seed, index)
            problem = self.problem(case)
            while problem is not None:
                kind = problem.kind
                tried = ((other, self.problem(other)) for other in self.smaller(case))
                smaller = next((found for found in tried if found[1] and found[1].kind == kind), None)
                if smaller is None:
                    again = f"python -m tests.fuzz {self.name} --seed {seed} --first {index} --count 1"
                    yield Failure(again, problem)
                    break
                case, problem = smaller

    def finds(self, broken: type, count: int = 300) -> bool:
        """Return whether one of some cases fails on the broken class and not on ours."""
        cases = (self.draw(0, index) for index in range(count))
        return any(self.problem(case, broken) and not self.problem(case) for case in cases)
