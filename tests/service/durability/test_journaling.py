"""The journal of the service: what it remembers fits the clock of the process that reads it."""

from pathlib import Path

import pytest

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.facts import StreamEnded
from rollout_dispatcher.service.barrier import DurabilityBarrier
from rollout_dispatcher.service.completion import Failure
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.metrics.registry import Metrics
from tests.support.journaling import open_journal
from tests.support.samples import make_sample


class Clock:
    """A clock of one process, which says what it is told."""

    reading = 0.0

    def __call__(self) -> float:
        return self.reading


async def test_what_an_earlier_process_dated_into_the_future_has_come_by_now(
    tmp_path: Path,
) -> None:
    config = ServeConfig(dp_size=1, global_batch_size=1, micro_batch_size=1, journal_dir=tmp_path)
    clock = Clock()
    core = DispatcherCore(core_config(config))
    journal = open_journal(config, core, Metrics(config, core, clock), clock)
    assert journal is not None
    barrier = DurabilityBarrier(journal, Failure())
    clock.reading = 5_000.0  # it jumps ahead, or the time of day is set back afterwards
    pushed = core.push(Push("p", 0, (make_sample("s"),)), clock())
    barrier.note(pushed.facts, pushed.totals)
    await barrier.settled()
    assert journal.close()

    clock.reading = 30.0
    successor = DispatcherCore(core_config(config))
    journal = open_journal(config, successor, Metrics(config, successor, clock), clock)
    assert journal is not None
    assert journal.close()
    at = successor.statistics()
    assert at.buffered == 1
    assert at.oldest_arrival is not None
    assert at.oldest_arrival <= clock()


async def test_a_journal_that_cannot_be_gone_on_from_is_let_go_of(tmp_path: Path) -> None:
    config = ServeConfig(dp_size=1, global_batch_size=1, micro_batch_size=1, journal_dir=tmp_path)
    clock = Clock()
    core = DispatcherCore(core_config(config))
    journal = open_journal(config, core, Metrics(config, core, clock), clock)
    assert journal is not None
    journal.append([StreamEnded()], {"received": {"of a later version": 1}})
    assert journal.close()
    for _ in range(2):  # the second time it is not "in use by another dispatcher", which is us
        core = DispatcherCore(core_config(config))
        with pytest.raises(ValueError, match="of a later version"):
            open_journal(config, core, Metrics(config, core, clock), clock)


async def test_the_log_says_where_the_journal_is_and_whether_it_is_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    there, fresh = Path("there/deep"), Path("empty")
    for folder, run in ((there, "one"), (fresh, "two"), (there, "three")):
        config = ServeConfig(dp_size=1, global_batch_size=1, micro_batch_size=1, journal_dir=folder)
        core = DispatcherCore(core_config(config), run)
        journal = open_journal(config, core, Metrics(config, core, Clock()), Clock())
        barrier = DurabilityBarrier(journal, Failure())
        pushed = core.push(Push("p", 0, (make_sample("s"),)), 0.0)
        barrier.note(pushed.facts, pushed.totals)
        await barrier.settled()
        assert journal.close()
    held = "1 samples buffered, 0 open steps, 0 retained"
    assert [message for message in caplog.messages if message.startswith("journal")] == [
        f"journal {tmp_path}/there/deep: created, as it was not there; run one begins",
        f"journal {tmp_path}/empty: empty; run two begins",
        f"journal {tmp_path}/there/deep: run one goes on at step 0: {held}",
    ]
