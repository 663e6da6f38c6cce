"""A producer of a soak: pushes as fast as it may until it is killed, so that the buffer is full.

    python -m tests.soak.producer ENDPOINT NUMBER BALLAST

Lengths are real ones, scaled down; BALLAST is bytes a token. An even producer gives sample ids.
"""

import sys
from itertools import count

import numpy as np

from rollout_dispatcher.simulate.profiles import sample_lengths
from rollout_workers.demo import lifeline
from rollout_workers.producer.blocking import RolloutProducer
from rollout_workers.producer.encode import RolloutSample

AT_ONCE, KINDS = 32, 4096
SCALE = 1 / 256


def main(endpoint: str, number: int, ballast: int) -> None:
    """Push for ever."""
    lifeline.hold()
    lengths = sample_lengths("lineage", KINDS, np.random.default_rng(number), scale=SCALE)
    with RolloutProducer(endpoint) as producer:
        for batch in count():
            samples = []
            for at in range(batch * AT_ONCE, (batch + 1) * AT_ONCE):
                length = lengths[at % KINDS]
                name = None if number % 2 else f"{number}-{at}"
                fields = {
                    "input_ids": np.arange(length),
                    "ballast": np.full((length, ballast), batch % 251, np.uint8),
                }
                samples.append(RolloutSample(fields, name))
            producer.push_many(samples)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
