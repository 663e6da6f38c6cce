"""Claims about turns, in virtual time: short, fair, and nobody is left out."""

from collections import Counter

from rollout_dispatcher.transport.turns import TURN_SECONDS, Turns

MS = 0.001


class Loop:
    """An event loop by hand; each peer takes as long as it is said to."""

    def __init__(self, took: dict[int, float]) -> None:
        self.now, self.took = 0.0, took
        self.turns = Turns(lambda: self.now)

    def turn(self, ready: list[int], waited: float = 0.0) -> list[int]:
        """One turn in which these are ready; returns who was served, in order."""
        asked = self.now
        self.now += waited
        self.turns.begin(asked)
        served = []
        for peer in self.turns.in_order(ready):
            if self.turns.serve(peer) is not None:
                served.append(peer)
                self.now += self.took[peer]
                self.turns.took(peer, self.took[peer])
        return served


def test_who_takes_little_is_served_before_any_flood_is_served_twice() -> None:
    floods, quiet = list(range(16)), 99
    loop = Loop({**dict.fromkeys(floods, 1.5 * MS), quiet: 0.1 * MS})
    for _ in range(20):
        loop.turn(floods)
    for _ in range(20):
        before = Counter[int]()
        while quiet not in (served := loop.turn([*floods, quiet])):
            before.update(served)
        assert set(before.values()) <= {1}
        loop.turn(floods)


def test_a_turn_is_over_in_time_but_for_what_its_last_peer_takes() -> None:
    loop = Loop(dict.fromkeys(range(16), 3 * MS))
    for _ in range(50):
        began = loop.now
        loop.turn(list(range(16)))
        assert loop.now - began <= TURN_SECONDS + 3 * MS


def test_somebody_is_served_in_each_turn_however_long_all_else_takes() -> None:
    loop = Loop({1: MS, 2: MS})
    for _ in range(10):
        loop.turns.begin(loop.now)
        line = loop.turns.in_order([1, 2])
        loop.now += 1.0  # a plan, say
        assert [loop.turns.serve(peer) is not None for peer in line] == [True, False]


def test_floods_share_the_time_whatever_each_takes_at_once() -> None:
    loop = Loop({1: 0.5 * MS, 2: 4 * MS, 3: 8 * MS})
    served = Counter(peer for _ in range(2000) for peer in loop.turn([1, 2, 3]))
    assert abs(served[2] * 4 - served[3] * 8) <= 8
    assert served[1] >= 1990, "who takes less than his share is served in each turn"


def test_who_flooded_alone_owes_nothing_to_who_comes_later() -> None:
    loop = Loop({1: 2 * MS, 2: 2 * MS})
    for _ in range(1000):
        loop.turn([1])
    served = Counter(peer for _ in range(100) for peer in loop.turn([1, 2]))
    assert abs(served[1] - served[2]) <= 1


def test_a_message_is_timed_from_when_it_may_have_been_there() -> None:
    loop = Loop({1: 3 * MS, 2: 3 * MS, 3: 0.0})
    loop.turn([1], waited=5.0)
    assert loop.turns.serve(1) == 5.0, "nothing was ready before the wait was over"
    loop.turn([2])
    looked = loop.now - 3 * MS
    loop.turns.begin(loop.now)
    assert loop.turns.serve(3) == looked, "it may have come at any time since it was looked last"


def test_who_is_put_off_is_timed_from_when_it_was_seen_first() -> None:
    loop = Loop({1: 6 * MS, 2: 6 * MS, 3: 6 * MS})
    assert loop.turn([1, 2, 3], waited=1.0) == [1]
    assert loop.turn([2, 3]) == [2]
    loop.turns.begin(loop.now)
    assert loop.turns.serve(3) == 1.0


def test_who_comes_later_under_the_same_number_was_not_put_off() -> None:
    loop = Loop({1: 6 * MS, 2: 6 * MS})
    assert loop.turn([1, 2], waited=1.0) == [1]
    loop.turns.forget(2)
    began = loop.now
    loop.turns.begin(began)
    loop.now = began + 100.0
    asked, loop.now = loop.now, loop.now + 5.0
    loop.turns.begin(asked)
    assert loop.turns.serve(2) == loop.now
