"""Whether a client can do what payloads by reference ask of it."""

import logging

from rollout_dispatcher.errors import ProtocolError, RankRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.config.checks import OUR_SCHEMES, unknown_scheme
from rollout_dispatcher.service.config.options import ServeConfig

log = logging.getLogger(__name__)


def check_rank(config: ServeConfig, *, opens_stores: bool) -> None:
    """Raise RankRefused for a DP rank that would be given what it cannot fetch."""
    if config.payload_stores and not opens_stores:
        raise RankRefused(
            "samples may lie in payload stores, from which this rank does not fetch them "
            "(`opens_stores` of its hello); start the dispatcher without --payload-stores"
        )


def warn_if_unknown(config: ServeConfig) -> None:
    """Say of a payload store that only those may know who use it, that nobody here does."""
    for address in config.payload_stores:
        if scheme := unknown_scheme(address):
            log.warning(
                "--payload-stores names %s, and no store of the scheme %s is installed here (known "
                "are %s): it has to be where producers and DP ranks run, or samples go through the "
                "dispatcher, and references into it are resolved by nobody",
                address, scheme, ", ".join(OUR_SCHEMES),
            )  # fmt: skip


def check_push(push: m.Push, *, opens_stores: bool) -> None:
    """Raise ProtocolError for references of a producer that would not hear what becomes of them."""
    if push.objects is not None and not opens_stores:
        raise ProtocolError("samples that lie in payload stores need `opens_stores` in the hello")
