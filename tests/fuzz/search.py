"""Look for a random case that fails, and make it small."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """What is wrong: in words, without the numbers, and the program that shows it."""

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
    """What is drawn, how it is played, and the smaller cases to try in place of one that fails."""

    name: str
    generate: Callable[[random.Random], Any]
    problem: Callable[..., Problem | None]  # of a case, and of what is tested in place of ours
    smaller: Callable[[Any], Iterable[Any]]

    def draw(self, seed: int, index: int) -> Any:
        return self.generate(random.Random(f"{seed}-{index}"))

    def failures(self, seed: int, indices: range) -> Iterator[Failure]:
        """Play cases; yield those that fail, made small."""
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
        """Whether one of some cases fails on what is broken, and not on ours."""
        cases = (self.draw(0, index) for index in range(count))
        return any(self.problem(case, broken) and not self.problem(case) for case in cases)
