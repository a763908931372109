"""The long runs of the fuzzers. A failure is printed as a small program.

``python -m tests.fuzz scaler --count 20000 --seed 0`` compares sequences of GradScaler calls with float64.
``python -m tests.fuzz graphs --count 5000 --seed 0`` compares op graphs with torch.autocast.
"""

import argparse
import collections
import itertools
import sys
import time

from tests.fuzz.comparison import GRAPHS
from tests.fuzz.player import SCALER

FUZZERS = {"scaler": (SCALER, 20_000), "graphs": (GRAPHS, 5_000)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=FUZZERS)
    parser.add_argument("--count", type=int, help="how many; default: 20000 of scaler, 5000 of graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first")
    parser.add_argument("--failures", type=int, default=1, help="failures to show before it ends")
    options = parser.parse_args()
    fuzzer, most = FUZZERS[options.what]
    count = options.count or most
    started = time.monotonic()
    kinds: collections.Counter[str] = collections.Counter()
    found = fuzzer.failures(options.seed, range(options.first, options.first + count))
    for failure in itertools.islice(found, options.failures):
        print(failure, flush=True)
        kinds[failure.problem.kind] += 1
    seconds = time.monotonic() - started
    print(
        f"{options.what}: {count} from seed {options.seed}, {seconds:.0f} s, failures: {dict(kinds) or 'none'}"
    )
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
