"""Payloads in Ray's object store: `ray://NAMESPACE/NAME`, in the cluster that `RAY_ADDRESS` names.

A raw object id keeps nothing alive, and an object dies with the process that owns it; producers end
early. So on each node an actor (a *holder*) owns the objects that are put there:

    producer --ray.put--> object --Holder.keep--> a copy that the holder owns, on the same node
    DP rank  --Holder.find--> its id --ray.get--> a view of it, fetched from node to node by Ray

The key of an object names its holder, `<key>@<node>`. Holders are detached: they stay when the job
that has made them ends, and hold what was not released; a node that is lost takes its objects with
it. `ray.get` unpickles the holders' objects: a process that may put objects into the cluster may
run code there anyway.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import numpy as np
import ray
from ray.exceptions import ActorDiedError, ObjectFetchTimedOutError, ObjectLostError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_workers.stores.interface import Missing, PayloadStore, part_of

#: How long a holder may take to answer, in seconds, and Ray to fetch objects, before it is asked
#: again later.
ANSWERED_WITHIN_S, FETCHED_WITHIN_S = 15.0, 60.0
#: Seconds before its holder is asked for an object's id once more. On a busy machine `ray.get` was
#: seen to wait for as long as it may for an id that it had, of an object that was on its node; what
#: the first try costs a large object of another node is no more than this.
ASKED_AGAIN_AFTER_S = 5.0


class Holder:
    """An actor that owns the objects of its node."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def keep(self, key: str, value: Any) -> None:
        """Own a copy of `value`, which is the producer's."""
        if key not in self._held:
            self._held[key] = ray.put(value)

    def find(self, keys: Sequence[str]) -> list[Any]:
        """The id of each object, None where there is none."""
        return [self._held.get(key) for key in keys]

    def drop(self, keys: Iterable[str]) -> None:
        """Own these no more; Ray frees objects without a reader."""
        for key in keys:
            self._held.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        """The keys of held objects that begin so."""
        return [key for key in self._held if key.startswith(prefix)]


class RayStore(PayloadStore):
    """The holders of one name, and the process's connection to Ray."""

    scheme: ClassVar[str] = "ray"

    def __init__(self, address: str, namespace: str, name: str) -> None:
        self._address, self._namespace, self._name = address, namespace, name
        self._node = ray.get_runtime_context().get_node_id()
        self._holders: dict[str, Any] = {}

    @classmethod
    def open(cls, address: str) -> Self:
        """Connect to the cluster, unless this process is in one already."""
        parts = urlsplit(address)
        namespace, name = parts.netloc, parts.path.strip("/")
        if not namespace or not name or "/" in name:
            raise StoreFailed(address, "an address of Ray is ray://NAMESPACE/NAME")
        try:
            if not ray.is_initialized():
                ray.init("auto", namespace=namespace, log_to_driver=False)
            return cls(address, namespace, name)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise StoreFailed(
                address,
                f"there is no Ray cluster to join ({error}); set RAY_ADDRESS, and "
                "RAY_AUTH_MODE=token where the cluster asks for one",
            ) from error

    def put(self, key: str, spans: Sequence[Buffer]) -> StoredObject:
        """On this node."""
        value = np.frombuffer(spans[0] if len(spans) == 1 else b"".join(spans), np.uint8)
        kept = f"{key}@{self._node}"
        try:
            self._keep(kept, value)
        except StoreFailed:
            # The holder may only have been slow; it serves calls in their order.
            if (holder := self._holders.get(self._node)) is not None:
                holder.drop.remote([kept])
            raise
        return StoredObject(self._address, kept, value.nbytes)

    def get(self, references: Sequence[Reference]) -> list[memoryview | Missing]:
        """Views of the objects where they are on this node, and else of Ray's copies of them."""
        found = self._find({reference.stored.key for reference in references})
        return [part_of(found[reference.stored.key], reference) for reference in references]

    def release(self, keys: Sequence[str]) -> list[str]:
        """By the holders; one that is gone has nothing any more."""
        for node, there in _by_node(keys).items():
            with suppress(_HolderGone):
                self._asked(node, "drop", there)
        return []

    def close(self) -> None:
        """The connection is the process's, which may use it for more than this."""
        self._holders.clear()

    # -- holders

    def _actor(self, node: str) -> str:
        return f"{self._name}@{node}"

    def _nodes(self) -> list[str]:
        """The nodes that have a holder."""
        try:
            named = ray.util.list_named_actors(all_namespaces=True)
        except RayError as error:
            raise StoreFailed(self._address, error) from error
        begin = self._actor("")
        return [
            actor["name"].removeprefix(begin)
            for actor in named
            if actor["namespace"] == self._namespace and actor["name"].startswith(begin)
        ]

    def _made(self, node: str) -> Any:
        """The holder of a node, which another process may have made meanwhile."""
        self._holders[node] = (
            ray.remote(Holder)
            .options(
                name=self._actor(node),
                namespace=self._namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
        )
        return self._holders[node]

    def _asked(self, node: str, method: str, *values: object) -> Any:
        """The answer of a node's holder; raises as `_answer` does.

        Raises _HolderGone where there is none, too. A known one that has ended may have a
        successor, with the objects that were put there since: then that is called.
        """
        if (known := self._holders.get(node)) is not None:
            with suppress(_HolderGone):
                return self._answer(node, getattr(known, method).remote(*values))
        try:
            found = self._holders[node] = ray.get_actor(self._actor(node), self._namespace)
        except ValueError as error:
            raise _HolderGone(self._address, error) from error
        return self._answer(node, getattr(found, method).remote(*values))

    def _answer(self, node: str, answer: Any, within_s: float = ANSWERED_WITHIN_S) -> Any:
        """Raises _HolderGone if the holder has ended for good, StoreFailed for other errors."""
        try:
            return ray.get(answer, timeout=within_s)
        except ActorDiedError as error:
            self._holders.pop(node, None)
            raise _HolderGone(self._address, error) from error
        except RayError as error:
            raise StoreFailed(self._address, error) from error

    # -- objects

    def _keep(self, key: str, value: Any) -> None:
        try:
            self._asked(self._node, "keep", key, value)
        except _HolderGone:
            made = self._made(self._node)  # its process has to start first
            self._answer(self._node, made.keep.remote(key, value), FETCHED_WITHIN_S)

    def _find(self, keys: Iterable[str]) -> dict[str, "memoryview | Missing"]:
        found: dict[str, memoryview | Missing] = {}
        for node, there in _by_node(keys).items():
            try:
                ids = self._asked(node, "find", there)
            except _HolderGone:
                gone = Missing(f"the actor {self._actor(node)} that held it has ended")
                found |= dict.fromkeys(there, gone)
            else:
                found |= dict(zip(there, self._views(node, there, ids), strict=True))
        return found

    def _views(
        self, node: str, keys: Sequence[str], ids: Sequence[Any]
    ) -> "list[memoryview | Missing]":
        """Of all; calls the holder for them again if Ray does not come to an end."""
        try:
            return self._fetched(ids, ASKED_AGAIN_AFTER_S)
        except StoreFailed:
            again = self._asked(node, "find", keys)  # `ids` are kept until the others are here
            return self._fetched(again, FETCHED_WITHIN_S)

    def _fetched(self, ids: Sequence[Any], within_s: float) -> "list[memoryview | Missing]":
        """Of all at once, or else one by one, if some are lost."""
        if None not in ids:
            with suppress(ObjectLostError):
                return [memoryview(data) for data in self._had(list(ids), within_s)]
        return [self._view(held, within_s) for held in ids]

    def _view(self, held: Any, within_s: float) -> "memoryview | Missing":
        if held is None:
            return Missing("nobody holds it")
        try:
            return memoryview(self._had(held, within_s))
        except ObjectLostError as error:
            return Missing(f"Ray has lost it ({type(error).__name__})")

    def _had(self, held: Any, within_s: float) -> Any:
        """Objects by their ids. Raises ObjectLostError, and StoreFailed for the rest."""
        try:
            return ray.get(held, timeout=within_s)
        except ObjectFetchTimedOutError as error:  # which is an ObjectLostError, and says nothing
            raise StoreFailed(self._address, error) from error
        except ObjectLostError:
            raise
        except RayError as error:
            raise StoreFailed(self._address, error) from error

    def list(self, prefix: str) -> list[str]:
        """Of all nodes."""
        found: list[str] = []
        for node in self._nodes():
            with suppress(_HolderGone):
                found += self._asked(node, "keys", prefix)
        return found


class _HolderGone(StoreFailed):
    """A holder has ended, and its objects with it."""


def _by_node(keys: Iterable[str]) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        found[key.rpartition("@")[2]].append(key)
    return found
