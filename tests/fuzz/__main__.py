"""Random sequences of GradScaler's calls against float64: the long run.

``python -m tests.fuzz scaler --sequences 20000 --seed 0``
"""

from __future__ import annotations

import argparse
import collections
import sys
import time

from tests.fuzz import search


def main() -> int:
    """Run a fuzzer; print small failing programs; return 1 if there were any."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=["scaler"])
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first sequence")
    parser.add_argument(
        "--without", default="", help="events, optimizers, edits and options to leave out, by commas"
    )
    parser.add_argument("--failures", type=int, default=1, help="failures to show before it ends")
    parser.add_argument(
        "--compiled", type=float, default=0.0005, help="share of sequences with compiled steps"
    )
    options = parser.parse_args()
    kinds: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    found = search.failures(
        options.seed,
        range(options.first, options.first + options.sequences),
        without=frozenset(options.without.split(",")),
        compiled=options.compiled,
    )
    for failure in found:
        print(failure, flush=True)
        kinds[failure.kind] += 1
        if kinds.total() >= options.failures:
            break
    print(f"{options.sequences} sequences, {time.monotonic() - started:.0f} s, failures: {dict(kinds)}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
