"""A rollout worker of the demo: pushes its share of the samples as fast as there is room.

    python -m rollout_workers.demo.producer --endpoint 127.0.0.1:7077
        --lengths lengths.json --part 0 2

There is no pacing here: when the buffer is full, `push` waits.
"""

import argparse
import json
from pathlib import Path

from rollout_workers import RolloutProducer
from rollout_workers.demo.data import leave_with_starter, rollout


def main() -> None:
    """Push samples part, part + n, part + 2n, ... of the lengths in the file; or end the stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--lengths", type=Path, help="JSON list of tokens a sample")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("PART", "N"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end-stream", action="store_true", help="only say that all is pushed")
    args = parser.parse_args()
    leave_with_starter()
    with RolloutProducer(args.endpoint) as producer:
        if args.end_stream:
            producer.end_stream()
            return
        lengths = json.loads(args.lengths.read_text())
        part, parts = args.part
        for index in range(part, len(lengths), parts):
            producer.push(rollout(index, lengths[index], args.seed))


if __name__ == "__main__":
    main()
