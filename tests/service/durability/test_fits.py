"""A restart with settings that what is buffered does not fit is refused at once, with a remedy."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision, PlanRequested, PushAnswered
from rollout_dispatcher.core.facts import DropReason, RecoveredState
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.sample import SIZE_AT_CLOSE, DType, Field, Outcome, Sample, Schema
from rollout_dispatcher.service.barrier import DurabilityBarrier
from rollout_dispatcher.service.completion import Failure
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.journaling import fit
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.planner import Planner
from tests.support.journaling import open_journal
from tests.support.samples import make_sample


class Life:
    """A dispatcher without sockets, on the journal of those before it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        settings = {"dp_size": 1, "global_batch_size": 8, "micro_batch_tokens": 100} | options
        config = ServeConfig(journal_dir=directory, **settings)
        clock = asyncio.get_running_loop().time
        self.core = DispatcherCore(core_config(config))
        metrics = Metrics(config, self.core, clock)
        journal = open_journal(config, self.core, metrics, clock)
        assert journal is not None
        self.journal = journal
        self._planner = Planner(config.plan_config(), metrics.plan_duration.observe, clock)
        self._barrier = DurabilityBarrier(journal, Failure())

    async def push(self, *samples: Sample, first: int = 0) -> None:
        """Accepted, all of them."""
        decision = self.core.push(Push("p", first, samples), 0.0)
        answers = [effect for effect in decision.effects if isinstance(effect, PushAnswered)]
        assert [set(answer.outcomes) for answer in answers] == [{Outcome.ACCEPTED}]
        self._perform(decision, 0.0)
        await self._barrier.settled()

    async def plan(self) -> None:
        """A rank joins and gets a step, as nothing more comes."""
        hello = RankHello("r", 0, 1, None, prefetch_steps=1, hungry=True)
        self._perform(self.core.join(hello, 0.0), 0.0)
        self._perform(self.core.end_stream(10.0, force=True), 10.0)
        await self._barrier.settled()

    def _perform(self, decision: Decision, now: float) -> None:
        self._barrier.note(decision.facts, decision.totals)
        for effect in decision.effects:
            if isinstance(effect, PlanRequested):
                self._perform(self.core.planned(effect, self._planner.plan(effect), now), now)

    def end(self) -> None:
        assert self.journal.close()


def group(name: str, size: int, members: int, tokens: int = 3) -> list[Sample]:
    return [
        make_sample(f"{name}{at}", tokens, group_id=name, group_size=size) for at in range(members)
    ]


def refused(directory: Path, **options: Any) -> str:
    """Twice, and the directory can be used with other settings after that."""
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            Life(directory, **options)
    return str(caught.value)


async def test_a_sample_longer_than_the_token_budget_is_refused_at_start(tmp_path: Path) -> None:
    first = Life(tmp_path)
    await first.push(make_sample("short", 10), make_sample("long", 90), make_sample("longer", 95))
    first.end()
    said = refused(tmp_path, micro_batch_tokens=50)
    assert "has 2 samples longer than --micro-batch-tokens 50" in said
    assert "the longest (longer) has 95 tokens: start with --micro-batch-tokens 95 or more" in said
    assert said.endswith("or with --on-oversize alone or drop")
    Life(tmp_path, micro_batch_tokens=95).end()


@pytest.mark.parametrize(("oversize", "in_flight"), [("alone", 2), ("drop", 1)])
async def test_a_sample_longer_than_the_token_budget_goes_alone_or_is_dropped_if_so_asked(
    tmp_path: Path, oversize: str, in_flight: int
) -> None:
    first = Life(tmp_path)
    await first.push(make_sample("short", 10), make_sample("long", 90))
    first.end()
    second = Life(tmp_path, micro_batch_tokens=50, on_oversize=oversize)
    await second.plan()
    at = second.core.statistics()
    assert (at.in_flight, at.dropped[DropReason.OVERSIZE]) == (in_flight, 2 - in_flight)
    second.end()


async def test_a_group_that_fits_no_micro_batch_is_refused_at_start_or_dropped(
    tmp_path: Path,
) -> None:
    first = Life(tmp_path)
    await first.push(*group("g", 4, 4, tokens=20), *group("h", 2, 2, tokens=20), first=0)
    first.end()
    said = refused(tmp_path, groups="micro-batch", micro_batch_tokens=79)
    assert "has 4 samples in groups that are larger than a micro-batch, such as g" in said
    assert "start with --groups step or rank" in said
    said = refused(tmp_path, groups="micro-batch", micro_batch_tokens=None, micro_batch_size=2)
    assert "has 4 samples in groups that are larger than a micro-batch, such as g" in said
    Life(tmp_path, groups="micro-batch", micro_batch_tokens=80).end()
    second = Life(tmp_path, groups="micro-batch", micro_batch_tokens=79, on_oversize="drop")
    await second.plan()
    at = second.core.statistics()
    assert (at.in_flight, at.dropped[DropReason.OVERSIZE]) == (2, 4)
    second.end()


@pytest.mark.parametrize("oversize", ["error", "drop"])
async def test_an_open_step_goes_on_under_a_smaller_token_budget(
    tmp_path: Path, oversize: str
) -> None:
    first = Life(tmp_path)
    await first.push(make_sample("long", 90))
    await first.plan()
    assert first.core.statistics().in_flight == 1
    first.end()
    second = Life(tmp_path, micro_batch_tokens=50, on_oversize=oversize)
    assert second.core.statistics().in_flight == 1
    second.end()


@pytest.mark.parametrize("members", [6, 2])
async def test_a_group_larger_than_the_batch_is_refused_at_start(
    tmp_path: Path, members: int
) -> None:
    first = Life(tmp_path)
    await first.push(*group("g", 6, members))
    first.end()
    said = refused(tmp_path, global_batch_size=4)
    assert f"has {members} samples in groups that are larger than --global-batch-size 4" in said
    assert "the largest (g) has 6: start with --global-batch-size 6 or more" in said
    Life(tmp_path, global_batch_size=6).end()
    Life(tmp_path, global_batch_size=4, groups="ignore").end()


async def test_another_size_for_groups_that_lack_members_is_refused_at_start(
    tmp_path: Path,
) -> None:
    first = Life(tmp_path, group_size=4)
    await first.push(*group("whole", 4, 4), *group("part", 4, 3))
    first.end()
    for options in ({"group_size": 2}, {}):
        said = refused(tmp_path, **options)
        assert "has 3 samples in groups that lack members and have --group-size 4" in said
        assert "such as part: start with --group-size 4 until they are complete" in said
    again = Life(tmp_path, group_size=4)
    await again.push(make_sample("part3", 3, group_id="part", group_size=4), first=7)
    again.end()
    Life(tmp_path, group_size=2).end()


async def test_groups_of_a_size_that_was_said_need_no_setting(tmp_path: Path) -> None:
    first = Life(tmp_path)
    await first.push(*group("part", 3, 2))
    first.end()
    Life(tmp_path, group_size=4).end()
    Life(tmp_path).end()
    last = Life(tmp_path, group_size=2)
    await last.push(group("part", 3, 3)[2], first=2)
    last.end()


async def test_a_group_whose_size_is_told_at_its_close_fits_as_far_as_it_has_come(
    tmp_path: Path,
) -> None:
    first = Life(tmp_path)
    await first.push(*group("g", SIZE_AT_CLOSE, 5))
    first.end()
    assert "the largest (g) has 5" in refused(tmp_path, global_batch_size=4)
    Life(tmp_path, global_batch_size=5).end()
    Life(tmp_path, global_batch_size=None, global_batch_groups=2).end()


@pytest.mark.parametrize("groups", ["step", "rank"])
async def test_groups_that_were_ignored_cannot_be_kept_whole_afterwards(
    tmp_path: Path, groups: str
) -> None:
    first = Life(tmp_path, groups="ignore")
    await first.push(*group("g", 4, 2), make_sample("alone", 3))
    first.end()
    said = refused(tmp_path, groups=groups)
    assert "has 2 samples accepted under --groups ignore" in said
    assert "(such as g)" in said
    assert f"instead of --groups {groups}" in said
    Life(tmp_path, groups="ignore").end()


async def test_groups_need_not_be_kept_whole_any_more(tmp_path: Path) -> None:
    first = Life(tmp_path)
    await first.push(*group("g", 4, 4), *group("h", 4, 2))
    first.end()
    second = Life(tmp_path, groups="ignore", global_batch_size=2)
    await second.plan()
    assert second.core.statistics().in_flight > 0
    second.end()


FLOATS = Schema((Field("input_ids", DType.INT64), Field("logprobs", DType.FLOAT32)))


async def test_fields_are_decided_on_once_also_across_restarts(tmp_path: Path) -> None:
    first = Life(tmp_path)
    await first.push(make_sample("a", schema=FLOATS))
    first.end()
    for _ in range(2):
        later = Life(tmp_path)
        assert later.core.schema == (FLOATS, "set by the first accepted push, from producer p")
        answer = later.core.push(Push("q", 0, (make_sample("stray"),)), 0.0)
        (answered,) = [one for one in answer.effects if isinstance(one, PushAnswered)]
        assert answered.reasons == {0: "schema"}
        later.end()


async def test_steps_with_other_fields_than_declared_are_trained_on_first(tmp_path: Path) -> None:
    before = Life(tmp_path)
    await before.push(make_sample("a", schema=FLOATS), make_sample("b", schema=FLOATS))
    await before.plan()
    before.end()
    words = refused(tmp_path, fields=("input_ids:int64",))
    assert "has 2 samples with other fields than --fields says, such as a" in words
    assert "logprobs is unexpected" in words
    Life(tmp_path, fields=("input_ids:int64,logprobs:float32",)).end()


async def test_samples_in_a_payload_store_need_it_until_they_are_trained_on(
    tmp_path: Path,
) -> None:
    before = Life(tmp_path, payload_stores=("file:///a", "file:///b"))
    await before.push(make_sample("a", store="file:///b"), make_sample("b"))
    before.end()
    words = refused(tmp_path)
    assert "has 1 sample whose payloads lie in file:///b, which no rank may open" in words
    assert "start with --payload-stores file:///b until they are trained on" in words
    words = refused(tmp_path, payload_stores=("file:///a",))
    assert "--payload-stores file:///a --payload-stores file:///b until" in words
    after = Life(tmp_path, payload_stores=("file:///b",))
    assert after.core.statistics().buffered_referenced_bytes == 32
    after.end()


def test_objects_to_be_released_need_their_payload_store_until_they_are(tmp_path: Path) -> None:
    stored = StoredObject("file:///b", "p.1/0", 32)
    config = ServeConfig(dp_size=2, global_batch_size=4, micro_batch_size=2, journal_dir=tmp_path)
    with pytest.raises(ConfigError, match="has 1 object to be released in file:///b"):
        fit(config, RecoveredState(unneeded=(stored,)))


async def test_a_first_push_by_mistake_gives_way_to_declared_fields_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Life(tmp_path)
    await before.push(make_sample("a", schema=FLOATS), make_sample("b", schema=FLOATS))
    before.end()
    for life in range(2):
        after = Life(tmp_path, fields=("input_ids:int64",))
        assert after.core.statistics().dropped[DropReason.SCHEMA] == 2
        assert after.core.statistics().balanced
        await after.push(make_sample("c"), first=2 + life)
        after.end()
    words = "2 accepted samples are dropped (schema), accepted with other fields than --fields"
    assert [words in line for line in caplog.messages].count(True) == 1, "it happened once"
