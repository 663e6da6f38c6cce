"""A producer of a soak: pushes as fast as it may until it is killed, so that the buffer is full.

    python -m tests.soak.producer ENDPOINT NUMBER BALLAST

Lengths are real ones, scaled down; BALLAST is bytes a token. An even producer gives sample ids.
"""

import sys
from itertools import count

import numpy as np

from dispatcher.simulate.profiles import sample_lengths
from workers.demo import lifeline
from workers.encode import RolloutSample
from workers.producer import RolloutProducer

AT_ONCE = 16
SCALE = 1 / 256


def main(endpoint: str, number: int, ballast: int) -> None:
    """Push for ever."""
    lifeline.hold()
    rng = np.random.default_rng(number)
    with RolloutProducer(endpoint) as producer:
        for batch in count():
            samples = []
            for at, length in enumerate(sample_lengths("lineage", AT_ONCE, rng, scale=SCALE)):
                name = None if number % 2 else f"{number}-{batch * AT_ONCE + at}"
                fields = {
                    "input_ids": np.arange(length),
                    "ballast": np.full((length, ballast), batch % 251, np.uint8),
                }
                samples.append(RolloutSample(fields, name))
            producer.push_many(samples)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
