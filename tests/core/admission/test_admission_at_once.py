"""A push that is decided as a whole is decided as sample by sample, whatever is in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.effects import Effect, PushBlocked
from rollout_dispatcher.core.facts import Accepted, Fact
from rollout_dispatcher.sample import DType, Field, Schema
from tests.support.core.admissions import Lobby
from tests.support.examples import examples
from tests.support.samples import make_sample

#: What caps a buffer first: samples, tokens, or bytes (eight a token), in memory or in payload
#: stores; what a sample may have.
LIMITS = [
    BufferLimits(samples=8, group=3, tokens=None, nbytes=1000, max_sample_tokens=15),
    BufferLimits(samples=20, group=3, tokens=25, nbytes=1000, max_sample_tokens=50),
    BufferLimits(samples=20, group=3, tokens=None, nbytes=200, max_sample_tokens=50),
    BufferLimits(20, 3, None, 200, 50, stores=frozenset({"files"}), referenced_bytes=150),
]
OTHER = Schema((Field("input_ids", DType.INT64), Field("reward", DType.FLOAT32, per_token=False)))


class SampleBySample(Admission):
    """Decides nothing as a whole."""

    def _decide_samples(self, push: Push, now: float, *, in_line: bool) -> None:
        self._decide_each(push, now, in_line=in_line)


@dataclass
class Side:
    """An admission, and what can be seen of it."""

    kind: type[Admission]
    limits: BufferLimits

    def __post_init__(self) -> None:
        self.facts: list[Fact] = []
        self.next_number = 0
        lobby = Lobby(self.limits, 6, id_horizon=3, note=self.facts.append, kind=self.kind)
        self.buffer, self.admission, self.totals = lobby.buffer, lobby.admission, lobby.totals

    def seen(self, effects: Sequence[Effect]) -> object:
        buffer = self.buffer
        return (
            [_shown(effect) for effect in effects],
            [_shown(fact) for fact in self.facts],
            [(entry.ticket, entry.group, entry.sample.sample_id) for entry in buffer.ready(99)],
            (len(buffer), buffer.held.tokens, buffer.held.nbytes, buffer.held.referenced),
            len(buffer.groups),
            str(self.admission.capacity.blocking_cap),
            self.totals.as_json(),
            len(self.admission.blocked),
        )


def _shown(what: Effect | Fact) -> str:
    """An effect or a fact in words; an error is equal to no other, its words are."""
    if isinstance(what, PushBlocked):
        return f"{what.producer} {what.first_seq} held: {what.full}"
    if isinstance(what, Accepted):
        return f"{what.entry} {what.producer} {what.seq} {what.given_id}"
    return repr(what)


Act = Callable[[Side], Sequence[Effect]]
#: What is odd about a sample: it finds no room at times, or is never accepted, or has a group.
_odd = st.one_of(
    st.builds(dict, tokens=st.sampled_from([0, 16, 26, 51])),
    st.just({"loss_tokens": 9}),
    st.just({"schema": OTHER}),
    st.builds(dict, policy_version=st.integers(0, 3)),
    st.builds(dict, group_id=st.sampled_from(["g", "h"]), group_size=st.integers(1, 4)),
    st.just({"sample_id": "again"}),
    st.just({"sample_id": "again"}),
    st.just({"store": "files"}),
    st.just({"store": ""}),
    st.just({"store": "nobody's"}),
)


@st.composite
def _pushes(draw: st.DrawFn) -> Act:
    """The next samples of a producer or, at times, some of the last; few of them are odd.

    They are numbered, and have room for so many, as if a push had five samples.
    """
    producer = draw(st.sampled_from(["p", "p", "q", ""]))
    tokens = draw(st.lists(st.integers(1, 6), max_size=5))
    odd = draw(st.dictionaries(st.integers(0, 4), _odd, max_size=2))
    named, may_hold = draw(st.booleans()), draw(st.booleans())
    store = draw(st.sampled_from(["", "", "files"]))
    back, floor = draw(st.sampled_from([0, 0, 0, 1, 5])), draw(st.sampled_from([0, 0, 5, 10]))

    def act(side: Side) -> Sequence[Effect]:
        side.next_number += 5
        first = max(0, side.next_number - back)
        samples = tuple(
            make_sample(**{"sample_id": f"{first + at}", "tokens": count, "store": store} | odd_)
            for at, count in enumerate(tokens)
            for odd_ in [odd.get(at, {})]
        )
        push = Push(producer, first, samples, max(0, side.next_number - floor), named)
        return side.admission.push(push, 1.0, may_wait=may_hold)

    return act


def _take(count: int) -> Act:
    def act(side: Side) -> Sequence[Effect]:
        side.buffer.remove(side.buffer.ready(count))
        return side.admission.retry(2.0)

    return act


def _end(version: int) -> Act:
    """The phase before this version ends; after the last one, the stream does."""

    def act(side: Side) -> Sequence[Effect]:
        side.admission.eligibility.oldest_version = version
        return side.admission.shut_down("over") if version == 4 else ()

    return act


_acts = st.one_of(
    _pushes(),
    _pushes(),
    st.builds(_take, st.integers(1, 10)),
    st.builds(_end, st.sampled_from([1, 1, 2, 2, 3, 4])),
)


@examples(500)
@given(st.sampled_from(LIMITS), st.lists(_acts, min_size=4, max_size=12))
def test_both_ways_to_decide_come_to_the_same(limits: BufferLimits, acts: list[Act]) -> None:
    at_once, one_by_one = Side(Admission, limits), Side(SampleBySample, limits)
    for act in acts:
        assert at_once.seen(act(at_once)) == one_by_one.seen(act(one_by_one))
