"""A rollout worker that never runs so far ahead of the trainer that its samples come too late.

    dispatcher serve --dp-size 1 --global-batch-size 8 --micro-batch-size 8 \
        --buffer-capacity 512 --max-staleness 1
    python examples/paced_producer.py 127.0.0.1:7077 --samples 200

A sample is worth generating only if it is fresh enough when its turn comes: behind the steps that
are under way and those that the buffer holds. The dispatcher says with every answer, and whenever
the trainer moves, which policy version that will be. Trainers report theirs once a version, between
`optimizer.step()` and `step.commit()`: `stream.set_policy_version(version)`.

With --unpaced the worker generates as fast as it can, to compare. At its end it prints what became
of its samples as JSON.
"""

import argparse
import json
import random

from rollout_workers import RolloutProducer

#: Seconds after which a worker that waits looks again, whatever it was told.
PATIENCE = 10.0
#: Seconds without news after which the trainer is taken to be through.
QUIET = 3.0


def wait_for_turn(producer: RolloutProducer) -> int:
    """Wait until a rollout that begins now will be fresh enough; return the version to use.

    The trainer always has work while this waits: somebody's samples are what it waits behind.
    """
    said = producer.feedback()
    while said.would_expire(newest := said.policy_version or 0):
        said = producer.next_feedback(said, timeout=PATIENCE)
    return newest


def generate(rng: random.Random, policy_version: int) -> dict[str, list[int]]:
    """A rollout; a real worker loads the weights of this version, and lets them write."""
    del policy_version
    prompt, response = rng.randint(4, 16), rng.randint(8, 64)
    return {
        "input_ids": [rng.randrange(50_000) for _ in range(prompt + response)],
        "loss_mask": [0] * prompt + [1] * response,
    }


def main() -> None:
    """Push samples, and say what became of them."""
    parser = argparse.ArgumentParser(description="push samples at the pace of the trainer")
    parser.add_argument("endpoint", help="of the dispatcher's sample plane")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--unpaced", action="store_true", help="do not wait for the trainer")
    arguments = parser.parse_args()
    rng = random.Random(0)
    with RolloutProducer(arguments.endpoint) as producer:
        for _ in range(arguments.samples):
            if arguments.unpaced:
                version = producer.feedback().policy_version or 0
            else:
                version = wait_for_turn(producer)
            producer.push(generate(rng, version), policy_version=version)
        producer.end_stream()
        before = None
        while (said := producer.feedback()) != before:  # until the trainer has had the last ones
            before = said
            producer.next_feedback(said, timeout=QUIET)
        dropped = producer.dropped()
    print(
        json.dumps(
            {
                "pushed": arguments.samples,
                "dropped": len(dropped),
                "stale": sum(sample.reason == "stale" for sample in dropped),
            }
        )
    )


if __name__ == "__main__":
    main()
