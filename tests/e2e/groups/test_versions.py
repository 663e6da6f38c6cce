"""Groups and policy versions: what is fresh enough is trained on, and what is not is counted."""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.groups.rollouts import (
    GROUP,
    Prompt,
    group_of,
    joined,
    prompts,
    roll_out,
    side_by_side,
    until,
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


def test_too_stale_groups_are_dropped_whole_and_the_others_go_on(tmp_path: Path) -> None:
    """Every fourth prompt takes until the trainer is five versions on; three are its limit.

    Half the members of each group are of a newer version: the oldest is what counts.
    """
    limit = 3
    versions: dict[str, int] = {}
    late, over = set[str](), asyncio.Event()

    async def lane(producer: Any, name: str) -> None:
        for number, prompt in enumerate(prompts(name, 12)):
            version = int(run.server.scrape()["policy_version"])
            versions[prompt.name] = version
            if number % 4 == 3:
                late.add(prompt.name)
                await trains_with(run, version + limit + 2)
            for member in range(GROUP):
                about = version + member % 2
                await run.books.push(producer, prompt, member, policy_version=about)

    async def work() -> None:
        async with joined(run.endpoint) as producer, joined(run.endpoint) as keeper:
            await side_by_side(fill(keeper), lanes(producer))
            await producer.end_stream()
            await keeper.end_stream()

    async def lanes(producer: Any) -> None:
        await side_by_side(*(lane(producer, f"w{at}") for at in range(3)))
        over.set()

    async def fill(producer: Any) -> None:
        """Others keep the trainer busy, and have no versions: they are exempt."""
        for prompt in until(over, "any"):
            await roll_out(run.books, producer, prompt, 0.02)

    with in_use(tmp_path, ranks=False, global_batch_size=SMALL_BATCH, max_staleness=limit) as run:
        run.join(step_s=0.02, version=lambda step: step)
        run.produce(work())
        found = run.finish()
    found.assert_accounted(run.books)
    assert run.books.refused == {}
    assert found.dropped.keys() == {"stale"}
    trained_at = {name: step for step, names in found.steps.items() for name in names}
    fates = defaultdict[str, set[int]](set)
    for name in run.books.accepted:
        fates[group_of(name)].add(trained_at.get(name, -1))
    assert all(len(fate) == 1 for fate in fates.values()), fates
    for group, version in versions.items():
        (step,) = fates[group]
        assert step < 0 or step - version <= limit, (group, version, step)
    assert len(late) == 9
    assert {group for group in late if fates[group] != {-1}} == set()
    assert fates.keys() - versions.keys(), "others were there"
    for group in fates.keys() - versions.keys():
        assert fates[group] != {-1}, "what has no version is never stale"
