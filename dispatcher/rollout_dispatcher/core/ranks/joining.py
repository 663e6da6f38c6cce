"""A DP rank says hello: what of the run changes with that, and what it and the others are told.

In this order: the steps that its checkpoint commits or rewinds, the ranks that its new generation
fences, its welcome, its deliveries. Nobody is told anything of a generation before it is welcomed
in it. Invariant: where a hello is refused by raising, nothing has changed.
"""

from rollout_dispatcher.core.buffer.freshness import Freshness
from rollout_dispatcher.core.effects import Effect, RefuseRank, WelcomeRank
from rollout_dispatcher.core.facts import GenerationBegan, Note
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.ranks.generation import check_run
from rollout_dispatcher.core.ranks.rank_state import RankHello
from rollout_dispatcher.core.steps.checkpoints import Checkpoints
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.retained import CheckpointPosition


class Joining:
    """Gives DP ranks their places."""

    def __init__(
        self,
        ledger: StepLedger,
        checkpoints: Checkpoints,
        freshness: Freshness,
        lifecycle: Lifecycle,
        note: Note,
    ) -> None:
        self._ledger, self._checkpoints = ledger, checkpoints
        self._freshness, self._lifecycle, self._note = freshness, lifecycle, note

    def join(self, hello: RankHello, run_id: str, now: float) -> list[Effect]:
        """Welcome a DP rank, or refuse it by raising; see `Dispatch.join`."""
        check_run(hello, run_id)
        generation = self._ledger.generation
        hello = self._ledger.check(hello)
        if hello.dp_rank == 0:
            self._checkpoints.check_saved(hello.saved)
        if hello.generation is not None and (error := generation.disagreement(hello)) is not None:
            return [*generation.fail(error), RefuseRank(hello.client_id, error)]
        if hello.resume is not None:
            self._checkpoints.check_position(hello.resume, run_id)
        return self._admit(hello, run_id, now)

    def _admit(self, hello: RankHello, run_id: str, now: float) -> list[Effect]:
        ledger, generation = self._ledger, self._ledger.generation
        effects: list[Effect] = []
        if hello.resume is not None and generation.resumed is None:
            effects += self._resume(hello.resume, run_id, now)
        if hello.generation is None:
            effects += ledger.begin(hello)
            self._note(GenerationBegan(generation.number, generation.dp_size))
        deliveries = ledger.join(hello, now)
        self._lifecycle.untold(hello.client_id)
        committed = ledger.ranks[hello.dp_rank].committed
        effects.append(
            WelcomeRank(hello.client_id, hello.dp_rank, run_id, generation.number, committed)
        )
        effects += deliveries
        effects += self._checkpoints.committed(ledger.commit(hello.dp_rank, committed), now)
        if hello.dp_rank == 0:
            self._checkpoints.saved(hello.saved)
        return effects + ledger.release_ready()

    def _resume(self, position: CheckpointPosition, run_id: str, now: float) -> list[Effect]:
        """The generation's first rank has loaded a checkpoint."""
        committed, rewound = self._checkpoints.resume(position, run_id, now)
        if rewound.steps:
            self._freshness.reported = None  # the weights are older ones again
        self._lifecycle.drained = False
        return [*committed, rewound]
