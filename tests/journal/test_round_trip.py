"""Every fact comes back, whether the journal was closed or its process killed."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollout_dispatcher.core.facts import (
    Committed,
    Dropped,
    DropReason,
    Fact,
    Finished,
    FloorRaised,
    GenerationBegan,
    GroupEnded,
    GroupSized,
    GroupSizeSet,
    PhaseEnded,
    Planned,
    ProducerKeyed,
    ProducerLeft,
    ProducerSaid,
    RecoveredState,
    Resumed,
    StreamEnded,
    VersionReported,
)
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.journal.records import Encoder
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.sample import Schema
from tests.journal.model import Model
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
from tests.support.samples import span_of


def after(directory: Path, *batches: list[Fact], **options: int) -> RecoveredState:
    """What is remembered after these batches and a kill."""
    with opened(directory, BATCH, **options) as (journal, listener, _):
        for facts in batches:
            lsn = journal.append(facts, {"n": 1})
        listener.wait(lsn)
        return recovered(as_if_killed(directory, directory.with_suffix(".killed")), **options)


def test_a_new_journal_remembers_nothing(tmp_path: Path) -> None:
    assert recovered(tmp_path / "journal") == RecoveredState()


def test_what_has_no_ragged_fields_is_written_as_by_releases_that_knew_of_none() -> None:
    facts = [accepted(0, schema=SCHEMAS[1], given_id="x"), accepted(1, schema=SCHEMAS[2])]
    schema, plain, ragged_schema, ragged = Encoder({}, float).batch(1, facts, {}).rows
    assert [len(field) for field in schema[2]] == [4, 4]
    assert (len(plain), plain[-2:]) == (19, ["x", checksum_of("x")])
    assert [len(field) for field in ragged_schema[2]] == [5, 4, 5]
    assert ragged[-1] == facts[1].entry.sample.rows == (1, 2)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_sample_comes_back_whole(tmp_path: Path, schema: Schema) -> None:
    fact = accepted(7, schema=schema, given_id="x", group=7, version=3)
    found = after(tmp_path / "j", [fact])
    (entry,) = found.entries
    assert entry.sample == fact.entry.sample._replace(checksum=None), "kept with its id"
    assert (entry.ticket, entry.arrived, entry.group, entry.skips) == (7, 7 / 8, 7, 0)
    assert found.next_ticket == 8
    assert found.checksums == (checksum_of("x"),)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_where_a_sample_lies_comes_back(tmp_path: Path, schema: Schema) -> None:
    facts = [
        accepted(at, schema=schema, stored=stored, given_id=f"näme {at}")
        for at, stored in enumerate([OBJECTS[0], None, OBJECTS[0], OBJECTS[1], OBJECTS[0]])
    ]
    found = after(tmp_path / "j", [*facts[:2]], [*facts[2:]])
    again = recovered(tmp_path / "j")  # it was closed: all of it is in the index
    for entries in (found.entries, again.entries):
        assert [entry.sample for entry in entries] == [
            fact.entry.sample._replace(checksum=None) for fact in facts
        ]
    one, other = (again.entries[at].sample.payload for at in (0, 4))
    assert isinstance(one, Reference)
    assert isinstance(other, Reference)
    assert one.stored is other.stored


STEP = Planned(0, "a", 0.0, (((0, 1),),), ())
#: Batches of facts, by what they are an example of.
HISTORIES: dict[str, list[list[Fact]]] = {
    "tickets out of order": [[accepted(2)], [accepted(0, producer="a")], [accepted(1)]],
    "an open step": [
        [*map(accepted, range(6)), Planned(3, "abc", 2.5, (((2, 0), (3,)), ((1,), (4,))), (5,))]
    ],
    "a step with blocks": [
        [
            *map(accepted, range(2)),
            Planned(0, "a", 0.0, (((0, 1),), ((),)), (), 0, 0.0, ((2,), (2,))),
        ]
    ],
    "a step with blocks planned again without": [
        [accepted(0), Planned(0, "a", 0.0, (((0,),), ((),)), (), 1, 2.5, ((2,), (2,)))],
        [replace(STEP, micro_batches=(((0,),), ((),)))],
    ],
    "a step of which a sample is lost": [
        [accepted(0), accepted(1), STEP],
        [Dropped((0,), DropReason.STALE)],
    ],
    "a step planned again": [
        [accepted(0), accepted(1), accepted(2), replace(STEP, passed_over=(2,))],
        [replace(STEP, digest="b", micro_batches=(((1,),), ((),), ((0,),)))],
    ],
    "samples done with": [
        [accepted(0), accepted(1), accepted(2), Planned(0, "d", 0.0, (((0,),),), (1, 2))],
        [Committed(0), Dropped((2,), DropReason.STALE)],
    ],
    "numbers of a producer": [[accepted(1), accepted(2), accepted(9), FloorRaised("p", 2)]],
    "sizes told late": [
        [*(accepted(at, group=7 + at // 2) for at in range(3)), GroupSized((0, 1), 5)]
    ],
    "words of producers": [
        [
            *(ProducerSaid("a", phase, ended=False) for phase in (1, 3)),
            *(ProducerSaid(name, 4, ended=True) for name in "bc"),
            ProducerSaid("c", 0, ended=False),
        ]
    ],
    "producers that left": [
        [ProducerLeft(name) for name in "abc"],
        [accepted(0, producer="a"), ProducerSaid("b", 1, ended=False)],
    ],
    "keys of producers": [[ProducerKeyed(name, name * 32) for name in "ab"], [FloorRaised("a", 2)]],
    "more ids than are remembered": [[accepted(at, given_id=f"{at}") for at in range(5)]],
    "more groups than are remembered": [
        [GroupEnded(f"g\N{BUG}{at}", "closed" * (at % 2)) for at in range(5)]
    ],
    "single values": [
        [GenerationBegan(4, 3), VersionReported(7, 5), PhaseEnded(8), GroupSizeSet(6)],
        [StreamEnded(), Finished(pending=True)],
    ],
    "weights that went back": [
        [accepted(0), accepted(1), STEP, VersionReported(7, 1), Committed(0, retained=True)],
        [Resumed(-1)],
    ],
    "phases that nobody waits for": [
        [PhaseEnded(1), PhaseEnded(3), PhaseEnded(5)],
        [accepted(0, version=2)],
    ],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_what_facts_add_up_to_comes_back_after_a_kill_and_after_a_close(
    tmp_path: Path, name: str
) -> None:
    model = Model(id_horizon=3)
    for facts in HISTORIES[name]:
        model.apply(facts, {"n": 1})
    assert plain(after(tmp_path / "j", *HISTORIES[name], id_horizon=3)) == model.plain()
    assert plain(recovered(tmp_path / "j", id_horizon=3)) == model.plain()


def test_a_run_that_was_finished_goes_on_with_its_next_generation(tmp_path: Path) -> None:
    assert after(tmp_path / "j", [Finished(pending=False)]).was_finished
    gone_on = after(tmp_path / "k", [Finished(pending=False)], [GenerationBegan(5, 3)])
    assert not gone_on.was_finished


def test_an_object_is_written_once_for_samples_that_follow_each_other() -> None:
    stored, facts = OBJECTS[0], [accepted(at, stored=OBJECTS[0]) for at in range(3)]
    encoder = Encoder({}, float)
    for batch in (encoder.batch(1, facts, {}), encoder.batch(2, facts, {})):
        kinds = [row[0] for row in batch.rows if row[0] != "schema"]
        assert kinds == ["object", *3 * ["referenced"]]
        assert ["object", stored.store, stored.key, stored.nbytes] in batch.rows
        assert batch.nbytes == 0
        assert batch.payloads == []


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


def test_skips_counted_by_the_core_meanwhile_are_not_counted_twice(tmp_path: Path) -> None:
    fact = accepted(0)
    with opened(tmp_path / "j") as (journal, listener, _):
        journal.append([fact], {})
        fact.entry.skips += 1
        listener.wait(journal.append([Planned(0, "d", 0.0, ((),), (0,))], {}))
    assert [entry.skips for entry in recovered(tmp_path / "j").entries] == [1]


def test_what_a_forgotten_producer_said_is_forgotten(tmp_path: Path) -> None:
    said: list[Fact] = [ProducerSaid(name, 1, ended=False) for name in ("a", "b", "c")]
    assert set(after(tmp_path / "j", said, max_producers=2).words) == {"b", "c"}


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
