"""Producers as the core knows them: who is there, who has contributed, and who is done.

    there --lost without a goodbye--> away --`timeout` passes--> gone
      ^          (or a restart)         |
      +--------- connects again --------+        there --goodbye--> gone

A phase, and the stream, end when everybody who has contributed to the run has said so or is gone:
one producer's last sample says nothing of the others', and a slow one's first sample of a phase
comes after a fast one's last. Who has contributed nothing is not waited for, and what is remembered
of somebody who is gone is nothing.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from rollout_dispatcher.core.indexes.lowest import Lowest

#: Who is away longest is given up beyond so many; far above any fleet.
MAX_AWAY = 65_536


@dataclass(slots=True)
class _Producer:
    """away_since: None while it is there. contributed: whether a sample of it was accepted, or has
    waited for room.

    phase: the newest phase that it has ended, 0 for none. ended: its stream. incarnation: tells its
    process from others of its name; empty if it said none.
    """

    away_since: float | None = None
    contributed: bool = False
    phase: int = 0
    ended: bool = False
    incarnation: str = ""

    @property
    def owes_after(self) -> int | None:
        """Phases that end after this version wait for its word; None if none does."""
        return None if self.ended or not self.contributed else self.phase


class Producers:
    """Those who are there or may come back. timeout: seconds until who is away counts as gone."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._known: dict[str, _Producer] = {}
        self._away: dict[str, None] = {}  # in order of leaving
        # Whose word is waited for: by phases, by the end, by the end before anybody contributes.
        self._owes_phases: Lowest[str] = Lowest()
        self._owes_end: set[str] = set()
        self._not_ended: set[str] = set()
        #: Who speaks without a connection, as over HTTP: it may be anybody, and binds nobody.
        self._nameless = _Producer()
        #: Whether anybody has contributed anything.
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether anybody has contributed anything."""
        return self._begun

    @property
    def num_there(self) -> int:
        """How many are there now."""
        return len(self._known) - len(self._away)

    def __contains__(self, producer: object) -> bool:
        """Whether it is there or may come back."""
        return producer in self._known

    def is_away(self, producer: str) -> bool:
        """Whether it is not there now; of nobody in particular, as over HTTP, that is not known."""
        return producer != "" and (producer not in self._known or producer in self._away)

    # -- they come and go -------------------------------------------------------------------

    def connected(self, producer: str, incarnation: str = "") -> bool:
        """It is there; returns whether it is another incarnation than was there before."""
        known = self._known.get(producer)
        if known is None:
            self._know(producer, known := _Producer())
        elif known.away_since is not None:
            known.away_since = None
            del self._away[producer]
        before, known.incarnation = known.incarnation, incarnation or known.incarnation
        return before not in ("", known.incarnation)

    def lost(self, producer: str, now: float, *, for_good: bool) -> list[str]:
        """Its connection is lost, `for_good` if it said goodbye; returns who is gone."""
        known = self._known.get(producer)
        if known is None:
            return []
        if for_good or not known.contributed:
            self._forget(producer)
            return [producer]
        if known.away_since is None:
            known.away_since = now
            self._away[producer] = None
        beyond = list(islice(self._away, max(0, len(self._away) - MAX_AWAY)))
        for other in beyond:
            self._forget(other)
        return beyond

    def restore(
        self, words: Mapping[str, tuple[int, bool]], now: float, *, contributed: Collection[str]
    ) -> None:
        """Who contributed to an earlier process may come back; what was said is still so."""
        self._begun = len(contributed) > 0
        for producer, (phase, ended) in words.items():
            if not producer:
                self._nameless.phase, self._nameless.ended = phase, ended
                continue
            self._know(producer, _Producer(now, producer in contributed, phase, ended))
            self._away[producer] = None

    def expire(self, now: float) -> list[str]:
        """Give up who has been away for too long; returns who is gone."""
        gone = []
        for producer in self._away:
            since = self._known[producer].away_since
            if since is None or since + self._timeout > now:
                break
            gone.append(producer)
        for producer in gone:
            self._forget(producer)
        return gone

    def next_deadline(self) -> float | None:
        """When somebody may be given up."""
        first = next(iter(self._away), None)
        since = None if first is None else self._known[first].away_since
        return None if since is None else since + self._timeout

    def _forget(self, producer: str) -> None:
        del self._known[producer]
        self._away.pop(producer, None)
        self._owes_phases.remove(producer)
        self._owes_end.discard(producer)
        self._not_ended.discard(producer)

    def _know(self, producer: str, known: _Producer) -> None:
        """It is as said from now on: see what waits for it."""
        self._known[producer] = known
        if (after := known.owes_after) is None:
            self._owes_phases.remove(producer)
        else:
            self._owes_phases.set(producer, after)
        if known.ended:
            self._owes_end.discard(producer)
            self._not_ended.discard(producer)
        else:
            self._not_ended.add(producer)
            if known.contributed:
                self._owes_end.add(producer)

    # -- they speak -------------------------------------------------------------------------

    def contributed(self, producer: str) -> None:
        """Samples of it were accepted, or wait for room."""
        self._begun = True
        if not producer:
            return
        known = self._known.get(producer)
        if known is None:
            self.connected(producer)
            known = self._known[producer]
        if not known.contributed:
            known.contributed = True
            self._know(producer, known)

    def ends_phase(self, producer: str, version: int) -> None:
        """It will push nothing older than `version` any more."""
        known = self._speaker(producer)
        known.phase = max(known.phase, version)
        if producer:
            self._know(producer, known)

    def ends_stream(self, producer: str) -> None:
        """It will push nothing any more."""
        known = self._speaker(producer)
        known.ended = True
        if producer:
            self._know(producer, known)

    def word(self, producer: str) -> tuple[int, bool]:
        """The newest phase that it has ended, 0 for none, and whether it has ended its stream."""
        known = self._known.get(producer) if producer else self._nameless
        return (0, False) if known is None else (known.phase, known.ended)

    def phase(self, producer: str) -> int:
        """The newest phase that it has ended, which binds it; 0 for none."""
        known = self._known.get(producer)
        return 0 if known is None else known.phase

    def has_ended(self, producer: str) -> bool:
        """Whether it has said that it will push nothing any more, which binds it."""
        known = self._known.get(producer)
        return known is not None and known.ended

    def _speaker(self, producer: str) -> _Producer:
        if not producer:
            return self._nameless
        self.connected(producer)
        return self._known[producer]

    # -- who is waited for --------------------------------------------------------------------

    def phase_is_waited_for(self, version: int) -> bool:
        """Whether there is anybody in `before_phase`."""
        after = self._owes_phases.lowest
        return after is not None and after < version

    def end_is_waited_for(self) -> bool:
        """Whether there is anybody in `before_end`."""
        return bool(self._owes_end if self._begun else self._not_ended)

    def before_phase(self, version: int) -> Iterator[str]:
        """Who has contributed, and may still push what is older than `version`."""
        return (
            producer
            for producer, known in self._known.items()
            if (after := known.owes_after) is not None and after < version
        )

    def before_end(self) -> Iterator[str]:
        """Who has contributed, and has not said that it is done; before anybody has, who is there.

        A worker with nothing to do does not end a run that others have not begun yet.
        """
        return (
            producer
            for producer, known in self._known.items()
            if (known.contributed or not self._begun) and not known.ended
        )
