"""Whether a client can do what payloads by reference ask of it."""

import logging

from rollout_dispatcher.errors import ProtocolError, RankRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.versions import REFERENCES, Terms
from rollout_dispatcher.service.config.checks import OUR_SCHEMES, unknown_scheme
from rollout_dispatcher.service.config.options import ServeConfig

log = logging.getLogger(__name__)


def check_rank(config: ServeConfig, terms: Terms) -> None:
    """Raise RankRefused for a DP rank that would be given what it cannot fetch."""
    if config.payload_stores and REFERENCES not in terms.capabilities:
        raise RankRefused(
            "samples may lie in payload stores, from which this rank's release cannot fetch them; "
            "install a newer release of rollout-dispatcher where it runs, or start the dispatcher "
            "without --payload-stores"
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


def check_push(terms: Terms, push: m.Push) -> None:
    """Raise ProtocolError for references of a producer that would not hear what becomes of them."""
    if push.objects is not None and REFERENCES not in terms.capabilities:
        raise ProtocolError(
            f"samples that lie in payload stores need the capability {REFERENCES!r} in the hello"
        )
