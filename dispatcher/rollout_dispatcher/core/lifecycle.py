"""How a run ends: producers end the stream, DP ranks finish, or the service is told to stop.

    running --end_stream--> ended --nothing left to plan or commit--> drained
       |                      |                                         |
       +--------drain---------+--> draining --the same--> drained       +--a rewind--> as before
       |                      |
       +--DP ranks finish-----+--> drained at once: what is left is not planned any more

After the end nothing is accepted. Invariant: a rank is told of the end when nothing is left to be
planned, once on each connection; the run is drained when every step is committed.
"""

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.effects import Drained, Effect, EndRanks
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.ends import EndReason


class Lifecycle:
    """Where a run stands between its beginning and its end.

    batch: samples in a whole dispatch batch. flush_partial: a last smaller one is dispatched too.
    """

    def __init__(
        self,
        buffer: SampleBuffer,
        ledger: StepLedger,
        dropping: Dropping,
        *,
        batch: int,
        flush_partial: bool,
    ) -> None:
        self._buffer, self._ledger, self._dropping = buffer, ledger, dropping
        self._batch, self._flush_partial = batch, flush_partial
        #: Whether nothing more is accepted, and why.
        self.ended = False
        self.reason = EndReason.ENDED
        #: Whether the service is to stop.
        self.draining = False
        #: Whether the stream has ended and everything is committed, or the run is finished.
        self.drained = False
        self._told: set[str] = set()
        self._untold = ledger.generation.census()

    @property
    def state(self) -> str:
        """Where the run stands: running, ended, draining or drained."""
        if self.drained:
            return "drained"
        return "draining" if self.draining else "ended" if self.ended else "running"

    @property
    def finished(self) -> bool:
        """Whether the DP ranks have finished the run."""
        return self.ended and self.reason is EndReason.FINISHED

    def end(self, reason: EndReason) -> None:
        """Nothing more is accepted; that DP ranks finish counts beside any other reason."""
        if reason is EndReason.FINISHED:  # ranks that were told of another end wait for this one
            self._told.clear()
            for dp_rank in self._ledger.ranks:
                self._ledger.generation.changed(dp_rank)
        elif self.ended:
            return
        self.ended, self.reason = True, reason

    def flushes(self, ready: int) -> bool:
        """Whether so many samples go as they are, since nothing is to be waited for."""
        return self.ended and self._may_go(ready)

    def untold(self, client_id: str) -> None:
        """A rank's connection is gone or new: it may not have heard of the end."""
        self._told.discard(client_id)

    def has_told(self, client_id: str) -> bool:
        """Whether a rank was told of the end, on the connection that it has."""
        return client_id in self._told

    def finish(self, *, flushing: bool) -> list[Effect]:
        """Nothing is being planned: tell ranks if nothing is left, and the shell when all is done.

        flushing: an ended phase still has samples.
        """
        if self.finished:
            return [*self._end_ranks(), *self._end()]
        if not self.ended or self._ledger.steps.waiting:
            return []
        if not flushing and not self._may_go(self._buffer.ready_units):
            self._dropping.everything(DropReason.LAST_BATCH)
        if len(self._buffer):
            return []
        return [*self._end_ranks(), *self._end()]

    def _may_go(self, ready: int) -> bool:
        return self._flush_partial or ready >= self._batch

    def _end_ranks(self) -> list[Effect]:
        generation, told = self._ledger.generation, self._told
        untold = self._untold.find(
            generation.number, lambda rank: rank.connected and rank.client_id not in told
        )
        if not untold:
            return []
        dp_ranks = sorted(untold)
        for dp_rank in dp_ranks:
            told.add(generation.ranks[dp_rank].client_id)
            generation.changed(dp_rank)
        return [EndRanks(tuple(dp_ranks), self.reason)]

    def _end(self) -> list[Effect]:
        if self.drained or (self._ledger.steps and not self.finished):
            return []
        self.drained = True
        if self.finished:
            return [Drained("finished")]
        return [Drained("drained" if self.draining else "done")]
