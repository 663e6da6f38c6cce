"""Groups and policy versions: what is fresh enough is trained on, and what is not is counted."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.groups.rollouts import (
    Prompt,
    joined,
    prompts,
    roll_out,
    side_by_side,
)
from tests.e2e.groups.run import Run, in_use

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

PER_VERSION, SMALL_BATCH = 4, 8


async def trains_with(run: Run, version: int) -> None:
    """Wait until the trainer has reported this policy version."""
    await run.until(lambda now: now["policy_version"] >= version, f"version {version}")


def test_on_policy_training_with_several_steps_a_version_drops_nothing(tmp_path: Path) -> None:
    """As GRPO does with mini-batches: all of a version's steps train on what it generated.

    The workers begin the first version together: who has contributed nothing yet holds up no
    phase's end. From then on one may begin while the other is done.
    """
    versions, together = range(3), asyncio.Barrier(2)

    async def on_policy(worker: str) -> None:
        producer: Any
        async with joined(run.endpoint) as producer:
            for version in versions:
                await trains_with(run, version)
                if version == 0:
                    await together.wait()
                mine = [
                    Prompt(one.name, version=version) for one in prompts(f"{version}-{worker}", 2)
                ]
                await side_by_side(*(roll_out(run.books, producer, one, 0.02) for one in mine))
                await producer.end_phase(version + 1)
            await producer.end_stream()

    with in_use(
        tmp_path,
        ranks=False,
        global_batch_size=SMALL_BATCH,
        max_staleness=0,
        steps_per_version=PER_VERSION,
    ) as run:
        run.join(version=lambda step: step // PER_VERSION)
        run.produce(on_policy("a"), on_policy("b"))
        found = run.finish()
    assert found.dropped == {}
    assert found.committed == run.books.accepted
    assert len(found.committed) == len(versions) * PER_VERSION * SMALL_BATCH
    found.assert_accounted(run.books)
    assert found.metrics["partial_steps_total"] == 0
    for step, names in found.steps.items():
        assert {name.partition("-")[0] for name in names} == {str(step // PER_VERSION)}
