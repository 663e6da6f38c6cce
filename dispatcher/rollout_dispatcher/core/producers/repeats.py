"""Samples in a row under ids that were accepted before: a sign that ids name too little.

Who pushes a sample again because it does not know what became of it is no such case: these numbers
of its are known. Nor is a producer that begins anew, with what it has pushed before a crash; but
that cannot be told from here, so what is found is for the log.
"""

from rollout_dispatcher.core.effects import IdsRepeated

#: So many in a row, none of which is trained on, are told.
MANY = 256


class Repeats:
    """Counts for each producer since it has connected; nameless ones, as over HTTP, are one."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._in_conflict: set[str] = set()
        #: What nobody was told of yet.
        self.found: list[IdsRepeated] = []

    def repeated(self, producer: str, sample_id: str, *, conflicts: bool) -> None:
        """One more came in vain. conflicts: with other content than before."""
        count = self._in_a_row[producer] = self._in_a_row.get(producer, 0) + 1
        news = conflicts and producer not in self._in_conflict
        if conflicts:
            self._in_conflict.add(producer)
        if news or count == MANY:
            self.found.append(IdsRepeated(producer, sample_id, count, conflicts=news))

    def accepted(self, producer: str) -> None:
        """A sample of it is accepted."""
        if self._in_a_row:
            self._in_a_row.pop(producer, None)

    def forget(self, producer: str) -> None:
        """It has connected anew, or has gone."""
        self._in_a_row.pop(producer, None)
        self._in_conflict.discard(producer)
