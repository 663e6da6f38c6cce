r"""The dispatcher as an actor of a Ray cluster; it takes the options of `dispatcher serve`.

    python deploy/ray/dispatcher_actor.py --dp-size 8 --global-batch-size 512 \
        --micro-batch-tokens 32768 --listen 10.0.0.5:7077 --token-file token --journal-dir journal

The actor is detached and has a name, so that every job of the namespace finds it. It stays on the
node where it began, as its journal lies there: if its process dies Ray starts it again, it goes on
from the journal, and clients connect again. That needs a `--listen` with a port, and a journal.

    actor = ray.get_actor("rollout-dispatcher", namespace="rollouts")
    endpoint = ray.get(actor.endpoint.remote())             # for RolloutProducer, MicroBatchStream
    ray.get(actor.drain.remote())                           # no more samples; returns at the end
"""

import asyncio
import sys
import threading
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout_dispatcher import Dispatcher, ServeConfig
from rollout_dispatcher.cli.serve import load

NAME, NAMESPACE = "rollout-dispatcher", "rollouts"


class DispatcherActor:
    """Serves from its making; its event loop has a thread of its own, as Ray's has other work."""

    def __init__(self, config: ServeConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._dispatcher = Dispatcher(config)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._ask(self._dispatcher.start())

    def endpoint(self) -> str:
        """Where samples are pushed and steps are streamed."""
        return self._dispatcher.endpoint

    def http_endpoint(self) -> str:
        """Where metrics, health and status are."""
        return self._dispatcher.http_endpoint

    def drain(self) -> bool:
        """Take no more samples and train on what is there; whether that was everything."""
        return bool(self._ask(self._dispatcher.drain()))

    def _ask(self, coroutine: Any) -> Any:
        answer: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return answer.result()


def start(config: ServeConfig) -> Any:
    """The actor, made on this node if there is none."""
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(DispatcherActor)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(config)
    )


def main() -> None:
    """Start it in the cluster that RAY_ADDRESS names, and print its addresses."""
    description = "Run the dispatcher as a detached actor of the Ray cluster, on this node."
    found = load(sys.argv[1:], prog="dispatcher_actor.py", description=description)
    ray.init("auto", namespace=NAMESPACE, log_to_driver=False)
    actor = start(found.config)
    print(f"samples {ray.get(actor.endpoint.remote())}")
    print(f"http {ray.get(actor.http_endpoint.remote())}")


if __name__ == "__main__":
    main()
