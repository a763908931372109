"""The ops of torch's own test database, each with a fault put into one element: diagnose names the op."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from amp_plugin import diagnose
from amp_plugin.numerics.finding import Finding, NonFiniteError
from tests.numerics.faults import Faults, Target, program, samples_of
from tests.torchs_own import torchs_own

pytestmark = pytest.mark.filterwarnings("ignore")  # the database's own: sparse samples, deprecated ops

SAMPLES = 2
MODES = ((math.nan, False), (math.inf, True), (math.inf, False))  # what is put in, strict


@dataclass(frozen=True)
class Trial:
    """A sample run with one fault, and what diagnose said; ``own`` is what it says without the fault."""

    sample: str
    target: Target
    value: float
    strict: bool
    own: list[Finding]
    finding: Finding | None

    @property
    def verdict(self) -> str:
        """What it proves; of a sample that is not finite by itself only that no finite op is blamed."""
        finding, target = self.finding, self.target
        if finding is None:
            is_absorbed = not self.strict  # torch or a later op has masked it
            return "absorbed" if is_absorbed else "unseen"
        if (finding.op, finding.direction) == (target.op, target.direction):
            return "right"
        if any((own.op, own.direction) == (finding.op, finding.direction) for own in self.own):
            return "own"
        return "unsure" if f"{target.op} made" in finding.reached else "wrong"


def trials(stride, offset=0):
    """Yield a Trial for each op of the database, direction and mode."""
    op_db = torchs_own("common_methods_invocations").op_db
    choice = random.Random(0)
    for info in op_db[offset::stride]:
        for sample in samples_of(info, SAMPLES) if torch.float32 in info.dtypes else ():
            run = program(info.op, sample)
            try:
                run()
            except Exception:  # noqa: BLE001 - a sample that cannot run this way
                continue
            own = {}
            for strict in (False, True):
                with Faults() as faults, diagnose(keep_going=True, strict=strict) as clean:
                    run()
                own[strict] = clean.findings
            for direction in ("forward", "backward"):
                targets = [target for target in faults.targets if target.direction == direction]
                for value, strict in MODES if targets else ():
                    target = choice.choice(targets)
                    finding = outcome(run, target, value, choice.randrange(100), strict)
                    yield Trial(info.full_name, target, value, strict, own[strict], finding)


def outcome(run, target, value, element, strict):
    try:
        with Faults(target.number, value, element), diagnose(strict=strict):
            run()
    except NonFiniteError as error:
        return error.finding
    except RuntimeError:  # of an op that was given the fault
        pass
    return None


def check(stride, least):
    found = list(trials(stride))
    counts = Counter(trial.verdict for trial in found)
    judged = sum(counts[verdict] for verdict in ("right", "unsure", "unseen", "wrong"))
    wrong = [str(trial) for trial in found if trial.verdict in {"unseen", "wrong"}]
    assert judged >= least
    assert counts["right"] >= 0.99 * judged, counts
    assert not wrong, "\n".join(wrong)
    return counts


def test_a_part_of_the_database():
    check(stride=30, least=100)


@pytest.mark.whole_run
def test_the_whole_database():
    print(check(stride=1, least=4000))
