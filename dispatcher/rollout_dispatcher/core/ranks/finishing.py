"""The trainer has had enough: every DP rank has said so after the same step.

    running --Finish of every DP rank--> finished --told to all--> over
                                             |
                                             +--kill -9, restart--> finished

Producers are told, whatever they wait for; nothing is planned any more. What was not used stays for
the next process if there is a journal, and is dropped otherwise, or where the ranks ask for that.
Invariant: that the run is finished is a fact before anybody hears of it, and stands until everybody
has; a start on the journal after that goes on with what is left.
"""

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.effects import Effect, EndProducers
from rollout_dispatcher.core.facts import DropReason, Finished, Note, Remembered, Withdrawn
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import ProtocolError, RunFinished, StepContractError

RUN_FINISHED = (
    "the trainer has finished the run and takes no more samples; stop pushing, or push to the next "
    "run"
)


class Finishing:
    """Hears that DP ranks finish. keeps: what is not used outlives the process, in a journal."""

    def __init__(
        self,
        ledger: StepLedger,
        lifecycle: Lifecycle,
        admission: Admission,
        dropping: Dropping,
        note: Note,
        *,
        keeps: bool,
    ) -> None:
        self._ledger, self._lifecycle = ledger, lifecycle
        self._admission, self._dropping = admission, dropping
        self._note, self._keeps = note, keeps

    def restore(self, memory: Remembered) -> None:
        """An earlier process was not done with telling everybody."""
        if memory.finished:
            self._end()

    def finish(self, dp_rank: int, step: int, *, discard: bool) -> None:
        """A DP rank has finished after this step; `look` follows.

        Raises ProtocolError for a step that is not the last one that it has committed.
        """
        rank = self._ledger.speaker(dp_rank)
        if step != rank.committed:
            raise ProtocolError(
                f"DP rank {dp_rank} finished after step {step}, and has committed step "
                f"{rank.committed}"
            )
        rank.finished, rank.discards, rank.hungry = step, discard, False
        self._ledger.generation.changed(dp_rank)

    def look(self) -> list[Effect]:
        """End the run if every DP rank has finished; fail all of them where they differ."""
        generation = self._ledger.generation
        said = {
            at: (rank.finished, rank.discards)
            for at, rank in sorted(generation.ranks.items())
            if rank.finished is not None
        }
        if not said or self._lifecycle.drained or generation.failed is not None:
            return []
        (first, mine), *others = said.items()
        other = next((each for each in others if each[1] != mine), None)
        if other is not None:
            return [*generation.fail(_difference((first, mine), other))]
        return self._decide(discard=mine[1]) if len(said) == generation.dp_size else []

    def refuse(self) -> list[Effect]:
        """Tell producers that are connected, of which some may be new."""
        return [EndProducers(RunFinished(RUN_FINISHED))] if self._lifecycle.finished else []

    def carried_out(self) -> None:
        """Everybody has been told, as far as they are there: the next process goes on."""
        if self._lifecycle.finished:
            self._note(Finished(pending=False))

    def _decide(self, *, discard: bool) -> list[Effect]:
        self._note(Finished(pending=True))
        effects = self._end()
        if discard or not self._keeps:
            self._drop_unused()
        return [*effects, *self.refuse()]

    def _end(self) -> list[Effect]:
        self._lifecycle.end(EndReason.FINISHED)
        self._ledger.over = True
        return self._admission.end(RunFinished.code, RUN_FINISHED)

    def _drop_unused(self) -> None:
        for step in self._ledger.steps.withdraw_all():
            self._dropping.planned(DropReason.UNUSED, list(step.entries()))
            self._note(Withdrawn(step.number, step.attempt))
        self._dropping.everything(DropReason.UNUSED)


def _difference(*words: tuple[int, tuple[int | None, bool]]) -> StepContractError:
    told = [
        f"DP rank {dp_rank} finished the run after step {step} with discard={discard}"
        for dp_rank, (step, discard) in words
    ]
    return StepContractError(
        f"{', and '.join(told)}; call stream.finish() on every rank after the same step, with the "
        "same arguments"
    )
