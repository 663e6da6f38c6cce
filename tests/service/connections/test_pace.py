"""The least pace of a frame that nobody waits for: who drips is ended, who sleeps is not."""

from dataclasses import dataclass

from rollout_dispatcher.service.connections.pace import FLOOR_RATE, LOOKS, Pace

PATIENCE, SILENCE = 60.0, 300.0
LOOK = PATIENCE / LOOKS
ENOUGH = int(FLOOR_RATE * PATIENCE)


@dataclass(eq=False)
class Sender:
    """Somebody whose frame is received, by hand."""

    frame: int = 0
    filled: int | None = 1

    @property
    def arriving(self) -> tuple[int, int] | None:
        return None if self.filled is None else (self.frame, self.filled)

    def gets(self, nbytes: int) -> None:
        assert self.filled is not None
        self.filled += nbytes


def ended_after(pace: Pace, sender: Sender, rate: float, *, most: float, away: float = 0) -> float:
    """Seconds until a frame that comes at this rate is ended; infinity for not within `most`."""
    start = now = 1000.0
    pace.too_slow([sender], now)
    while now - start < most:
        now += LOOK + away
        sender.gets(int(rate * LOOK))
        if pace.too_slow([sender], now, away):
            return now - start
    return float("inf")


def test_a_frame_that_drips_is_ended_when_its_time_is_over() -> None:
    assert ended_after(Pace(PATIENCE, SILENCE), Sender(), 1, most=3600) == PATIENCE


def test_a_frame_that_comes_at_the_least_pace_may_take_as_long_as_it_takes() -> None:
    assert ended_after(Pace(PATIENCE, SILENCE), Sender(), FLOOR_RATE, most=3600) == float("inf")


def test_a_frame_is_judged_by_its_last_minute_and_not_by_its_first() -> None:
    pace, sender = Pace(PATIENCE, SILENCE), Sender()
    sender.filled = 1000 * ENOUGH
    assert ended_after(pace, sender, 1, most=3600) == PATIENCE


def test_each_frame_has_its_own_time() -> None:
    pace, sender, now = Pace(PATIENCE, SILENCE), Sender(), 1000.0
    for number in range(100):  # always in the midst of a frame, of which little is here
        sender.frame, sender.filled = number, 1
        assert pace.too_slow([sender], now) == []
        now += LOOK


def test_a_client_that_was_stopped_in_the_midst_of_a_frame_goes_on() -> None:
    pace, sender, now = Pace(PATIENCE, SILENCE), Sender(), 1000.0
    pace.too_slow([sender], now)
    for _ in range(int(0.8 * SILENCE / LOOK)):
        now += LOOK
        assert pace.too_slow([sender], now) == []
    sender.gets(ENOUGH)
    now += LOOK
    assert pace.too_slow([sender], now) == []


def test_silence_has_a_bound_however_it_is_broken() -> None:
    pace, sender, now = Pace(PATIENCE, SILENCE), Sender(), 1000.0
    pace.too_slow([sender], now)
    while not pace.too_slow([sender], now):
        now += LOOK
        if int(now) % 100 == 0:
            sender.gets(1)
        assert now < 1000 + SILENCE + 3 * PATIENCE


def test_time_in_which_we_were_stopped_or_did_not_read_counts_for_nothing() -> None:
    stopped = ended_after(Pace(PATIENCE, SILENCE), Sender(), 1, most=36000, away=100)
    assert stopped == LOOKS * (LOOK + 100)
    pace, sender, now = Pace(PATIENCE, SILENCE), Sender(), 1000.0
    for filled in (1, None) * 20:
        sender.filled = filled
        assert pace.too_slow([sender], now) == []
        now += PATIENCE / 2


def test_it_looks_now_and_then_and_forgets_who_is_gone() -> None:
    pace, sender = Pace(PATIENCE, SILENCE), Sender()
    assert pace.too_slow([sender], 1000.0) == []
    sender.gets(1)
    assert pace.too_slow([], 1000.0 + LOOK) == []
    assert pace.too_slow([sender], 1000.0 + 2 * PATIENCE) == [], "it is as good as new"
