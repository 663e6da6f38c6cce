"""From which size on a payload had better go by reference: `--inline-limit`, and its default.

    python -m tests.bench.inline_limit [--store file|ray|mooncake] [--kib 64 1024 ...]
                                       [--pairs 3]

One producer and one rank, with a journal, as references need one. Each size goes by reference and
inline in turn, over TCP and over a Unix socket, where what is inline is shared memory from 256 KiB
on. Everything is in memory, the journal too, so that no disk is measured. Shown is the rate by
reference over that inline: 1 and more where it is worth it.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.bench.references import STORES, WARM_UP, ours

#: Bytes of a run, and samples at the least and at the most.
RUN_BYTES, LEAST, MOST = 128 << 20, 4 * WARM_UP, 1024
INLINE = "1TiB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", choices=sorted(STORES), default="file")
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--pairs", type=int, default=3, help="of runs, by reference and inline")
    args = parser.parse_args()
    tempfile.tempdir = "/dev/shm"
    with TemporaryDirectory() as folder, STORES[args.store](Path(folder)) as address:
        for kib in args.kib:
            for listen in ("tcp", "unix"):
                found = [ratio(address, kib << 10, listen, pair) for pair in range(args.pairs)]
                spread = f"({min(found):.2f} to {max(found):.2f})"
                print(f"{kib:6} KiB {listen:5} {median(found):6.2f}  {spread}", flush=True)


def ratio(address: str, nbytes: int, listen: str, pair: int) -> float:
    """Samples a second by reference, over those inline."""
    samples = max(LEAST, min(MOST, RUN_BYTES // nbytes)) // 8 * 8
    rates = {}
    for limit in ("1B", INLINE) if pair % 2 else (INLINE, "1B"):
        rates[limit], _ = ours(address, nbytes, samples, inline_limit=limit, listen=listen)
    return rates["1B"] / rates[INLINE]


if __name__ == "__main__":
    main()
