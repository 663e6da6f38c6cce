"""A rollout worker for the deployment's tests: pushes to $DISPATCHER, and ends the stream.

python tests/deploy/rollouts.py SAMPLES
"""

import os
import sys

from rollout_workers import RolloutProducer


def main() -> None:
    with RolloutProducer(os.environ["DISPATCHER"]) as producer:
        for number in range(int(sys.argv[1])):
            ids = list(range(1 + number % 23))
            producer.push({"input_ids": ids, "loss_mask": [True] * len(ids)}, sample_id=str(number))
        producer.end_stream()


if __name__ == "__main__":
    main()
