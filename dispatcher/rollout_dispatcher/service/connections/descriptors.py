"""How many connections the file descriptors of this process allow, and what is kept in reserve.

Whoever has opened every descriptor with connections cannot open the journal's next segment any
more, nor answer a probe. So descriptors are divided at the start:

    limit = reserve + sample plane + HTTP plane + pending on each

What is asked for is given where it fits. Where it does not, pending connections get at most an
eighth of what is there beside the reserve on each plane, and of the rest the sample plane gets
three quarters, or more if HTTP needs less: ranks and producers come before probes, and HTTP clients
come and go. Invariant: all planes together never have more descriptors than the limit less the
reserve.
"""

import contextlib
import logging
import resource
from dataclasses import dataclass

from rollout_dispatcher.errors import ConfigError

log = logging.getLogger(__name__)

#: The journal's files and index, listeners, the event loop, logs, and what is opened for a moment;
#: a dozen of them are open all the time.
RESERVE = 64
#: With fewer there is no point in starting.
LEAST = 16


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connections at a time on either plane; pending: those beside them that are not known yet."""

    sample: int
    http: int
    pending: int

    @property
    def descriptors(self) -> int:
        """What they take, with the reserve."""
        return RESERVE + self.sample + self.http + 2 * self.pending


def raise_soft_limit(asked: ConnectionLimits) -> None:
    """Let this process open as many files as that takes, or as it may: soft limits are low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = asked.descriptors
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    with contextlib.suppress(OSError, ValueError):  # a system may have a limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_files_limit() -> int:
    """Descriptors that this process may have at present."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 - 1 if soft == resource.RLIM_INFINITY else soft


def fit(asked: ConnectionLimits, limit: int) -> ConnectionLimits:
    """What of `asked` fits into `limit` descriptors. Raises ConfigError if that is next to none."""
    if asked.descriptors <= limit:
        return asked
    rest = limit - RESERVE
    if rest < LEAST:
        raise ConfigError(
            f"this process may open {limit} files, and {RESERVE} of them are "
            "kept for the journal and the like; raise the limit (ulimit -n, LimitNOFILE=) to "
            f"{asked.descriptors}"
        )
    pending = min(asked.pending, max(1, rest // 8))
    rest -= 2 * pending
    sample = min(asked.sample, max(rest * 3 // 4, rest - asked.http))
    return ConnectionLimits(sample, min(asked.http, rest - sample), pending)


def warn_if_lowered(asked: ConnectionLimits, given: ConnectionLimits, limit: int) -> None:
    """Say what does not fit, and what to set."""
    if given != asked:
        log.warning(
            "this process may open %d files: at most %d connections are served on the sample "
            "plane (--set max-connections=%d), %d on the HTTP plane, and %d pending on each "
            "(%d asked for); for all of them raise the limit (ulimit -n, "
            "LimitNOFILE=) to %d",
            limit, given.sample, asked.sample, given.http, given.pending, asked.pending,
            asked.descriptors, extra={"event": "connections-limited"},
        )  # fmt: skip
