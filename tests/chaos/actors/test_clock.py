"""The clock of a running dispatcher jumps: nobody is taken for silent, and steps go on."""

from pathlib import Path

import pytest

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.settings import Settings

pytestmark = pytest.mark.e2e

HOURS = 7200.0


def test_no_rank_is_taken_for_silent_when_the_clock_jumps(tmp_path: Path) -> None:
    settings = Settings(dp_size=2, rank_timeout_s=60.0)
    with Cluster(tmp_path / "run", settings) as cluster:
        for jump in (HOURS, -HOURS, HOURS):
            cluster.jump_clock(jump)
            cluster.await_recovery()
            cluster.await_steps(20)  # the dispatcher has looked for silent peers meanwhile
        found = cluster.scrape()
        assert found["ranks_connected"] == 2
        assert found["connections_total{role=rank}"] == 2
        errors = [name for name in found if "connection_errors" in name and "rank" in name]
        assert sum(found[name] for name in errors) == 0
        cluster.finish()
