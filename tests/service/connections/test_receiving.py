"""Memory for frames being received: a bound over all, a line that moves, nobody who holds it up."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_dispatcher.service.connections.receiving import (
    BEHIND_BYTES,
    MIN_RATE,
    SMALL_BYTES,
    Receiving,
)
from tests.support.examples import scaled

LIMIT = 8 * SMALL_BYTES
PATIENCE = 60.0


@dataclass(eq=False)
class Sender:
    """Somebody whose frame is received, by hand."""

    name: str = ""
    filled: int | None = 0
    lets: list[str] = field(default_factory=list)
    is_put_off: bool = False

    def let_in(self) -> None:
        self.lets.append(self.name)

    def pause_reading(self) -> None:
        self.is_put_off = True

    def resume_reading(self) -> None:
        self.is_put_off = False


def asks(receiving: Receiving, who: Sender, nbytes: int) -> bool:
    """As a connection does: in line if there is no room."""
    if receiving.claim(who, nbytes):
        return True
    receiving.wait(who, nbytes)
    return False


def queue(*sizes: int) -> tuple[Receiving, list[Sender], list[str]]:
    """Frames of these sizes that have asked, in order; the list fills with who is let in later."""
    receiving, lets = Receiving(LIMIT, PATIENCE), list[str]()
    senders = [Sender(str(at), 0, lets) for at in range(len(sizes))]
    for sender, size in zip(senders, sizes, strict=True):
        asks(receiving, sender, size)
    return receiving, senders, lets


def test_while_the_journal_is_behind_large_frames_are_put_off_and_small_ones_pass() -> None:
    receiving = Receiving(100 * BEHIND_BYTES, PATIENCE)
    whole, under_way, late, small = (Sender(name) for name in ("whole", "way", "late", "small"))
    asks(receiving, whole, BEHIND_BYTES + 1)
    asks(receiving, under_way, SMALL_BYTES)
    behind = receiving.queued(whole)
    receiving.done(whole)
    assert (under_way.is_put_off, list(receiving.waiting)) == (True, [under_way])
    assert not asks(receiving, late, SMALL_BYTES)
    assert asks(receiving, small, SMALL_BYTES - 1)
    assert not small.is_put_off
    assert receiving.claim_now(Sender("http"), SMALL_BYTES), "who cannot wait is not sent away"
    receiving.durable(behind)
    assert (under_way.is_put_off, late.lets, list(receiving.waiting)) == (False, ["late"], [])


def test_what_comes_in_small_parts_is_bounded_as_a_whole() -> None:
    receiving, many = Receiving(LIMIT, PATIENCE), [Sender() for _ in range(40)]
    for _ in range(10):
        for sender in many:
            receiving.claim_now(sender, SMALL_BYTES // 2)
    assert receiving.nbytes <= LIMIT + len(many) * SMALL_BYTES


def test_a_share_may_grow_as_long_as_there_is_room() -> None:
    receiving, one, other = Receiving(LIMIT, PATIENCE), Sender(), Sender()
    assert receiving.claim(one, SMALL_BYTES - 1)
    assert receiving.claim(other, LIMIT - SMALL_BYTES)
    assert receiving.claim(one, 1)
    assert not receiving.claim(one, SMALL_BYTES)
    receiving.done(one)
    assert receiving.claim(other, 2 * SMALL_BYTES), "alone it may be larger"
    receiving.done(other)
    assert receiving.nbytes == 0


# -- pace


def test_while_nobody_waits_a_frame_may_take_its_time() -> None:
    receiving, _, _ = queue(LIMIT)
    assert [receiving.too_slow(now) for now in (0.0, 100.0, 1e6)] == [[], [], []]


def test_a_frame_that_does_not_come_is_given_up_after_as_long_as_others_waited() -> None:
    receiving, (holder, _), _ = queue(LIMIT, LIMIT)
    assert receiving.too_slow(1000.0) == []
    assert receiving.too_slow(999.9 + PATIENCE) == []
    assert receiving.too_slow(1000.0 + PATIENCE) == [holder]


def test_a_frame_that_comes_fast_enough_is_left_alone() -> None:
    receiving, (holder, _), _ = queue(LIMIT, LIMIT)
    receiving.too_slow(0.0)
    for minute in range(1, 10):
        holder.filled = int(minute * PATIENCE * MIN_RATE)
        assert receiving.too_slow(minute * PATIENCE) == []
    holder.filled = int(10 * PATIENCE * MIN_RATE) - 1
    assert receiving.too_slow(10 * PATIENCE) == [holder]


def test_of_slow_frames_the_slowest_go_and_no_more_than_the_first_in_line_needs() -> None:
    receiving, senders, _ = queue(*[LIMIT // 4] * 4, LIMIT // 2, LIMIT // 4)
    receiving.too_slow(0.0)
    for at, sender in enumerate(senders[:4]):
        sender.filled = 100 - at
    assert receiving.too_slow(PATIENCE) == [senders[3], senders[2]]
    for sender in (senders[3], senders[2]):
        receiving.done(sender)
    assert receiving.too_slow(PATIENCE + 0.25) == [], "the others have as long again"
    assert receiving.too_slow(2 * PATIENCE) == senders[:2], "nothing came of these"


def test_all_frames_of_which_nothing_comes_are_given_up_together() -> None:
    receiving, senders, _ = queue(*[LIMIT // 4] * 4, LIMIT // 4)
    receiving.too_slow(0.0)
    senders[0].filled = 1
    assert receiving.too_slow(PATIENCE) == senders[1:4]


def test_time_in_which_a_frame_was_not_read_or_we_were_stopped_counts_for_nothing() -> None:
    receiving, (holder, _), _ = queue(LIMIT, LIMIT)
    receiving.too_slow(0.0)
    assert receiving.too_slow(PATIENCE, away=PATIENCE - 1) == []
    holder.filled = None
    assert receiving.too_slow(10 * PATIENCE) == []
    holder.filled = 0
    assert receiving.too_slow(11 * PATIENCE) == []
    assert receiving.too_slow(12 * PATIENCE - 1) == []
    assert receiving.too_slow(12 * PATIENCE) == [holder]


def test_the_next_frame_of_a_connection_is_not_judged_by_its_last() -> None:
    receiving, (holder, other), _ = queue(LIMIT, LIMIT)
    receiving.too_slow(0.0)
    receiving.done(holder)
    receiving.done(other)
    assert asks(receiving, holder, LIMIT)
    assert not asks(receiving, other, LIMIT)
    assert receiving.too_slow(PATIENCE) == []


class Ingress(RuleBasedStateMachine):
    """Frames come and go in any order: bounded, fair, and never stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.receiving = Receiving(LIMIT, PATIENCE)
        self.received: dict[Sender, int] = {}
        self.line: list[tuple[Sender, int]] = []
        self.lets: list[Sender] = []

    @rule(nbytes=st.integers(1, 3 * LIMIT) | st.integers(1, 2 * SMALL_BYTES))
    def ask(self, nbytes: int) -> None:
        sender = Asked(self)
        if asks(self.receiving, sender, nbytes):
            self.received[sender] = nbytes
        else:
            self.line.append((sender, nbytes))

    def let_in(self, sender: Sender) -> None:
        first, nbytes = self.line.pop(0)
        assert first is sender, "out of turn"
        self.received[sender] = nbytes

    @precondition(lambda self: self.received)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        sender = data.draw(st.sampled_from(list(self.received)))
        del self.received[sender]
        self.receiving.done(sender)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        sender, _ = gone = data.draw(st.sampled_from(self.line))
        self.line.remove(gone)
        self.receiving.done(sender)

    @invariant()
    def bounded(self) -> None:
        assert self.receiving.nbytes == sum(self.received.values())
        large = [size for size in self.received.values() if size >= SMALL_BYTES]
        assert len(large) <= 1 or sum(large) <= LIMIT

    @invariant()
    def nobody_waits_without_a_cause(self) -> None:
        assert list(self.receiving.waiting) == [sender for sender, _ in self.line]
        if self.line:
            _, nbytes = self.line[0]
            assert any(size >= SMALL_BYTES for size in self.received.values())
            assert self.receiving.nbytes + nbytes > LIMIT


class Asked(Sender):
    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._ingress = ingress

    def let_in(self) -> None:
        self._ingress.let_in(self)


TestIngress = Ingress.TestCase
TestIngress.settings = settings(max_examples=scaled(100), stateful_step_count=40)
