"""The cap of payload stores: it holds back what lies there; what is given up makes room there."""

import pytest

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.admissions import Lobby
from tests.support.core.worlds import NBYTES, STORE, TOKENS
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


def test_a_sample_that_never_fits_is_refused_alone() -> None:
    admission = lobby().admission
    too_large = there("a", 3 * TOKENS)
    assert push(admission, 0, too_large, there("b")) == [Outcome.REFUSED, A]
