"""What the operating system gives, and what a dispatcher takes of it: tests on real processes.

Each module is one resource: descriptors, memory of connections, places that somebody holds. They
run under small limits (`serve(open_files=...)`) rather than with large crowds.
"""

from typing import Any

import pytest

from tests.service.conftest import Serve, serve
from tests.support.client import Producer
from tests.support.server import ServeProcess

__all__ = ["serve"]


@pytest.fixture
def start(serve: Serve) -> Serve:
    """`serve`, without Python's own checks, which take memory themselves."""

    def begin(**options: Any) -> ServeProcess:
        server = serve(warm=False, checked=False, **options)
        with Producer(server.endpoint, "first") as first:  # what is loaded and made once
            first.push([3, 3])
            first.bye()
        server.scrape()
        server.status()
        return server

    return begin
