"""Who is tried behind the first in line: no fewer than all of those who may come in."""

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.effects import Effect
from tests.support.core.admissions import Lobby
from tests.support.examples import examples
from tests.support.samples import make_sample

#: Eight bytes a token; a step is never ready, so that everybody in line is asked.
LIMITS = BufferLimits(
    99, 5, None, nbytes=160, max_sample_tokens=20, stores=frozenset({"files"}), referenced_bytes=160
)
BATCH = 99


class AsksEverybody(Admission):
    """Tries every push in line, each time."""

    def _retry_behind(self, now: float) -> list[Effect]:
        return [
            effect
            for push in list(self.blocked)[1:]
            if push in self.blocked
            for effect in self._try(push, now)
        ]


Act = Callable[[Lobby, int], Sequence[Effect]]
_samples = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.sampled_from([None, None, *"ghijkl"]),
        st.sampled_from(["", "", "files"]),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def _pushes(draw: st.DrawFn) -> Act:
    producer, given = draw(st.sampled_from("pqr")), draw(_samples)

    def act(lobby: Lobby, at: int) -> Sequence[Effect]:
        samples = tuple(
            make_sample(f"{at}-{index}", tokens, group_id=group, group_size=4, store=store)
            for index, (tokens, group, store) in enumerate(given)
        )
        return lobby.admission.push(Push(producer, 10 * at, samples), 1.0, may_wait=True)

    return act


def _give_up(group_id: str, missing: int | None) -> Act:
    """Its members leave, and those that come are refused."""

    def act(lobby: Lobby, at: int) -> Sequence[Effect]:
        group = lobby.buffer.groups.get(group_id)
        if group is None:
            lobby.closed_groups.lack(group_id, "given up", missing)
        else:
            lobby.buffer.drop_group(group, "given up")
        return lobby.admission.retry(1.0)

    return act


def _take(count: int) -> Act:
    def act(lobby: Lobby, at: int) -> Sequence[Effect]:
        lobby.buffer.remove(lobby.buffer.ready(count))
        return lobby.admission.retry(1.0)

    return act


_groups = st.sampled_from("ghijkl")
_acts = st.one_of(
    _pushes(),
    _pushes(),
    st.builds(_give_up, _groups, st.sampled_from([None, 1, 2])),
    st.builds(_take, st.integers(1, 6)),
)


@examples(400)
@given(st.lists(_acts, min_size=4, max_size=25))
def test_who_is_not_worth_trying_would_not_have_come_in(acts: list[Act]) -> None:
    these, all_ = (Lobby(LIMITS, BATCH, kind=kind) for kind in (Admission, AsksEverybody))
    for at, act in enumerate(acts):
        assert _told(act(these, at)) == _told(act(all_, at))
        for lobby in (these, all_):
            while lobby.admission.retry(1.0):
                pass  # whatever has left the line is a reason to ask again
        assert _held(these) == _held(all_)


def _told(effects: Sequence[Effect]) -> list[str]:
    return sorted(map(repr, effects))


def _held(lobby: Lobby) -> tuple[list[str], int]:
    return [repr(push) for push in lobby.admission.blocked], len(lobby.buffer)
