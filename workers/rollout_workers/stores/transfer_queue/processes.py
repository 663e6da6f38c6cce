"""Which processes of a TransferQueue have ended: its controller, and its storage units.

The queue's clients do not notice: they wait for a unit for minutes, and for the controller for
ever. Ray knows. None of them comes back, so what one had is gone when it has ended; without the
controller nobody knows which key is where, so everything is.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, RayError

CONTROLLER, NAMESPACE = "TransferQueueController", "transfer_queue"
#: Seconds; one that does not answer is not known to have ended.
ANSWERED_WITHIN_S = 5.0


class QueueProcesses:
    """Of one queue. units: names of actors, in the order in which samples are dealt to them."""

    def __init__(self, controller: Any, units: Sequence[str]) -> None:
        self._controller, self._units = controller, units
        #: Names of those that are known to have ended.
        self.ended: frozenset[str] = frozenset()

    @classmethod
    def of_the_cluster(cls) -> Self:
        """Of the queue that runs. Raises ValueError if none does, RayError if Ray fails."""
        controller = ray.get_actor(CONTROLLER, NAMESPACE)
        backend = ray.get(controller.get_config.remote()).backend
        # Another backend has no such units, and says by itself what it does not have.
        in_units = backend.storage_backend == "SimpleStorage"
        return cls(controller, list(backend.SimpleStorage.zmq_info) if in_units else [])

    def look(self) -> frozenset[str]:
        """Ask Ray; all that have ended. Nothing new while Ray does not answer."""
        with suppress(RayError):
            listed = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
            self.ended |= set(self._units) - listed
            if not self._has_controller():
                self.ended |= {CONTROLLER}
        return self.ended

    def is_lost(self, index: int) -> bool:
        """Whether the sample of this index was in a unit that has ended."""
        return bool(self._units) and self._units[index % len(self._units)] in self.ended

    def _has_controller(self) -> bool:
        """Whether it is there: by itself, since one of the same name has nothing of this queue."""
        try:
            ray.get(self._controller.get_zmq_server_info.remote(), timeout=ANSWERED_WITHIN_S)
        except ActorDiedError:
            return False
        return True
