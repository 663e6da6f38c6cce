"""Runs of the floors; see `raw`."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.plane.children import Child, all_of
from tests.bench.plane.loads import Load
from tests.bench.plane.raw import RECEIVERS

MODULE = "tests.bench.plane.raw"


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


@contextmanager
def floor(load: Load, *, relay: bool) -> Iterator[Floor]:
    """A sender, two receivers and, if wanted, a relay between them."""
    receivers = [
        Child(MODULE, {"role": "receiver", "place": place, **load.order()})
        for place in range(RECEIVERS)
    ]
    with all_of(*receivers):
        ports = [child.hear()["port"] for child in receivers]
        if not relay:
            with _child("sender", load, ports) as sender:
                sender.hear()
                yield Floor(load, sender, receivers)
            return
        with _child("relay", load, ports) as middle:
            entry = [middle.hear()["port"]]
            with _child("sender", load, entry) as sender:
                sender.hear()
                yield Floor(load, sender, receivers)


def _child(role: str, load: Load, ports: list[int]) -> Child:
    return Child(MODULE, {"role": role, "ports": ports, **load.order()})
