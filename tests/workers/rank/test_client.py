"""A rank's client over a real socket: who waits for what, and what ends the wait."""

import logging
import threading
from pathlib import Path

import pytest

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import (
    ClientClosed,
    DispatcherUnreachable,
    GenerationFenced,
    StepContractError,
)
from rollout_dispatcher.protocol import messages as m
from rollout_workers.rank.client import RankClient, RankStep
from rollout_workers.rank.payload import arrays
from tests.workers.support.peers import (
    ScriptedDispatcher,
    micro_batch,
    rank_welcome,
    sample,
    step,
)


def rank_threads() -> set[threading.Thread]:
    """Those of DP ranks in this process: other tests' too, if one has left some."""
    return {thread for thread in threading.enumerate() if thread.name == "dispatcher-rank"}


def ids_of(taken: RankStep) -> list[list[int]]:
    return [arrays(r.payload, r.blocks)["input_ids"].tolist() for r in taken]


def taken_from(client: RankClient) -> RankStep:
    taken = client.next_step(10)
    assert taken is not None
    return taken


def test_a_waiting_loop_is_hungry_and_gets_the_step_when_it_is_released(
    dispatcher: ScriptedDispatcher,
) -> None:
    client, peer = dispatcher.rank()
    waiting = dispatcher.meanwhile(client.next_step)
    assert peer.expect(m.Demand) == m.Demand(taken=-1, hungry=True)
    peer.send(step(0, 2))
    assert peer.expect(m.Prepared) == m.Prepared(step=0, digest="d")
    assert not waiting.done()
    peer.send(m.Release(step=0))
    taken = waiting.result(10)
    assert taken is not None
    assert len(taken) == 2
    assert peer.expect(m.Demand) == m.Demand(taken=0, hungry=False)
    reading = dispatcher.meanwhile(ids_of, taken)
    peer.send_bytes(micro_batch(0, 0, sample([1, 2])))
    assert not reading.done()
    peer.send_bytes(micro_batch(0, 1, sample([3])))
    assert reading.result(10) == [[1, 2], [3]]
    assert ids_of(taken) == [[1, 2], [3]]
    taken.commit()
    assert peer.expect(m.Commit) == m.Commit(step=0)
    with pytest.raises(StepContractError, match="step 0 is committed"):
        ids_of(taken)


def test_close_delivers_the_last_commit_before_the_goodbye(dispatcher: ScriptedDispatcher) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1])
    taken_from(client).commit()
    closing = dispatcher.meanwhile(client.close)
    assert peer.wait_for(m.Commit).step == 0
    peer.acknowledge_bye()
    closing.result(10)
    with pytest.raises(ClientClosed):
        client.next_step()


def test_a_goodbye_without_an_answer_is_said_again_on_a_new_connection(
    dispatcher: ScriptedDispatcher,
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1])
    taken_from(client).commit()
    closing = dispatcher.meanwhile(client.close)
    peer.wait_for(m.Commit)
    peer.expect(m.Bye)
    peer.close()
    again = dispatcher.accept()
    assert again.welcome_rank().committed == 0
    again.acknowledge_bye()
    closing.result(10)


def test_a_close_after_the_end_delivers_the_last_commit_to_a_dispatcher_that_is_started_again(
    dispatcher: ScriptedDispatcher,
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1])
    taken = taken_from(client)
    peer.send(m.End(reason=EndReason.ENDED))
    taken.commit()
    assert client.next_step(10) is None
    closing = dispatcher.meanwhile(client.close)
    peer.wait_for(m.Commit)
    peer.close()
    for _ in range(3):
        dispatcher.accept().close()  # it does not serve yet
    again = dispatcher.accept()
    assert again.welcome_rank().committed == 0
    again.acknowledge_bye()
    closing.result(10)


def test_a_close_without_a_dispatcher_warns_of_what_it_may_not_know(
    dispatcher: ScriptedDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1])
    taken = taken_from(client)
    dispatcher.hang_up()
    taken.commit()
    with caplog.at_level(logging.WARNING):
        client.close()
    assert "may not know of the commit of step 0" in caplog.text


def test_after_a_loss_the_rank_goes_on_at_the_next_micro_batch(
    dispatcher: ScriptedDispatcher,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1], [2], count=3)
    taken = taken_from(client)
    batches = iter(taken)
    next(batches), next(batches)
    reading = dispatcher.meanwhile(next, batches)
    peer.expect(m.Demand)
    with caplog.at_level(logging.WARNING):
        peer.close()
        again = dispatcher.accept()
        hello = again.welcome_rank()
    assert (hello.generation, hello.taken, hello.received) == (1, 0, [(0, 2)])
    again.give(0, count=3)
    again.send_bytes(micro_batch(0, 2, sample([3])))
    reading.result(10)
    assert ids_of(taken) == [[1], [2], [3]]
    assert client.statistics().reconnects == 1
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("DP rank 0 has no connection to the dispatcher at ")
    assert said[1].startswith("DP rank 0 is connected to ")
    assert len(said) == 2


def test_what_happens_while_a_hello_is_on_its_way_is_said_after_the_welcome(
    dispatcher: ScriptedDispatcher,
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1])
    taken = taken_from(client)
    peer.close()
    again = dispatcher.accept()
    assert again.expect(m.HelloRank).committed == -1
    taken.commit()
    client.set_policy_version(7)
    waiting = dispatcher.meanwhile(client.next_step)
    assert again.hears_nothing(), "before the welcome"
    again.send(rank_welcome())
    assert again.expect(m.Commit).step == 0
    assert again.expect(m.PolicyVersion).policy_version == 7
    assert again.expect(m.Demand) == m.Demand(taken=0, hungry=True)
    again.send(m.End(reason=EndReason.ENDED))
    assert waiting.result(10) is None


def test_a_checkpoint_that_is_loaded_while_a_hello_is_on_its_way_is_told_in_another(
    dispatcher: ScriptedDispatcher,
) -> None:
    client, peer = dispatcher.rank()
    peer.close()
    again = dispatcher.accept()
    assert again.expect(m.HelloRank).resume is None
    loaded = m.CheckpointPosition(run_id="run", step=3)
    loading = dispatcher.meanwhile(client.resume, loaded)
    assert again.hears_nothing()
    again.send(rank_welcome())
    assert again.expect(m.HelloRank).resume == loaded
    again.send(step(0))
    client.checkpoint_saved(2)
    assert again.hears_nothing(), "between the second hello and its welcome"
    assert not loading.done()
    again.send(rank_welcome(committed=3))
    assert again.expect(m.CheckpointSaved).step == 2
    loading.result(10)
    assert client.position == 3
    again.give(4, [5])
    assert taken_from(client).header.step == 4


def test_training_goes_on_with_what_is_held_while_the_dispatcher_is_away(
    dispatcher: ScriptedDispatcher,
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1], [2])
    peer.give(1, [3])
    first = taken_from(client)
    assert ids_of(first) == [[1], [2]]
    peer.close()
    first.commit()
    second = taken_from(client)
    again = dispatcher.accept()
    hello = again.welcome_rank()
    assert (hello.taken, hello.committed) in {(0, -1), (0, 0), (1, 0)}
    assert second.header.step == 1


def test_a_fence_reaches_the_loop_in_next_and_between_micro_batches(
    dispatcher: ScriptedDispatcher,
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1], count=2)
    batches = iter(taken_from(client))
    next(batches)
    reading = dispatcher.meanwhile(next, batches)
    peer.send(m.Error(code="fenced", message="a newer process group took over"))
    with pytest.raises(GenerationFenced, match="newer process group"):
        reading.result(10)
    with pytest.raises(GenerationFenced):
        client.next_step()
    with pytest.raises(GenerationFenced):
        client.commit(0)


def test_closing_ends_a_wait_for_the_next_step(dispatcher: ScriptedDispatcher) -> None:
    client, peer = dispatcher.rank()
    waiting = dispatcher.meanwhile(client.next_step)
    peer.expect(m.Demand)
    dispatcher.meanwhile(client.close)
    with pytest.raises(ClientClosed):
        waiting.result(10)


def test_a_wait_that_times_out_is_no_longer_hungry(dispatcher: ScriptedDispatcher) -> None:
    client, peer = dispatcher.rank()
    with pytest.raises(TimeoutError):
        client.next_step(0.1)
    assert peer.expect(m.Demand).hungry
    assert not peer.expect(m.Demand).hungry
    assert client.statistics().step_wait_s >= 0.1


def test_the_end_stops_the_iteration_and_needs_no_connection_any_more(
    dispatcher: ScriptedDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1])
    peer.send(m.End(reason=EndReason.DRAINED))
    taken = taken_from(client)
    taken.commit()
    assert client.next_step() is None
    assert client.end_reason == "drained"
    peer.wait_for(m.Commit)
    with caplog.at_level(logging.WARNING):
        peer.close()
        client.close()
    assert not caplog.text


def test_a_last_commit_that_was_lost_with_its_connection_after_the_end_is_told_again(
    dispatcher: ScriptedDispatcher,
) -> None:
    client, peer = dispatcher.rank()
    peer.give(0, [1])
    peer.send(m.End(reason=EndReason.DRAINED))
    taken = taken_from(client)
    assert client.next_step(0.1) is None
    peer.close()  # nothing of what follows was heard
    taken.commit()
    again = dispatcher.accept()
    assert again.expect(m.HelloRank).committed in (-1, 0)
    again.close()
    assert dispatcher.accept().expect(m.HelloRank).committed == 0


def test_a_dispatcher_that_is_gone_after_the_end_is_no_failure(
    dispatcher: ScriptedDispatcher,
) -> None:
    before_it = rank_threads()
    joining = dispatcher.meanwhile(
        RankClient, dispatcher.endpoint, dp_rank=0, dp_size=2, reconnect_timeout=0.2
    )
    peer = dispatcher.accept()
    peer.welcome_rank()
    with joining.result(10) as client:
        peer.give(0, [1])
        peer.send(m.End(reason=EndReason.DRAINED))
        taken_from(client).commit()
        assert client.next_step() is None
        (thread,) = rank_threads() - before_it
        dispatcher.hang_up()
        thread.join(10)
        assert not thread.is_alive()
        assert client.next_step() is None


def test_a_checkpoint_that_nobody_is_left_to_hear_of_is_an_error(
    dispatcher: ScriptedDispatcher,
) -> None:
    before_it = rank_threads()
    client, peer = dispatcher.rank()
    peer.send(m.End(reason=EndReason.ENDED))
    dispatcher.hang_up()
    for thread in rank_threads() - before_it:
        thread.join(10)
    loading = dispatcher.meanwhile(client.resume, m.CheckpointPosition(run_id="run", step=3))
    with pytest.raises(ClientClosed, match="make a new stream"):
        loading.result(5)
    with pytest.raises(ClientClosed, match="make a new stream"):
        client.next_step(0)


def test_a_dispatcher_that_never_was_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DispatcherUnreachable, match="No such file"):
        RankClient(f"unix:{tmp_path}/nobody", dp_rank=0, dp_size=1, reconnect_timeout=0.2)
