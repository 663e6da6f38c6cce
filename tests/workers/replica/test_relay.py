"""How many micro-batches a DP leader counts as sent to its peers."""

from collections import deque

from rollout_dispatcher.protocol import messages as m
from rollout_workers.replica.channel import Channel, Relay
from tests.workers.support.peers import step

PATIENCE = 20.0


class Peers(Channel):
    """A process group of peers that receive everything, without one."""

    def __init__(self) -> None:
        self.ranks = (0, 1)
        self.received: deque[m.Message] = deque()

    def send(self, message: m.Message, payload: memoryview | None = None) -> None:  # noqa: ARG002
        self.received.append(message)

    def agree(self, leaving: int | None = None) -> None:  # noqa: ARG002
        return None

    def close(self) -> None:
        pass


def part(attempt: int) -> m.MicroBatch:
    return m.MicroBatch(
        step=0, index=0, tokens=[1], loss_tokens=[1], sample_ids=["s"], attempt=attempt
    )


def test_micro_batches_of_an_earlier_attempt_do_not_count_for_the_new_one() -> None:
    relay = Relay(Peers())
    with relay.changed:
        relay.put(step(0))
        relay.put(part(0), memoryview(b""))
        assert relay.changed.wait_for(lambda: relay.num_sent(0) == 1, PATIENCE)
        relay.put(part(0), memoryview(b""))  # on its way while the new attempt comes
        relay.put(step(0, attempt=1))
        assert relay.num_sent(0) == 0
        relay.put(m.Pong())
        assert relay.changed.wait_for(lambda: not relay._outbox, PATIENCE)
        assert relay.num_sent(0) == 0
        relay.put(part(1), memoryview(b""))
        assert relay.changed.wait_for(lambda: relay.num_sent(0) == 1, PATIENCE)
    relay.end(m.Bye())
    relay.join()
