"""A Ray cluster of this process, on loopback alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray


@contextmanager
def ray_cluster(**options: Any) -> Iterator[str]:
    """Its address, for RAY_ADDRESS; options are those of `ray.init`."""
    settings: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 512 << 20}
    context = ray.init(
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        **settings | options,
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()
