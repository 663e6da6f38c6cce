"""A DP rank's messages and its state; no socket, clock, thread or torch.

Messages of a rank report its state (taken, committed, hungry, policy version, loaded checkpoint),
so a HELLO repeats those that a lost connection dropped. Messages after a HELLO wait for its
welcome; a checkpoint that is loaded then takes another HELLO. A message out of turn raises
ProtocolError and changes nothing.

The dispatcher bounds the steps here: at most `max_open_steps` taken ones, and `prefetch_steps`
ahead of them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import (
    GenerationFenced,
    ProtocolError,
    StepContractError,
)
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.slices import Slicing
from rollout_workers.client.role import Outgoing
from rollout_workers.rank.held_steps import Fetch, HeldState, HeldStep, HeldSteps
from rollout_workers.stores.requests import StoreRequests

log = logging.getLogger(__name__)


#: Each message of these types is sent; of other types the newest alone.
QUEUED_EACH = (m.Prepared, m.Unresolved, m.StepTimes)


def _replaces(message: m.Message, before: m.Message) -> bool:
    """Whether a message makes the one before it superfluous."""
    if isinstance(message, m.PolicyVersion) and isinstance(before, m.PolicyVersion):
        return message.first_step == before.first_step
    if isinstance(before, m.Commit) and before.times:
        return False
    return type(message) is type(before) and not isinstance(message, QUEUED_EACH)


class RankCore:
    """One DP rank's side of the step contract, over all its connections."""

    def __init__(
        self,
        client_id: str,
        dp_rank: int,
        dp_size: int,
        generation: int | None,
        prefetch: int,
        *,
        packed_length: int | None = None,
        max_split: int = 1,
        slicing: Slicing | None = None,
        training: Mapping[str, str] | None = None,
    ) -> None:
        self._client_id = client_id
        self.token: str | None = None  # that HELLO shows
        #: Collectives that this process has begun so far in process groups of all DP ranks.
        self.count_collectives: Callable[[], int] = lambda: 0
        self.dp_rank, self._dp_size, self._prefetch = dp_rank, dp_size, prefetch
        self._packed_length = packed_length
        self._max_split, self._slicing = max_split if max_split > 1 else None, slicing
        self._training = dict(training or {})
        self.generation = generation
        self.welcome: m.WelcomeRank | None = None
        self.taken = -1
        self.hungry = self._begun = False
        #: Whether the training loop has asked for the next step, though it may wait no more.
        self._asked = False
        self.end_reason: EndReason | None = None
        self._finish: m.Finish | None = None
        #: The last step that may begin, None for any; and the dispatcher's last word on why the
        #: next one waits.
        self._last_step: int | None = None
        self._waits_for = ""
        #: Whether a message came that a training loop may wait for, and it was not notified.
        self._has_news = False
        self._version: m.PolicyVersion | None = None
        self._resume: m.CheckpointPosition | None = None
        self._saved = -1
        self._begun_after = -1
        self._steps = HeldSteps()
        #: Bytes to fetch ahead of payload stores, None: any.
        self._prefetch_bytes: int | None = None
        #: What the dispatcher asks of this process's payload stores.
        self.store_requests = StoreRequests()
        #: The connection's state: HELLO is sent, it is welcomed, HELLO is due again.
        self._introduced = self._connected = self._hello_due = False
        #: Whether a checkpoint was loaded, and the dispatcher has not welcomed that HELLO yet.
        self._resuming = False
        self._sent_resume: m.CheckpointPosition | None = None
        #: In the order in which things happened; the newest of a kind suffices.
        self._queue: list[m.Message] = []

    # -- the connection

    def hello(self) -> m.HelloRank:
        """The first message of a connection: where this rank stands."""
        version = self._version
        hello = m.HelloRank(
            client_id=self._client_id,
            token=self.token,
            opens_stores=True,
            dp_rank=self.dp_rank,
            dp_size=self._dp_size,
            generation=self.generation,
            run_id=self.welcome.run_id if self.welcome else None,
            prefetch_steps=self._prefetch,
            taken=self.taken,
            committed=self.committed,
            hungry=self.hungry,
            received=self._steps.received(),
            attempts=self._steps.attempts(),
            released=self._steps.released,
            policy_version=version.policy_version if version else None,
            policy_step=version.first_step if version else None,
            resume=self._resume,
            saved=self._saved,
            packed_length=self._packed_length,
            max_split=self._max_split,
            slicing=self._slicing,
            training=self._training,
            finished=self._finish.step if self._finish else None,
            discard=self._finish.discard if self._finish else False,
        )
        self._introduced, self._hello_due, self._sent_resume = True, False, self._resume
        self._queue.clear()
        return hello

    def lost(self) -> None:
        """The connection is lost: the next HELLO reports the state."""
        self._introduced = self._connected = self._hello_due = False
        self._queue.clear()
        self.store_requests.lost()

    def take_messages(self, now: float) -> Iterator[Outgoing]:  # noqa: ARG002  waits for no time
        """What to send now; taken as sent once yielded."""
        if self._hello_due:
            yield self.hello(), ()
        while self._connected and self._queue:
            yield self._queue.pop(0), ()
        if self._connected:
            yield from self.take_answers()

    def take_answers(self) -> Iterator[Outgoing]:
        """What the dispatcher has asked of this process's payload stores is done."""
        for answer in self.store_requests.take_answers():
            yield answer, ()

    def ping(self) -> m.Ping:
        """A Ping to send at once, with how far the training loop is."""
        handed_out = sum(held.handed_out for held in self._steps)
        return m.Ping(handed_out=handed_out, collectives=self.count_collectives())

    def wait(self, now: float) -> None:
        """Nothing that a rank says waits for time."""

    def receive(self, message: m.Message, payload: memoryview, now: float) -> None:  # noqa: ARG002
        """Take a message. Raises ProtocolError, GenerationFenced or ConfigError."""
        match message:
            case m.MicroBatch() if self._connected:  # first, as there are many
                self._on_micro_batch(message, payload)
            case m.WelcomeRank():
                self._on_welcome(message)
            case m.Free() | m.Sweep():
                self.store_requests.receive(message)
            case m.Advice():
                log.warning("the dispatcher says: %s", message.text)
            case _ if self._resuming:
                pass  # sent before the dispatcher knew of the checkpoint
            case _ if not self._connected:
                raise ProtocolError(f"{type(message).__name__} instead of a welcome")
            case m.StepHeader():
                if self._steps.on_header(message):
                    self._report()
            case m.StepWithdrawn() | m.Release() | m.LastStep() | m.End():
                self._on_news(message)
                self._has_news = True
            case m.Pong():
                self._waits_for = message.waits_for
            case _:
                raise ProtocolError(f"a DP rank has no use for {type(message).__name__}")

    def _on_news(self, message: m.StepWithdrawn | m.Release | m.LastStep | m.End) -> None:
        match message:
            case m.StepWithdrawn():
                self._steps.withdraw(message.step)
            case m.Release():
                self._steps.release(message.step)
            case m.LastStep():
                self._last_step = message.step
            case m.End():
                self.end_reason = message.reason

    def take_news(self) -> bool:
        """Whether a message came since the last call that a training loop may wait for.

        Headers and micro-batches of a step before its release are none.
        """
        found, self._has_news = self._has_news, False
        return found

    @property
    def committed(self) -> int:
        """The last step that the training loop has committed, -1 for none."""
        return self._steps.committed

    @property
    def finished(self) -> bool:
        """Whether the stream has ended and everything in it is committed."""
        return self._is_over or (self.end_reason is not None and not self._steps)

    @property
    def exhausted(self) -> bool:
        """Whether the training loop has got every step there will be.

        A step that is announced before the end but not yet released still comes, unless the run is
        finished.
        """
        if self.end_reason is None:
            return False
        return self._is_over or self._steps.next_untaken() is None

    @property
    def _is_over(self) -> bool:
        """Whether the run is finished: what is left is void."""
        return self.end_reason is EndReason.FINISHED

    def finish(self, *, discard: bool) -> None:
        """The training loop takes no more; sent to the dispatcher unless the stream has ended.

        Raises StepContractError while a step is begun and not committed.
        """
        begun = [step for step in self._steps.taken if self._steps.find(step).begun]
        if begun:
            raise StepContractError(
                f"step {begun[0]} is begun and not committed; call step.commit() before "
                "stream.finish(), or leave the step alone"
            )
        if not self.exhausted:
            self._finish = m.Finish(step=self.position, discard=discard)
            self._say(self._finish)

    # -- checkpoints

    @property
    def position(self) -> int:
        """The last step that is in the weights of this rank's trainer, -1 for none."""
        return max(self.committed, self._begun_after)

    @property
    def unconfirmed(self) -> str | None:
        """The message that the dispatcher must not miss; None if there is none so far."""
        if self.committed < 0 and self._saved < 0:
            return None
        return f"the commit of step {self.committed}"

    def resume(self, position: m.CheckpointPosition) -> None:
        """The trainer has loaded a checkpoint: say hello again, and forget what was sent so far.

        Raises StepContractError once the training loop has begun, or has loaded another one.
        """
        if self._begun:
            raise StepContractError(
                "a checkpoint is loaded after the first step was asked for; load it before"
            )
        if self._resume == position:
            return
        if self._resume is not None:
            raise StepContractError(
                f"a checkpoint taken after step {self._resume.step} is loaded already; make a new "
                "stream to load another one"
            )
        self._resume = position
        if self._version is not None:
            first_step = position.step + 1
            self._version = self._version.model_copy(update={"first_step": first_step})
        self._steps.clear()
        self.end_reason = None
        self._resuming = True
        self._hello_due, self._connected = self._connected, False

    @property
    def resuming(self) -> bool:
        """Whether the dispatcher has not answered the loaded checkpoint yet."""
        return self._resuming

    def checkpoint_saved(self, step: int) -> None:
        """A checkpoint taken after that step is durable."""
        if step > self._saved:
            self._saved = step
            self._say(m.CheckpointSaved(step=step))

    # -- the training loop

    @property
    def following(self) -> int | None:
        """The step that the training loop gets next, if its header is here."""
        held = self._steps.next_untaken()
        return None if held is None else held.header.step

    def ready(self) -> HeldStep | None:
        """The step that the training loop gets next, if it is released.

        Raises StepContractError when as many taken steps are uncommitted as may be.
        """
        if self.exhausted:
            return None
        if self._finish is not None:
            raise StepContractError(
                f"finish() was called after step {self._finish.step}, and other DP ranks are still "
                "to call it; no step may follow"
            )
        self._check_open_steps()
        held = self._steps.next_untaken()
        if held is None or held.state is not HeldState.RELEASED:
            return None
        may_begin = self._last_step is None or held.header.step <= self._last_step
        return held if may_begin else None

    @property
    def waits_for(self) -> str:
        """In words, what the next step waits for, as far as it is known here."""
        if not self._connected:
            return "the dispatcher, to which there is no connection"
        return self._waits_for or "the dispatcher, which has not said for what"

    def _check_open_steps(self) -> None:
        open_steps = self._steps.taken
        allowed = self.welcome.max_open_steps if self.welcome else 1
        if len(open_steps) >= allowed:
            raise StepContractError(
                f"{len(open_steps)} steps from step {open_steps[0]} on are taken and not "
                f"committed, and the dispatcher allows {allowed}; call step.commit() after "
                "optimizer.step(), or start the dispatcher with a larger --max-open-steps if so "
                "many are meant to be open"
            )

    def demand(self, *, hungry: bool) -> None:
        """The training loop begins, or ceases, to wait for a step."""
        self._begun |= hungry
        self._asked |= hungry
        if hungry != self.hungry:
            self.hungry, self._waits_for = hungry, ""
            self._say(m.Demand(taken=self.taken, hungry=hungry))

    def take(self, held: HeldStep) -> None:
        """The training loop begins a step that was `ready`."""
        held.state = HeldState.TAKEN
        self.taken, self.hungry, self._asked = held.header.step, False, False
        self._begun = True
        self._say(m.Demand(taken=self.taken, hungry=False))

    def commit(self, step: int) -> None:
        """The training loop has applied a step; raises StepContractError out of order."""
        self._steps.commit(step)
        self._say(m.Commit(step=step))

    def report_times(self, times: m.StepTimes) -> None:
        """What a committed step took, in its commit if that has not left yet.

        They are not sent again where a connection loses them.
        """
        if self._connected and not self._add_to_commit(times):
            self._say(times)

    def _add_to_commit(self, times: m.StepTimes) -> bool:
        """Whether they leave in the step's commit, if that is last in the queue: a message less."""
        commit = self._queue[-1] if self._queue else None
        if not isinstance(commit, m.Commit) or commit.step != times.step:
            return False
        reports = [*(commit.times or ()), times]
        if len(reports) > m.MAX_PASSES or sum(len(each.busy_s) for each in reports) > m.MAX_TIMED:
            return False
        self._queue[-1] = m.Commit(step=commit.step, times=reports)
        return True

    def set_policy_version(self, version: int) -> None:
        """The weights' version that this rank trains from now on.

        Raises StepContractError for one below the last, once a step was taken.
        """
        message = m.PolicyVersion(policy_version=version, first_step=self._next_to_train)
        last = self._version
        if last is not None and last.policy_version == version:
            return
        if last is not None and version < last.policy_version and self.taken >= 0:
            raise StepContractError(
                f"policy version {version} comes after {last.policy_version}: samples would be "
                "taken for fresher or staler than they are; versions can only rise. To go back to "
                "older weights make a new stream"
            )
        self._version = message
        self._say(message)

    @property
    def reports_no_version(self) -> bool:
        """Whether this rank has committed steps and reported no policy version."""
        return self.committed >= 0 and self._version is None

    @property
    def _next_to_train(self) -> int:
        """The first step of which nothing was trained yet."""
        unbegun = self._steps.unbegun()
        return max(self.taken, self.position) + 1 if unbegun is None else unbegun

    def begin(self, step: int) -> HeldStep:
        """The training loop asks for micro-batches of a step.

        Raises StepContractError when it was committed.
        """
        held = self._steps.find(step)
        held.begun = True
        return held

    def hand_out(self, step: int) -> None:
        """The training loop has got a micro-batch of a step."""
        self._steps.find(step).handed_out += 1

    # -- payload stores

    def take_fetches(self) -> list[Fetch]:
        """What to fetch now; each is `found` or `missed` in the end, unless it is not `wanted`."""
        return list(self._steps.to_fetch(self._prefetch_bytes, waits=self._asked))

    def wanted(self, fetch: Fetch) -> bool:
        """Whether its step is still held."""
        return self._steps.holds(fetch.held)

    def found(self, fetch: Fetch, payload: memoryview) -> None:
        """All that a micro-batch lacked is fetched; payload: of all its samples."""
        if self.wanted(fetch):
            fetch.held.fetched(fetch.received.header.index, payload)
        self._report()

    def missed(self, fetch: Fetch, missing: dict[str, str]) -> None:
        """Samples of a micro-batch, by id, are gone, and why."""
        if self.wanted(fetch):
            fetch.held.missed(fetch.received.header.index, missing)
        self._report()

    def _report(self) -> None:
        for message in self._steps.pop_reports():
            self._say(message)

    # -- mechanism

    def _on_micro_batch(self, header: m.MicroBatch, payload: memoryview) -> None:
        held = self._steps.receive(header, payload)
        if held is None:
            return
        self._has_news |= held.state is not HeldState.ANNOUNCED
        if held.header.num_referenced:  # of other steps nothing changes
            self._report()

    def _say(self, message: m.Message) -> None:
        if self._introduced:
            if self._queue and _replaces(message, self._queue[-1]):
                self._queue.pop()
            self._queue.append(message)

    def _on_welcome(self, welcome: m.WelcomeRank) -> None:
        self._has_news, self._last_step = True, None
        if self._connected:
            raise ProtocolError("a second welcome")
        if self.generation not in (None, welcome.generation):
            raise GenerationFenced(
                f"this rank belongs to generation {self.generation}, the dispatcher serves "
                f"{welcome.generation} now"
            )
        if self.welcome is None or self._resuming:
            self._begun_after = welcome.committed
        self.generation, self.welcome = welcome.generation, welcome
        self._prefetch_bytes = welcome.prefetch_bytes
        if self._sent_resume == self._resume:
            self._connected, self._resuming = True, False
        else:
            self._hello_due = True
