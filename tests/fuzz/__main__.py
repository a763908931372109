"""The long runs of the fuzzers; a failure is printed as a small program.

``python -m tests.fuzz scaler --count 20000 --seed 0``: sequences of GradScaler's calls against float64.
``python -m tests.fuzz graphs --count 5000 --seed 0``: op graphs against torch.autocast.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import time

from tests.fuzz import comparison, search

COUNTS = {"scaler": 20_000, "graphs": 5_000}


def main() -> int:
    """Run a fuzzer; return 1 if something failed."""
    options = _parser().parse_args()
    count = options.count or COUNTS[options.what]
    indices = range(options.first, options.first + count)
    without = frozenset(options.without.split(","))
    started = time.monotonic()
    kinds: collections.Counter[str] = collections.Counter()
    if options.what == "scaler":
        found = search.failures(options.seed, indices, without=without, compiled=options.compiled)
    else:
        found = comparison.differences(options.seed, indices, without=without)
    for failure in itertools.islice(found, options.failures):
        print(failure, flush=True)
        kinds[failure.kind] += 1
    seconds = time.monotonic() - started
    print(
        f"{options.what}: {count} from seed {options.seed}, {seconds:.0f} s, failures: {dict(kinds) or 'none'}"
    )
    return 1 if kinds else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COUNTS)
    parser.add_argument("--count", type=int, help=f"how many; default: {COUNTS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first")
    parser.add_argument("--failures", type=int, default=1, help="failures to show before it ends")
    parser.add_argument(
        "--without", default="", help="what is not to occur, by commas: events, kinds, ops, options"
    )
    parser.add_argument(
        "--compiled", type=float, default=0.0005, help="share of sequences with compiled steps"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
