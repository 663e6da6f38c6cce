"""Runs of the floors; see `raw`."""

from collections.abc import Iterator
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


@contextmanager
def floor(load: Load, *, relay: bool = False) -> Iterator[Floor]:
    """A sender and two receivers, with a relay between them or not."""
    with ExitStack() as stack:

        def start(role: str, **given: object) -> Child:
            return stack.enter_context(Child(MODULE, {"role": role, **given, **load.order()}))

        receivers = [start("receiver", place=at) for at in range(RECEIVERS)]
        ports = [child.hear()["port"] for child in receivers]
        if relay:
            ports = [start("relay", ports=ports).hear()["port"]]
        sender = start("sender", ports=ports)
        sender.hear()
        yield Floor(load, sender, receivers)
