"""What DP ranks cannot get of a step: it is dropped, and the step is planned again.

    a rank says Unresolved        what becomes of it (so too where the journal cannot read for it)
    of an earlier attempt         nothing: the step is planned again already
    of a step that is released    the generation fails: others may train it already
    otherwise                     its samples are dropped, groups whole; what is left of the step,
                                  filled up, is planned as the next attempt
    and nothing is left           it takes over the samples of the step after it, and so on; the
                                  last step is withdrawn, until samples for it come

It is acted on once every rank is there and has said where it goes on: after a restart only ranks
know which steps were released, and a checkpoint may commit or rewind them. Invariant: whatever is
lost, ranks are told of an attempt once it is a fact, and no attempt has two plans.
"""

from collections.abc import Iterator

from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.effects import Effect, Redelivered, SamplesUnresolved, WithdrawStep
from rollout_dispatcher.core.facts import DropReason, Note, Withdrawn
from rollout_dispatcher.core.ranks.rank_state import Unresolved
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.step import OpenStep, StepState, planned
from rollout_dispatcher.errors import GenerationFenced, ProtocolError
from rollout_dispatcher.payload import Reference


class Attempts:
    """Hears what ranks cannot get, and acts on it."""

    def __init__(self, ledger: StepLedger, dropping: Dropping, note: Note) -> None:
        self._ledger, self._dropping, self._note = ledger, dropping, note
        self._waiting = False

    def unresolved(self, dp_rank: int, said: Unresolved) -> list[Effect]:
        """A rank cannot get samples of a step; see `claim`."""
        return self.claim(dp_rank, said) or self.settle()

    def claim(self, dp_rank: int, said: Unresolved) -> list[Effect]:
        """The same, to be acted on by `settle`; the rank is not prepared for that step till then.

        Raises ProtocolError for a step that is not open, an attempt that is not known, or samples
        that are not in it or in no payload store. Fails the generation if the step is released.
        """
        ledger = self._ledger
        rank, step = ledger.speaker(dp_rank), ledger.steps.get(said.step)
        if ledger.is_void(rank, said.step, said.attempt):
            return []
        if step is None or not step.digest:
            raise ProtocolError(
                f"DP rank {dp_rank} cannot get samples of step {said.step}, which is not open"
            )
        step.check_attempt(said.attempt, begun=False)
        if said.reason is DropReason.UNRESOLVED:
            _check_samples(dp_rank, step, said)
        if self._may_be_trained(step):
            return [*ledger.generation.fail(_too_late(dp_rank, said))]
        rank.unresolved[said.step], self._waiting = said, True
        rank.lost_plan(said.step)
        ledger.generation.changed(dp_rank)
        ledger.steps.hold_back(said.step)
        return []

    def settle(self) -> list[Effect]:
        """Act on what ranks have said, if they may be heard."""
        if not self._waiting or not self._ledger.generation.ready:
            return []
        claims, self._waiting = list(self._claims()), False
        for dp_rank, said in claims:
            step = self._ledger.steps.get(said.step)
            if step is not None and self._may_be_trained(step):
                return [*self._ledger.generation.fail(_too_late(dp_rank, said))]
        lost = [effect for claim in claims for effect in self._lose(*claim)]
        return [*lost, *self._close_up()] if lost else []

    def _claims(self) -> Iterator[tuple[int, Unresolved]]:
        """What ranks have said, but for what is void by now; it is heard once."""
        for dp_rank, rank in sorted(self._ledger.ranks.items()):
            for said in rank.unresolved.values():
                if not self._ledger.is_void(rank, said.step, said.attempt):
                    yield dp_rank, said
            rank.unresolved.clear()

    def _may_be_trained(self, step: OpenStep) -> bool:
        last = max(max(rank.taken, rank.released) for rank in self._ledger.ranks.values())
        return step.state is StepState.RELEASED or last >= step.number

    # -- samples are lost -------------------------------------------------------------------

    def _lose(self, dp_rank: int, said: Unresolved) -> list[Effect]:
        """The samples are dropped, if another rank's word has not dropped all of them just now."""
        steps = self._ledger.steps
        lost = _with_groups(steps[said.step], said.sample_ids)
        if not lost:
            return []
        left = steps.lose(said.step, lost)
        for at, rank in self._ledger.ranks.items():
            rank.lost_plan(said.step)
            self._ledger.generation.changed(at)
        self._dropping.planned(said.reason, lost)
        self._note(planned(left))
        first = lost[0].sample.sample_id
        found = SamplesUnresolved(dp_rank, said.step, len(lost), first, said.why, said.reason)
        again = [Redelivered(number, "unresolved") for number in steps if number >= said.step]
        return [found, *again]

    def _close_up(self) -> list[Effect]:
        """Where a step has nothing left, those after it move up."""
        steps, effects = self._ledger.steps, list[Effect]()
        while (empty := next((at for at, one in steps.items() if not one.num_samples), -1)) >= 0:
            for step in steps.close_up(empty):
                self._note(planned(step))
            number = steps.next_step
            self._note(Withdrawn(number, steps.withdrawn[number]))
            effects.append(WithdrawStep(tuple(sorted(self._ledger.ranks)), number))
        return effects


def _check_samples(dp_rank: int, step: OpenStep, said: Unresolved) -> None:
    """Raise ProtocolError if a rank names samples that it cannot have been told to fetch."""
    stored = {
        sample.sample_id for sample in step.samples() if isinstance(sample.payload, Reference)
    }
    if strange := set(said.sample_ids) - stored:
        raise ProtocolError(
            f"DP rank {dp_rank} cannot get sample {min(strange)} of step {said.step}, which is in "
            "no payload store, or not of that step"
        )


def _with_groups(step: OpenStep, sample_ids: tuple[str, ...]) -> list[Entry]:
    """The entries of these samples, as far as they are there, with their groups; oldest first."""
    named = [entry for entry in step.entries() if entry.sample.sample_id in set(sample_ids)]
    groups, tickets = {entry.group for entry in named} - {-1}, {entry.ticket for entry in named}
    found = (e for e in step.entries() if e.ticket in tickets or e.group in groups)
    return sorted(found, key=lambda entry: entry.ticket)


def _too_late(dp_rank: int, said: Unresolved) -> GenerationFenced:
    why = f" ({said.why})" if said.why else ""
    return GenerationFenced(
        f"DP rank {dp_rank} cannot get sample {said.sample_ids[0]} of step {said.step}{why}, and "
        "other DP ranks may train that step already; restart all ranks: it is planned again "
        "without what is gone"
    )
