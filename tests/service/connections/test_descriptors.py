"""The budget of descriptors: what fits is given, the rest is divided, and a reserve is kept."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.connections.descriptors import (
    LEAST,
    RESERVE,
    ConnectionLimits,
    fit,
    warn_if_lowered,
)

ASKED = ServeConfig(dp_size=2, global_batch_size=4, micro_batch_size=1).connection_limits


def test_what_fits_is_given() -> None:
    assert fit(ASKED, ASKED.descriptors) == ASKED == ConnectionLimits(4096, 4096, 512)


@given(
    st.builds(ConnectionLimits, *[st.integers(1, 10_000)] * 3),
    st.integers(RESERVE + LEAST, 50_000),
)
def test_all_together_never_take_the_reserve_and_each_gets_some(
    asked: ConnectionLimits, limit: int
) -> None:
    given_ = fit(asked, limit)
    assert given_.descriptors <= max(limit, 0)
    assert 1 <= given_.sample <= asked.sample
    assert 1 <= given_.http <= asked.http
    assert 1 <= given_.pending <= asked.pending


@pytest.mark.parametrize(
    ("limit", "sample", "http", "pending"), [(256, 108, 36, 24), (1024, 540, 180, 120)]
)
def test_ranks_and_producers_come_before_probes(
    limit: int, sample: int, http: int, pending: int
) -> None:
    assert fit(ASKED, limit) == ConnectionLimits(sample, http, pending)


def test_too_few_are_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"raise the limit \(ulimit -n, LimitNOFILE=\) to 9280"):
        fit(ASKED, RESERVE + LEAST - 1)


def test_what_is_lowered_is_named_with_its_flags(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    warn_if_lowered(ASKED, ASKED, 2**16)
    assert not caplog.messages
    warn_if_lowered(ASKED, fit(ASKED, 1024), 1024)
    (said,) = caplog.messages
    assert "540 connections are served on the sample plane (--set max-connections=4096)" in said
    assert said.endswith("to 9280")
