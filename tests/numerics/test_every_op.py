"""The ops of torch's own test database, each with a fault put into one element: diagnose names the op."""

from __future__ import annotations

import math
import random

import pytest
import torch

from amp_plugin import diagnose
from amp_plugin.numerics.finding import NonFiniteError
from tests.numerics.faults import Faults, program, samples_of

pytestmark = pytest.mark.filterwarnings("ignore")  # the database's own: sparse samples, deprecated ops

SAMPLES = 2


def trials(stride, offset=0):
    """Yield (op, what the clean run found, target, value, strict, what was found) for ops of the database."""
    from torch.testing._internal.common_methods_invocations import op_db

    choice = random.Random(0)
    for info in op_db[offset::stride]:
        for sample in samples_of(info, SAMPLES) if torch.float32 in info.dtypes else ():
            run = program(info.op, sample)
            try:
                run()
            except Exception:  # noqa: BLE001 - a sample that cannot run this way
                continue
            with Faults() as faults, diagnose(keep_going=True) as clean:
                run()
            for direction in ("forward", "backward"):
                targets = [target for target in faults.targets if target.direction == direction]
                for value, strict in ((math.nan, False), (math.inf, True), (math.inf, False)):
                    if targets:
                        target = choice.choice(targets)
                        finding = outcome(run, target, value, choice.randrange(100), strict)
                        yield info.full_name, clean.findings, target, value, strict, finding


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
    counts = {"all": 0, "right": 0, "absorbed": 0}
    wrong = []
    for name, clean, target, value, strict, finding in trials(stride):
        counts["all"] += 1
        if finding is None and value == math.inf and not strict:
            counts["absorbed"] += 1  # nothing came of the infinity
        elif finding is not None and (finding.op, finding.direction) == (target.op, target.direction):
            counts["right"] += 1
        elif not any(own.op == getattr(finding, "op", "") for own in clean):  # not a nan of the sample's own
            wrong.append((name, target, value, strict, finding and str(finding)))
    judged = counts["all"] - counts["absorbed"]
    assert judged >= least
    assert counts["right"] >= 0.99 * judged, wrong
    return counts, wrong


def test_a_part_of_the_database():
    check(stride=30, least=100)


@pytest.mark.whole_run
def test_the_whole_database():
    counts, wrong = check(stride=1, least=4000)
    print(counts, *wrong, sep="\n")
