"""A real producer for the end-to-end tests: pushes samples of real lengths and says what it did.

    python tests/e2e/producer.py --endpoint E --name p0 --samples 500

Prints one JSON object at the end: outcomes by name. Sample ids are `<name>-<number>`.
"""

import argparse
import json
from collections import Counter

import numpy as np

from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.simulate.trace import sample_lengths
from rollout_workers import RolloutProducer

#: Real lengths are thousands of tokens; these tests care for their shape, not for their size.
SCALE = 1 / 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extra-bytes", type=int, default=0, help="per-sample ballast")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    lengths = sample_lengths("lineage", args.samples, rng, scale=SCALE)
    outcomes: Counter[str] = Counter()
    with RolloutProducer(args.endpoint, per_sample=("ballast",)) as producer:
        for number, length in enumerate(lengths.tolist()):
            fields = {
                "input_ids": rng.integers(0, 50_000, length),
                "loss_mask": np.append(False, rng.random(length - 1) < 0.8),
            }
            if args.extra_bytes:
                fields["ballast"] = np.full(args.extra_bytes, number % 251, np.uint8)
            try:
                outcome = producer.push(fields, sample_id=f"{args.name}-{number}")
            except DispatcherError as error:
                outcomes[error.code] += 1
                break
            outcomes[str(outcome)] += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
