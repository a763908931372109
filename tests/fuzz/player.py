"""Plays a sequence: runs each event on the real scaler and on the oracle, and compares the two after each."""

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

from amp_plugin import GradScaler
from tests.fuzz import events, steps
from tests.fuzz.events import Run
from tests.fuzz.scale_model import Disagreement, OutOfDomainError
from tests.fuzz.search import Fuzzer, Problem
from tests.fuzz.sequences import Sequence, generate, smaller


def _events_of(*modules: ModuleType) -> Iterator[tuple[str, Callable[..., None]]]:
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                yield name, function


EVENTS = dict(_events_of(events, steps))
"""Each event by name. One that means nothing where it stands does nothing."""

_OF_OPTIMIZERS = {name for name, event in EVENTS.items() if "o" in inspect.signature(event).parameters}


def problem(sequence: Sequence, scaler: type[GradScaler] = GradScaler) -> Problem | None:
    """Play a sequence. Return how the scaler and the oracle differ."""
    with _strict_warnings():
        run = Run(sequence.setup, scaler)
        try:
            with contextlib.suppress(OutOfDomainError):
                _play(run, sequence)
        except Disagreement as error:
            kind = re.sub(r"[\[{].*|-?\d[-\d.e+]*", "", str(error))[:60]
            return Problem(str(error), kind, "\n".join(run.scene.lines))
    return None


def _play(run: Run, sequence: Sequence) -> None:
    count = len(sequence.setup.kinds)
    for o in range(count):
        if sequence.setup.registered[o]:
            EVENTS["register"](run, o)
    for name, args in sequence.events:
        if name in _OF_OPTIMIZERS:
            EVENTS[name](run, args[0] % count, *args[1:])
        else:
            EVENTS[name](run, *args)
        run.scene.look()
    run.scene.compare_weights()


@contextlib.contextmanager
def _strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchs_own = ".*script_method"
        warnings.filterwarnings("ignore", message=torchs_own, category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"update\(\): a scaled loss ran backward")
        warnings.filterwarnings("ignore", message=".*was skipped, and nothing is scaled")
        warnings.filterwarnings(
            "ignore", message="gradients overflowed although the loss scale is at min_scale"
        )
        yield


SCALER = Fuzzer("scaler", generate, problem, smaller)
