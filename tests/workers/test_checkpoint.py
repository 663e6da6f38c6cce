"""A stream's part of a checkpoint: its state, and what a rank says when it has loaded one."""

import pytest

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import CheckpointRefused, StepContractError
from rollout_dispatcher.protocol import messages as m
from rollout_workers.stream import position_of
from tests.workers.rank.cores import connected, hear, spoken
from tests.workers.support.peers import rank_welcome, step


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "format None"),
        ({"format": 2, "run_id": "r", "step": 1}, "format 2, this release reads format 1"),
        ({"format": 1, "step": 1}, "run_id"),
        ({"format": 1, "run_id": "r", "step": -2}, "step"),
        ({"format": 1, "run_id": "r", "step": "1"}, "step"),
    ],
)
def test_what_is_no_state_is_a_clear_error(state: dict[str, object], why: str) -> None:
    with pytest.raises(CheckpointRefused, match=why):
        position_of(state)


POSITION = m.CheckpointPosition(run_id="run", step=4)


def test_a_rank_that_has_loaded_a_checkpoint_forgets_what_it_was_sent_and_says_hello_again() -> (
    None
):
    core = connected()
    hear(core, step(7))
    spoken(core)
    core.resume(POSITION)
    (said,) = spoken(core)
    assert isinstance(said, m.HelloRank)
    assert (said.generation, said.resume, said.received) == (1, POSITION, [])
    assert (
        hear(core, step(8), m.Release(step=8), m.End(reason=EndReason.ENDED)) == []
    )  # before it was heard
    assert core.end_reason is None
    hear(core, rank_welcome(committed=4))
    assert not core.resuming
    assert core.position == 4
    assert [type(word) for word in hear(core, step(5))] == [m.Prepared]


def test_a_reconnect_repeats_what_was_loaded_and_what_was_saved() -> None:
    core = connected()
    core.resume(POSITION)
    core.lost()
    assert core.hello().resume == POSITION
    hear(core, rank_welcome(committed=4))
    core.checkpoint_saved(4)
    core.checkpoint_saved(3)
    assert spoken(core) == [m.CheckpointSaved(step=4)]
    core.lost()
    assert (core.hello().resume, core.hello().saved) == (POSITION, 4)
    assert core.unconfirmed


def test_a_checkpoint_is_loaded_once_and_before_the_first_step() -> None:
    core = connected()
    core.resume(POSITION)
    spoken(core)
    core.resume(POSITION)
    assert spoken(core) == []
    with pytest.raises(StepContractError, match="after step 4 is loaded already"):
        core.resume(m.CheckpointPosition(run_id="run", step=5))
    late = connected()
    late.demand(hungry=True)
    with pytest.raises(StepContractError, match="load it before"):
        late.resume(POSITION)
