"""Look for a sequence that fails, and make it small."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from amp_plugin import GradScaler
from tests.fuzz.player import play
from tests.fuzz.scale_model import Disagreement
from tests.fuzz.sequences import Sequence, generate
from tests.fuzz.shrinking import shrink


class Failure(NamedTuple):
    """A small failing sequence."""

    seed: int
    index: int
    program: str
    text: str

    @property
    def kind(self) -> str:
        """What is wrong, without the numbers."""
        return _kind(self.text)

    def __str__(self) -> str:
        """Return a program that fails, and how to find it again."""
        again = f"python -m tests.fuzz scaler --seed {self.seed} --first {self.index} --count 1"
        return f"# {again}\n{self.program}\n# {self.text}\n"


def failures(
    seed: int,
    indices: range,
    *,
    without: frozenset[str] = frozenset(),
    compiled: float = 0.0,
    scaler: type[GradScaler] = GradScaler,
) -> Iterator[Failure]:
    """Play sequences; yield those that fail.

    Args:
        seed: Of all sequences; together with an index it fixes one.
        indices: Which of them to play.
        without: Events, kinds of optimizers, edits and options to leave out.
        compiled: Share of sequences whose optimizer steps are compiled.
        scaler: The class that is tested.
    """
    for index in indices:
        sequence = draw(seed, index, without, compiled)
        error = problem(sequence, scaler)
        if error is not None:
            small = shrink(sequence, _fails_alike(error, scaler))
            error = problem(small, scaler) or error
            yield Failure(seed, index, error.program, str(error))


def draw(seed: int, index: int, without: frozenset[str] = frozenset(), compiled: float = 0.0) -> Sequence:
    """Make the sequence that a seed and an index stand for."""
    return generate(random.Random(f"{seed}-{index}"), without=without, compiled=compiled)


def _fails_alike(error: Disagreement, scaler: type[GradScaler]) -> Callable[[Sequence], bool]:
    kind = _kind(str(error))
    return lambda sequence: _kind(str(problem(sequence, scaler))) == kind


def problem(sequence: Sequence, scaler: type[GradScaler] = GradScaler) -> Disagreement | None:
    """Play a sequence; return what is wrong."""
    try:
        play(sequence, scaler)
    except Disagreement as error:
        return error
    return None


def _kind(text: str) -> str:
    return re.sub(r"[\[{].*|-?\d[-\d.e+]*", "", text)[:60]
