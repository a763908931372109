"""In every op of torch's test database, a fault is put into one element. diagnose names the op."""

import math
import random
from collections import Counter

import pytest
import torch

from amp_plugin import diagnose
from amp_plugin.numerics.finding import Finding, NonFiniteError
from tests.numerics.faults import Faults, Target, program, samples_of
from tests.torchs_own import torchs_own

# warnings of the database itself: sparse samples, deprecated ops
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 2
MODES = ((math.nan, False), (math.inf, True), (math.inf, False))  # the fault, and whether diagnose is strict


def verdict_of(target: Target, own: list[Finding], finding: Finding | None, *, strict: bool) -> str:
    """Return a verdict on a finding.

    If a sample is not finite by itself, the only requirement is that no finite op is named.
    """
    if finding is None:
        return "unseen" if strict else "absorbed"  # torch or a later op has hidden the fault
    if (finding.op, finding.direction) == (target.op, target.direction):
        return "right"
    if any((found.op, found.direction) == (finding.op, finding.direction) for found in own):
        return "own"
    return "unsure" if f"{target.op} made" in finding.reached else "wrong"


def trials(infos):
    """Yield the verdict for each op, direction and mode, together with the sample."""
    choice = random.Random(0)
    for info in infos:
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
                    verdict = verdict_of(target, own[strict], finding, strict=strict)
                    yield verdict, f"{info.full_name}: {target} {value} {strict} {finding}"


def outcome(run, target, value, element, strict):
    try:
        with Faults(target.number, value, element), diagnose(strict=strict):
            run()
    except NonFiniteError as error:
        return error.finding
    except RuntimeError:  # raised by an op that received the fault
        pass
    return None


def check(infos, least):
    found = list(trials(infos))
    counts = Counter(verdict for verdict, _ in found)
    judged = sum(counts[verdict] for verdict in ("right", "unsure", "unseen", "wrong"))
    wrong = [tried for verdict, tried in found if verdict in {"unseen", "wrong"}]
    assert judged >= least
    assert counts["right"] >= 0.99 * judged, counts
    assert not wrong, "\n".join(wrong)
    return counts


def database():
    return torchs_own("common_methods_invocations").op_db


def test_a_part_of_the_database():
    check(database()[::30], least=100)


def test_a_fault_that_a_derivative_compares_with_is_the_origin_of_what_it_makes():
    check([info for info in database() if info.full_name.endswith(("reduce.amax", "reduce.amin"))], least=40)


@pytest.mark.whole_run
def test_the_whole_database():
    print(check(database(), least=4000))
