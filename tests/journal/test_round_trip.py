"""Every fact comes back, whether the journal was closed or its process killed."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollout_dispatcher.core.facts import (
    Committed,
    Dropped,
    DropReason,
    EndsReported,
    Fact,
    Finished,
    FloorRaised,
    GenerationBegan,
    Planned,
    RecoveredState,
    Resumed,
    VersionReported,
    Withdrawn,
)
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.journal.records import Encoder
from rollout_dispatcher.sample import Schema
from tests.journal.support import (
    BATCH,
    OBJECTS,
    SCHEMAS,
    accepted,
    as_if_killed,
    checksum_of,
    opened,
    payload_of,
    plain,
    recovered,
)
from tests.support.core.memory import Memory
from tests.support.samples import span_of


def after(directory: Path, *batches: list[Fact], **options: int) -> RecoveredState:
    """What is remembered after these batches and a kill."""
    with opened(directory, BATCH, **options) as (journal, listener, _):
        for facts in batches:
            lsn = journal.append(facts, {"n": 1})
        listener.wait(lsn)
        return recovered(as_if_killed(directory, directory.with_suffix(".killed")), **options)


def test_what_has_no_ragged_fields_is_written_as_by_releases_that_knew_of_none() -> None:
    facts = [accepted(0, schema=SCHEMAS[1], given_id="x"), accepted(1, schema=SCHEMAS[2])]
    schema, plain, ragged_schema, ragged = Encoder({}, float).batch(1, facts, {}).rows
    assert [len(field) for field in schema[2]] == [4, 4]
    assert (len(plain), plain[-2:]) == (19, ["x", checksum_of("x")])
    assert [len(field) for field in ragged_schema[2]] == [5, 4, 5]
    assert ragged[-1] == facts[1].entry.sample.rows == (1, 2)


PLAN = Planned(0, "a", 0.0, (((0,),),), ())
BLOCKS = replace(PLAN, micro_batches=(((0,),), ((),)), cp_sizes=((2,), (2,)))


@pytest.mark.parametrize(
    "facts",
    [
        [BLOCKS],
        [BLOCKS, replace(PLAN, digest="b", attempt=1)],
        [
            PLAN, Dropped((0,), DropReason.UNRESOLVED),
            replace(PLAN, digest="", micro_batches=(((),),), attempt=1), Withdrawn(0, 1),
        ],
        [VersionReported(3, 0), PLAN, Committed(0, retained=True), Resumed(-1)],
    ],
    ids=["blocks", "blocks no more", "withdrawn", "rewound"],
)  # fmt: skip
def test_what_is_rare_comes_back_too(tmp_path: Path, facts: list[Fact]) -> None:
    model = Memory()
    model.note([accepted(0), *facts], {"n": 1})
    assert plain(after(tmp_path / "j", [accepted(0), *facts])) == plain(model.remembered())


def test_a_run_that_was_finished_goes_on_with_its_next_generation(tmp_path: Path) -> None:
    assert after(tmp_path / "j", [Finished(pending=False)]).was_finished
    gone_on = after(tmp_path / "k", [Finished(pending=False)], [GenerationBegan(5, 3)])
    assert not gone_on.was_finished


def test_what_lies_elsewhere_keeps_no_segment(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    with opened(directory, BATCH, segment_bytes=1 << 16) as (journal, listener, _):
        journal.append([accepted(0, stored=OBJECTS[0])], {})
        for at in range(1, 100):
            gone = Dropped((at,), DropReason.STALE)
            listener.wait(journal.append([accepted(at, tokens=512), gone], {}))
        assert (journal.statistics().live_samples, journal.statistics().live_bytes) == (0, 0)
        assert journal.statistics().segments <= 4
    (entry,) = recovered(directory, segment_bytes=1 << 16).entries
    assert entry.sample == accepted(0, stored=OBJECTS[0]).entry.sample


def test_what_a_forgotten_producer_said_is_forgotten(tmp_path: Path) -> None:
    said: list[Fact] = [EndsReported(name, 1, ended=False) for name in ("a", "b", "c")]
    assert set(after(tmp_path / "j", said, max_producers=2).ends) == {"b", "c"}


def test_names_may_be_long_and_strange(tmp_path: Path) -> None:
    name = "\N{BUG}" * 128
    found = after(tmp_path / "j", [accepted(0, producer=name, given_id=name), FloorRaised(name, 0)])
    assert found.given_ids == (name,)
    assert list(found.producers) == [name]


def test_the_longest_silent_producer_is_forgotten(tmp_path: Path) -> None:
    facts: list[Fact] = [FloorRaised(name, 1) for name in ("a", "b", "a", "c")]
    assert set(after(tmp_path / "j", facts, max_producers=2).producers) == {"a", "c"}


def test_numbers_of_batches_go_on_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, _, _):
        assert [journal.append([], {}) for _ in range(3)] == [1, 2, 3]
    with opened(tmp_path / "j") as (journal, listener, _):
        assert journal.statistics().durable_lsn == 3
        assert journal.append([], {}) == 4
        listener.wait(4)


def test_a_sample_may_be_larger_than_a_segment(tmp_path: Path) -> None:
    found = after(tmp_path / "j", [accepted(0), accepted(1, tokens=10_000), accepted(2)])
    assert [span_of(e.sample) for e in found.entries][1] == payload_of(1, 80_000)


def test_a_schema_is_written_once(tmp_path: Path) -> None:
    copy = Schema(tuple(SCHEMAS[0].fields))
    with opened(tmp_path / "j") as (journal, listener, _):
        for ticket in range(3):
            lsn = journal.append([accepted(ticket, schema=copy)], {})
        listener.wait(lsn)
        assert len(journal._store.state.schemas) == 1
    found = recovered(tmp_path / "j").entries
    assert found[0].sample.schema is found[2].sample.schema


def test_facts_that_contradict_the_journal_break_it(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, listener, _):
        journal.append([Committed(5)], {})
        assert "step 5 is not open" in str(listener.wait_broken())
        with pytest.raises(JournalError, match="step 5"):
            journal.append([], {})


def test_totals_must_be_json(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, listener, _):
        with pytest.raises(TypeError):
            journal.append([accepted(0)], {"a": object()})
        listener.wait(journal.append([accepted(0)], {}))


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, _, _):
        journal.append([accepted(0)], {})
        assert journal.close()
        with pytest.raises(JournalError, match="closed"):
            journal.append([], {})
        assert isinstance(journal, Journal)
