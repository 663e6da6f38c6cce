"""Runs of the floors; see `raw`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from tests.bench.plane.children.children import Child
from tests.bench.plane.children.raw import RECEIVERS
from tests.bench.plane.load.loads import Load

MODULE = "tests.bench.plane.children.raw"


class Floor:
    """A sender and its receivers, connected."""

    def __init__(self, load: Load, sender: Child, receivers: list[Child]) -> None:
        self._load, self._sender, self._receivers = load, sender, receivers

    def run(self) -> float:
        """Bytes a second of one run, from the first send to the last byte at a receiver."""
        for receiver in self._receivers:
            receiver.tell(do="run")
        began = self._sender.ask(do="run")["began"]
        ended = max(receiver.hear()["ended"] for receiver in self._receivers)
        return self._load.run_bytes / float(ended - began)

    def pace(self, rate: float) -> list[float]:
        """Seconds that each buffer took to a receiver, sent at `rate` bytes a second."""
        for receiver in self._receivers:
            receiver.tell(do="stamp")
        sent = self._sender.ask(do="pace", rate=rate)["sent"]
        arrived = [receiver.hear()["arrived"] for receiver in self._receivers]
        took = []
        for at, began in enumerate(sent):
            turn, place = divmod(at, RECEIVERS)
            took.append(arrived[place][turn] - began)
        return took


#: Starts what stands between a sender and the receivers at these ports.
Middle = Callable[[Load, list[int]], Child]


def raw_relay(load: Load, ports: list[int]) -> Child:
    """Blocking sockets and one buffer; see `raw`."""
    return Child(MODULE, {"role": "relay", "ports": ports, **load.order()})


def held_relay(hold: int) -> Middle:
    """The dispatcher's sockets and memory, and nothing that it decides; see `held`."""

    def start(load: Load, ports: list[int]) -> Child:
        return Child(
            "tests.bench.plane.children.held", {"hold": hold, "ports": ports, **load.order()}
        )

    return start


@contextmanager
def floor(load: Load, through: Middle | None = None) -> Iterator[Floor]:
    """A sender and two receivers, with something between them or not."""
    with ExitStack() as stack:
        receivers = [
            stack.enter_context(Child(MODULE, {"role": "receiver", "place": at, **load.order()}))
            for at in range(RECEIVERS)
        ]
        ports = [child.hear()["port"] for child in receivers]
        if through is not None:
            middle = stack.enter_context(through(load, ports))
            ports = [middle.hear()["port"]]
        given = {"role": "sender", "ports": ports, **load.order()}
        sender = stack.enter_context(Child(MODULE, given))
        sender.hear()
        yield Floor(load, sender, receivers)
