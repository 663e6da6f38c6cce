"""The training loop's view: steps, micro-batches and clear errors, in a plain process."""

import pytest
import torch

import rollout_workers
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import ConfigError, StepContractError
from rollout_dispatcher.protocol import messages as m
from rollout_workers import MicroBatchStream
from tests.workers.support.peers import Peer, ScriptedDispatcher, micro_batch, sample, step

Pair = tuple[MicroBatchStream, Peer]


@pytest.fixture
def pair(dispatcher: ScriptedDispatcher, request: pytest.FixtureRequest) -> Pair:
    """A stream with the number of epochs that the test asks for, any by default."""
    return dispatcher.stream(epochs=getattr(request, "param", None))


def test_a_loop_trains_every_step_and_ends(pair: Pair) -> None:
    stream, peer = pair
    peer.give(0, [1, 2], [3])
    peer.give(1, [4])
    peer.send(m.End(reason=EndReason.ENDED))
    seen = []
    for taken in stream:
        seen.append([batch.input_ids.tolist() for batch in taken])
        assert [batch.input_ids.tolist() for batch in taken] == seen[-1]
        taken.commit()
    assert seen == [[[1, 2], [3]], [[4]]]
    assert stream.end_reason == "ended"
    assert stream.statistics().steps_committed == 2


def test_a_step_without_a_loss_token_is_logged_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Masks of zeros alone, as a mistake makes them: the run would learn nothing."""
    stream, peer = pair
    for number in range(3):
        peer.send(step(number, 1, tokens=1, loss_tokens=number % 2, num_samples=9))
        peer.send(m.Release(step=number))
        peer.send_bytes(micro_batch(number, 0, sample([7])))
        taken = next(stream)
        list(taken)
        taken.commit()
    (line,) = [one.getMessage() for one in caplog.records if "no loss token" in one.getMessage()]
    assert line.startswith("step 0 has 9 samples and no loss token: loss_mask marks none")


@pytest.mark.parametrize("pair", [1, 2, 3], indirect=True)
def test_the_last_of_so_many_epochs_gets_what_was_received_and_no_further_one_comes(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    epochs = request.node.callspec.params["pair"]
    stream, peer = pair
    peer.give(0, [1, 2], [3])
    taken, received = next(stream), list[int]()
    for _ in range(epochs):
        batches = list(taken)
        assert [batch.input_ids.tolist() for batch in batches] == [[1, 2], [3]]
        received.append(batches[0].input_ids.data_ptr())
        batches[0].input_ids[:] = -100
    assert len(set(received)) == epochs
    with pytest.raises(StepContractError, match=rf"micro-batch 0 of step 0 .* epochs={epochs}"):
        next(iter(taken))
    taken.commit()


@pytest.mark.parametrize("pair", [None, 1], indirect=True)
def test_tensors_that_are_kept_stay_as_they_were(pair: Pair) -> None:
    """However many steps of large micro-batches come after them."""
    stream, peer = pair
    kept = []
    for number in range(24):
        peer.give(number, [number] * 20_000)
        taken = next(stream)
        (batch,) = taken
        assert torch.all(batch.input_ids == number)
        taken.commit()
        if number % 3 == 0:
            kept.append((number, batch.input_ids[100:], batch.loss_mask, batch.reward))
        del batch
    for number, ids, mask, reward in kept:
        assert torch.all(ids == number)
        assert torch.all(mask[1:])
        assert reward.item() == 20_000 * number


@pytest.mark.parametrize("handed_out", [0, 1, 2])
def test_a_step_is_not_committed_before_all_of_it_was_handed_out(
    pair: Pair, handed_out: int
) -> None:
    """As by a commit() that is indented too far; what was left out would never come again."""
    stream, peer = pair
    peer.give(0, [1], [2], [3])
    taken = next(stream)
    for _ in zip(range(handed_out), taken, strict=False):
        pass
    with pytest.raises(StepContractError, match=rf"step 0 .* {handed_out} of its 3 micro-batches"):
        taken.commit()
    assert [batch.input_ids.tolist() for batch in taken] == [[1], [2], [3]]
    taken.commit()
    assert peer.wait_for_commit() == 0


def test_a_step_may_be_given_up_on_purpose(pair: Pair) -> None:
    stream, peer = pair
    peer.give(0, [1], [2])
    taken = next(stream)
    next(iter(taken))
    taken.commit(partial=True)
    assert peer.wait_for_commit() == 0


def test_a_step_is_committed_once_and_not_read_afterwards(pair: Pair) -> None:
    stream, peer = pair
    peer.give(0, [1], [2])
    taken = next(stream)
    reading = iter(taken)
    list(taken)
    next(reading)
    taken.commit()
    with pytest.raises(StepContractError, match="step 0 is committed already"):
        taken.commit()
    with pytest.raises(StepContractError, match="its micro-batches are gone"):
        next(reading)
    with pytest.raises(StepContractError, match="its micro-batches are gone"):
        list(taken)


def test_only_rank_0_reports_the_policy_version(dispatcher: ScriptedDispatcher) -> None:
    stream, peer = dispatcher.stream({"generation": 5}, dp_rank=1, dp_size=2, generation=5)
    stream.set_policy_version(3)
    assert peer.hears_nothing()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"loss_normalisation": "mean"}, "choose from token-mean, token-mean-expected, "),
        ({"loss_normalisation": "constant"}, "write a positive number after the colon"),
        ({"losses": {"loss": "token-mean"}}, "choose a name like a variable's"),
        ({"grad_reduction": "max"}, "choose from mean, sum"),
        ({"trainer_divides_by": "steps"}, "it is 'micro-batches', or a number"),
        ({"layout": "dense"}, "choose from packed, padded, jagged"),
        ({"dp_rank": 1, "dp_size": 2}, r"init_process_group\(\) first, or pass .* generation="),
        ({"endpoint": "nowhere"}, "is no address"),
        ({"epochs": 0}, r"epochs is 0; .* at least 1"),
        ({"epochs": 1.5}, r"epochs is 1\.5; .* at least 1"),
    ],
)
def test_a_mistake_is_named_before_anything_is_connected(
    options: dict[str, object], complaint: str
) -> None:
    arguments = {"endpoint": "127.0.0.1:1", "dp_rank": 0, "dp_size": 1} | options
    with pytest.raises(ConfigError, match=complaint):
        MicroBatchStream(**arguments)  # type: ignore[arg-type]


def test_the_public_names_are_those_that_are_announced() -> None:
    assert all(getattr(rollout_workers, name) for name in vars(rollout_workers)["__all__"])
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rollout_workers.Nothing  # type: ignore[attr-defined]
