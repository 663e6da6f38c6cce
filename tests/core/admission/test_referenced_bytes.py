"""The cap of payload stores: it holds back what lies there; what is given up makes room there."""

import pytest

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.effects import GroupEvicted, PushAnswered
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.admissions import Lobby
from tests.support.core.worlds import NBYTES, STORE, TOKENS, World
from tests.support.samples import make_sample

A = Outcome.ACCEPTED


def lobby(batch: int = 9, samples: int = 9) -> Lobby:
    """Two samples have room in memory, and two in payload stores."""
    limits = BufferLimits(
        samples, samples, None, 2 * NBYTES, 100,
        stores=frozenset({STORE}), referenced_bytes=2 * NBYTES,
    )  # fmt: skip
    return Lobby(limits, batch, credits_=9)


def here(name: str) -> Sample:
    return make_sample(name, TOKENS)


def there(name: str, tokens: int = TOKENS) -> Sample:
    return make_sample(name, tokens, store=STORE)


def push(admission: Admission, first: int, *samples: Sample) -> list[Outcome | None]:
    """What becomes of each for now; None: it waits."""
    pushed = Push("p", first, samples)
    admission.push(pushed, 0.0, may_wait=True)
    return list(pushed.outcomes)


@pytest.mark.parametrize("order", [here, there])
def test_a_cap_holds_back_what_it_counts_and_nothing_else(order: object) -> None:
    first, other = (here, there) if order is here else (there, here)
    admission = lobby().admission
    assert push(admission, 0, first("a"), first("b")) == [A, A]
    assert push(admission, 2, first("c"), other("d"), first("e"), other("f")) == [None, A, None, A]
    assert admission.capacity.blocking_cap is not None
    assert admission.capacity.blocking_cap.cap == ("bytes" if order is here else "referenced-bytes")
    assert push(admission, 6, other("g")) == [None]


def test_what_leaves_lets_in_as_much_as_it_had_there() -> None:
    lot = lobby(batch=2)
    assert push(lot.admission, 0, there("a"), there("b")) == [A, A]
    assert push(lot.admission, 2, there("c"), there("d", 2 * TOKENS)) == [None, None]
    lot.buffer.remove(lot.buffer.ready(1))
    assert lot.admission.retry(0.0) == []
    assert lot.buffer.held.referenced == 2 * NBYTES
    lot.buffer.remove(lot.buffer.ready(2))
    assert lot.buffer.held.referenced == 0
    (answer,) = lot.admission.retry(0.0)
    assert isinstance(answer, PushAnswered)
    assert answer.outcomes == (A, A)


def test_who_is_first_in_line_at_once_comes_in_unless_a_cap_holds_it_back() -> None:
    lot = lobby(batch=2)
    assert push(lot.admission, 0, there("a"), there("b")) == [A, A]
    assert push(lot.admission, 2, there("c")) == [None]
    assert push(lot.admission, 3, there("d")) == [None]
    lot.buffer.remove(lot.buffer.ready(1))
    assert len(lot.admission.retry(0.0)) == 1  # c, so that it is the turn of others
    (answer,) = lot.admission.push(Push("q", 0, (here("e"),)), 0.0, may_wait=True)
    assert isinstance(answer, PushAnswered)
    assert answer.outcomes == (A,)
    assert push(lot.admission, 4, here("f")) == [None]


def test_a_sample_that_never_fits_is_refused_alone() -> None:
    admission = lobby().admission
    too_large = there("a", 3 * TOKENS)
    assert push(admission, 0, too_large, there("b")) == [Outcome.REFUSED, A]


def test_the_youngest_group_that_makes_room_there_is_given_up() -> None:
    world = World(batch=3, referenced_bytes=2 * NBYTES)
    world.join()
    for group, store in (("old", STORE), ("young", STORE), ("inline", "")):
        world.pushes("p", group_id=group, group_size=3, store=store)
    world.pushes("q", store=STORE)
    given_up: list[GroupEvicted] = []
    for _ in range(8):
        world.now += 1e9
        decision = world.core.tick(world.now)
        given_up += [effect for effect in decision.effects if isinstance(effect, GroupEvicted)]
    assert [(effect.group_id, effect.cap.cap) for effect in given_up] == [
        ("young", "referenced-bytes")
    ]
    at = world.core.statistics()
    assert (at.buffered, at.open_groups, at.pushes_held) == (3, 2, 0)
    assert at.balanced
