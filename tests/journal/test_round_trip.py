"""Every fact comes back, whether the journal was closed or its process killed."""

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


def test_samples_come_back_in_the_order_of_their_tickets(tmp_path: Path) -> None:
    found = after(tmp_path / "j", [accepted(2)], [accepted(0)], [accepted(1)])
    assert [entry.ticket for entry in found.entries] == [0, 1, 2]


def test_an_open_step_has_the_same_micro_batches_and_digest(tmp_path: Path) -> None:
    ranks = (((2, 0), (3,)), ((1,), (4,)))
    found = after(
        tmp_path / "j",
        [*(accepted(ticket) for ticket in range(6)), Planned(3, "abc", 2.5, ranks, (5,))],
    )
    (step,) = found.steps
    tickets = tuple(tuple(tuple(e.ticket for e in part) for part in r) for r in step.micro_batches)
    assert tickets == ranks
    assert (step.number, step.digest, step.planned_at) == (3, "abc", 2.5)
    assert span_of(step.micro_batches[0][0][0].sample) == payload_of(2, 32)
    assert [(entry.ticket, entry.skips) for entry in found.entries] == [(5, 1)]
    assert found.next_step == 4


def test_a_step_that_is_planned_again_gives_back_what_it_leaves_out(tmp_path: Path) -> None:
    found = after(
        tmp_path / "j",
        [accepted(0), accepted(1), Planned(0, "a", 0.0, (((0, 1),),), ())],
        [Planned(0, "b", 1.0, (((1,),),), ())],
    )
    assert [step.digest for step in found.steps] == ["b"]
    assert [entry.ticket for entry in found.entries] == [0]


def test_what_is_dropped_inside_a_step_leaves_it(tmp_path: Path) -> None:
    found = after(
        tmp_path / "j",
        [accepted(0), accepted(1), Planned(0, "a", 0.0, (((0, 1),),), ())],
        [Dropped((0,), DropReason.STALE)],
    )
    assert [e.ticket for e in found.steps[0].micro_batches[0][0]] == [1]


def test_committed_and_dropped_samples_are_gone(tmp_path: Path) -> None:
    found = after(
        tmp_path / "j",
        [accepted(0), accepted(1), accepted(2), Planned(0, "d", 0.0, (((0,),),), (1, 2))],
        [Committed(0), Dropped((2,), DropReason.STALE)],
    )
    assert [entry.ticket for entry in found.entries] == [1]
    assert (found.steps, found.next_ticket, found.next_step) == ((), 3, 1)


def test_a_step_that_is_planned_again_has_the_new_plan(tmp_path: Path) -> None:
    plan = Planned(0, "d", 0.0, (((0,),), ((1,),)), (2,))
    again = Planned(0, "e", 0.0, (((1,),), ((),), ((0,),)), ())
    found = after(tmp_path / "j", [accepted(0), accepted(1), accepted(2), plan], [again])
    (step,) = found.steps
    parts = [[[entry.ticket for entry in part] for part in rank] for rank in step.micro_batches]
    assert (step.number, step.digest, parts) == (0, "e", [[[1]], [[]], [[0]]])
    assert [(entry.ticket, entry.skips) for entry in found.entries] == [(2, 1)]


def test_skips_counted_by_the_core_meanwhile_are_not_counted_twice(tmp_path: Path) -> None:
    fact = accepted(0)
    with opened(tmp_path / "j") as (journal, listener, _):
        journal.append([fact], {})
        fact.entry.skips += 1
        listener.wait(journal.append([Planned(0, "d", 0.0, ((),), (0,))], {}))
    assert [entry.skips for entry in recovered(tmp_path / "j").entries] == [1]


def test_producers_keep_their_floor_and_what_is_above(tmp_path: Path) -> None:
    found = after(tmp_path / "j", [accepted(1), accepted(2), accepted(9), FloorRaised("p", 2)])
    assert found.producers == {"p": (2, frozenset({2, 9}))}


def test_a_sample_keeps_its_producer(tmp_path: Path) -> None:
    facts: list[Fact] = [accepted(0, producer="a"), accepted(1, producer="b")]
    assert [entry.producer for entry in after(tmp_path / "j", facts).entries] == ["a", "b"]
    assert [entry.producer for entry in recovered(tmp_path / "j").entries] == ["a", "b"]


def test_a_group_whose_size_is_told_late_keeps_it(tmp_path: Path) -> None:
    facts = [accepted(0, group=7), accepted(1, group=7), accepted(2, group=8)]
    found = after(tmp_path / "j", [*facts, GroupSized((0, 1), 5)])
    assert [entry.sample.group_size for entry in found.entries] == [5, 5, 2]
    again = recovered(tmp_path / "j")
    assert [entry.sample.group_size for entry in again.entries] == [5, 5, 2]


def test_what_producers_said_last_is_remembered(tmp_path: Path) -> None:
    said: list[Fact] = [
        ProducerSaid("a", 1, ended=False),
        ProducerSaid("a", 3, ended=False),
        ProducerSaid("b", 2, ended=True),
        ProducerSaid("c", 4, ended=True),
        ProducerSaid("c", 0, ended=False),
        FloorRaised("d", 1),
    ]
    words = {"a": (3, False), "b": (2, True)}
    assert after(tmp_path / "j", said).words == words
    assert recovered(tmp_path / "j").words == words


def test_a_producer_that_left_and_did_not_push_again_is_not_waited_for(tmp_path: Path) -> None:
    left = [ProducerLeft(name) for name in ("a", "b", "c")]
    found = after(tmp_path / "j", [*left, accepted(0, producer="a"), ProducerSaid("b", 1, False)])
    assert found.left == {"c"}
    assert recovered(tmp_path / "j").left == {"c"}


def test_a_producers_key_is_remembered_as_long_as_its_floor(tmp_path: Path) -> None:
    keyed: list[Fact] = [ProducerKeyed(name, name * 32) for name in ("a", "b")]
    found = after(tmp_path / "j", [*keyed, FloorRaised("a", 2)])
    assert found.keys == {"a": "a" * 32, "b": "b" * 32}
    assert found.producers == {"a": (2, frozenset()), "b": (0, frozenset())}
    assert recovered(tmp_path / "j").keys == found.keys


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


def test_given_ids_are_remembered_up_to_the_horizon(tmp_path: Path) -> None:
    for first in (0, 5):
        with opened(tmp_path / "j", id_horizon=3) as (journal, _, _):
            journal.append([accepted(first + at, given_id=f"{first + at}") for at in range(5)], {})
    assert recovered(tmp_path / "j", id_horizon=3).given_ids == ("7", "8", "9")
    assert recovered(tmp_path / "j", id_horizon=2).given_ids == ("8", "9")


def test_groups_that_have_ended_are_remembered_up_to_the_horizon(tmp_path: Path) -> None:
    ended: list[Fact] = [GroupEnded(f"g\N{BUG}{at}", "closed" * (at % 2)) for at in range(10)]
    for first in (0, 5):
        with opened(tmp_path / "j", id_horizon=3) as (journal, _, _):
            journal.append(ended[first : first + 5], {})
    newest = (("g\N{BUG}7", "closed"), ("g\N{BUG}8", ""), ("g\N{BUG}9", "closed"))
    assert recovered(tmp_path / "j", id_horizon=3).ended_groups == newest


def test_the_single_values_come_back(tmp_path: Path) -> None:
    found = after(
        tmp_path / "j",
        [GenerationBegan(4, 3), VersionReported(7, 5), PhaseEnded(8), GroupSizeSet(6)],
        [StreamEnded(), Finished(pending=True)],
    )
    assert (found.generation, found.dp_size) == (4, 3)
    assert (found.policy_version, found.policy_step, found.ended) == (7, 5, True)
    assert (found.finished, found.was_finished) == (True, False)
    assert after(tmp_path / "k", [Finished(pending=False)]).was_finished
    gone_on = after(tmp_path / "l", [Finished(pending=False)], [GenerationBegan(5, 3)])
    assert not gone_on.was_finished
    assert found.group_size == 6
    assert (found.phases, found.totals) == ((8,), {"n": 1})


def test_weights_that_went_back_have_no_version(tmp_path: Path) -> None:
    plan = Planned(0, "d", 0.0, (((0,),),), ())
    found = after(
        tmp_path / "j",
        [accepted(0), plan, VersionReported(7, 1), Committed(0, retained=True), Resumed(-1)],
    )
    assert (found.policy_version, found.policy_step) == (None, None)


def test_a_phase_that_nobody_waits_for_is_forgotten_but_for_the_newest(tmp_path: Path) -> None:
    found = after(
        tmp_path / "j", [PhaseEnded(1), PhaseEnded(3), PhaseEnded(5)], [accepted(0, version=2)]
    )
    assert found.phases == (3, 5)


def test_closing_and_a_kill_leave_the_same(tmp_path: Path) -> None:
    facts: list[Fact] = [
        accepted(0, given_id="a"),
        accepted(1),
        Planned(0, "d", 1.0, (((0,),),), (1,)),
    ]
    killed = after(tmp_path / "j", facts)
    assert plain(killed) == plain(recovered(tmp_path / "j"))


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
