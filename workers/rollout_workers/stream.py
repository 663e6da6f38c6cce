"""`MicroBatchStream`: the training loop's view of the dispatcher.

Every DP rank iterates the same steps with the same number of micro-batches; an error of any rank
or of the dispatcher is raised in every rank's training loop rather than left to hang in a
collective. Bytes become tensors in the training thread, when the loop asks for a micro-batch.

A stream's part of a checkpoint names its run, and the step after which it was taken, in plain
integers and strings, so that any checkpoint format can hold it.
"""

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import CheckpointRefused, ConfigError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.slices import Slicing
from rollout_workers.client.connector import Credentials
from rollout_workers.client.process import Closing, forbid_pickle
from rollout_workers.micro_batch.blocks import make_blocks
from rollout_workers.micro_batch.collate import CollateConfig
from rollout_workers.micro_batch.delivery import delivery_to, memory_for
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import (
    GradReduction,
    LossConfig,
    choice,
    divisor,
    named_losses,
    normaliser,
)
from rollout_workers.rank.client import RankStatistics, RankStep
from rollout_workers.rank.memory_pool import MemoryPool
from rollout_workers.step import Step
from rollout_workers.timing.timing import Timing
from rollout_workers.topology import find_topology

log = logging.getLogger(__name__)


#: Of the state; a newer one is refused.
FORMAT = 1


def state_of(run_id: str, step: int) -> dict[str, int | str]:
    """The state after `step` of a run."""
    return {"format": FORMAT, "run_id": run_id, "step": step}


def position_of(state: Mapping[str, object]) -> m.CheckpointPosition:
    """Where a state was taken. Raises CheckpointRefused for what is no state of a stream."""
    found = state.get("format")
    if found != FORMAT:
        raise CheckpointRefused(
            f"the stream's state has format {found!r}, this release reads format {FORMAT}; load it "
            "with the release that saved it"
        )
    try:
        return m.CheckpointPosition.model_validate(
            {key: state.get(key) for key in ("run_id", "step")}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CheckpointRefused(
            f"this is no state of a stream: {first['loc'][0]}: {first['msg']}; hand "
            "load_state_dict what state_dict returned"
        ) from error


class MicroBatchStream(Closing):
    """Steps of micro-batches for this DP rank; an iterator and a context manager.

    endpoint: `host:port`, `tls://host:port` or `unix:/path`.
    dp_rank, dp_size: this process's data-parallel position; default: of `process_group` or the
        default process group, else RANK and WORLD_SIZE, else a single process. A process with a
        device mesh of several dimensions has to say it, here or by `mesh`.
    process_group: of the DP ranks, in their order, where they are not those of a mesh.
    mesh: the trainer's whole device mesh; then make the stream on every rank of it, in the same
        order, like a collective. In each model replica the DP leader (0 in all dimensions but the
        data-parallel ones) is connected and relays to its peers, over a gloo group of their own:
        they get the same steps and micro-batches, and its errors.
    dp_dims: the name of the mesh's data-parallel dimension, or several names (HSDP); a mesh of one
        dimension needs none.
    grad_mesh: over which ranks the trainer averages gradients, where these are more than the DP
        ranks: `mesh["dp", "cp"]` where FSDP shards over both. `loss_scale` follows.
    generation: identity of this start of all ranks together. Default: DP rank 0 asks for one and
        broadcasts it in the process group; so make streams on all ranks, in the same
        order, like a collective.
    layout: `packed`, `padded` or `jagged`; default: what the dispatcher plans for.
    loss_normalisation: over what the loss of the whole step is averaged: `token-mean`,
        `token-mean-expected`, `sequence-mean`, `sequence-mean-token-sum`, `group-mean`, or
        `constant:4096` (Dr. GRPO).
    losses: more of them, by name, each with a normalisation of its own: `{"kl": "sequence-mean"}`
        makes `micro_batch.kl_weights` and `micro_batch.loss_scales["kl"]`.
    grad_reduction: `mean` where the trainer averages gradients over ranks (DDP, FSDP), or `sum`.
    trainer_divides_by: what the trainer divides each loss by on its own, which `loss_scale` makes
        good: `micro-batches` where it is their number, as in Megatron, or a fixed number of them,
        as DeepSpeed's `gradient_accumulation_steps`. Not for DeepSpeed's `scale_wrt_gas=False`, and
        not for Hugging Face's Trainer with a `compute_loss_func`: these divide by nothing.
    epochs: how often the training loop iterates each step, if it is known: the last time needs no
        copy then, and one more is an error. Default: any number of times, each with a copy.
    prefetch_steps: steps to receive ahead of the training loop.
    timeout: seconds that `next()` waits for a step at most, above 0; then it raises StepTimeout,
        which says what the step waits for, and may be called again. Default: as long as it takes.
    reconnect_timeout: seconds to keep trying when the dispatcher cannot be reached.
    credentials: what to show and trust; default: what the environment says.
    packed_length: pad every packed micro-batch to so many tokens, at least the dispatcher's token
        budget, so that shapes are static (torch.compile).
    max_split: DP ranks that may train a micro-batch together, each on slices of its samples, as the
        dispatcher's --set max-split says: 2, 4, 8 ... For models whose attention runs over
        `micro_batch.cp_group`, see docs/guide.md; it makes those process groups, a collective.
    slicing: what a rank has of a sample then: `zigzag` (a piece of both halves) or `contiguous`.
    device: where tensors go; default: host memory. To a GPU they are copied from pinned memory, on
        a stream of their own, while the micro-batch before is computed.
    weights_dtype: of `loss_weights`.
    measure: whether to time micro-batches and report that to the dispatcher, which shows the time
        that ranks lose beside the time that they compute; it never waits for the GPU. See
        `measure_model`.

    It belongs to the process that makes it: a forked child, and a DataLoader with workers, get
    ConfigError (with `num_workers=0` a dataset may iterate it).

    Raises ConfigError, DispatcherUnreachable, Unauthorized, TlsFailed, RankRefused,
    GenerationFenced, PeerLost; iterating raises them too. PeerLost names the DP rank that closed
    its stream while others go on, or has had no connection for the dispatcher's --rank-timeout.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        generation: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        dp_dims: str | Sequence[str] | None = None,
        grad_mesh: DeviceMesh | None = None,
        layout: str | None = None,
        loss_normalisation: str = "token-mean",
        losses: Mapping[str, str] | None = None,
        grad_reduction: str = "mean",
        trainer_divides_by: int | str = 1,
        epochs: int | None = None,
        prefetch_steps: int = 1,
        timeout: float | None = None,
        reconnect_timeout: float = 300.0,
        credentials: Credentials | None = None,
        packed_length: int | None = None,
        max_split: int = 1,
        slicing: str = Slicing.ZIGZAG,
        device: torch.device | str | None = None,
        weights_dtype: torch.dtype = torch.float32,
        measure: bool = True,
    ) -> None:
        topology = find_topology(
            dp_rank=dp_rank, dp_size=dp_size, process_group=process_group, generation=generation,
            mesh=mesh, dp_dims=dp_dims, grad_mesh=grad_mesh,
        )  # fmt: skip
        loss = LossConfig(
            topology.grad_ranks,
            normaliser("loss_normalisation", loss_normalisation),
            choice(GradReduction, "grad_reduction", grad_reduction),
            weights_dtype,
            named_losses(losses or {}),
            divisor(trainer_divides_by),
        )
        collation = None if layout is None else choice(Collation, "layout", layout)
        if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
            raise ConfigError(f"epochs is {epochs!r}; it is a number of times, at least 1")
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"timeout is {timeout!r}; give seconds above 0, or None for no limit")
        training = _training(
            losses or {},
            loss_normalisation=loss_normalisation,
            grad_reduction=grad_reduction,
            grad_ranks=topology.grad_ranks,
            trainer_divides_by=trainer_divides_by,
            weights_dtype=weights_dtype,
            layout=collation,
            packed_length=packed_length,
            max_split=max_split if max_split > 1 else None,
            slicing=slicing if max_split > 1 else None,
            epochs=epochs,
        )
        blocks = None
        if max_split != 1:
            blocks = make_blocks(
                topology.place, topology.dp_ranks, max_split, choice(Slicing, "slicing", slicing)
            )
        target = None if device is None else torch.device(device)
        pool = MemoryPool()
        self._client = topology.join(
            endpoint,
            generation,
            memory_for(target) or pool,
            prefetch_steps=prefetch_steps,
            reconnect_timeout=reconnect_timeout,
            credentials=credentials,
            packed_length=packed_length,
            max_split=max_split,
            slicing=None if blocks is None else blocks.slicing,
            training=training,
        )
        self._close = weakref.finalize(self, self._client.close)
        self._close.atexit = False  # the client's own exit hook knows whether to say goodbye
        self._speaks, self._epochs, self._timeout = topology.speaks, epochs, timeout
        self._has_warned = False  # that no policy version is reported
        self._has_logged_no_loss = False
        self._config = CollateConfig(
            loss,
            collation=collation or choice(Collation, "layout", self._client.layout),
            sample_length_multiple=self._client.sample_length_multiple,
            packed_length=packed_length,
            delivery=delivery_to(target),
            memory=pool,
            blocks=blocks,
        )
        self._check_layout()
        self._timing: Timing | None = None
        if measure and self._client.reports_times:
            self._timing = Timing(
                self._client.report_times,
                dp_size=topology.place.dp_size,
                dp_ranks=topology.dp_ranks,
                device=target,
                logs_why=topology.speaks,
            )
            self._client.watch_collectives(self._timing.collectives_begun)

    def _check_layout(self) -> None:
        """Raise ConfigError, once closed, for options that its layout does not have."""
        layout, length = self._config.collation, self._config.packed_length
        given = {"max_split": self._config.blocks, "packed_length": length}
        for name, value in given.items():
            if value is not None and layout is not Collation.PACKED:
                self.close()
                raise ConfigError(
                    f"{name} is for packed micro-batches, and these are {layout}; leave it out, or "
                    "pass layout='packed'"
                )
        if self._config.blocks is not None and (length or 0) % 2:
            self.close()
            raise ConfigError(
                f"packed_length is {length}, and with max_split micro-batches have two pieces of "
                "one length; make it even"
            )

    def __reduce__(self) -> NoReturn:
        forbid_pickle("stream")

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """Wait for the next step that every DP rank is prepared for; ends with the stream.

        Raises StepContractError when too many steps are not committed, StepTimeout after `timeout`,
        or what ended the stream for good.
        """
        if self._speaks and not self._has_warned and self._client.reports_no_version:
            self._has_warned = True
            log.warning(
                "the dispatcher has --max-staleness %s, and this trainer has committed steps and "
                "reported no policy version: staleness is not checked; call "
                "stream.set_policy_version(version) whenever the weights have a new one",
                self._client.welcome.max_staleness,
            )
        step = self._client.next_step(self._timeout)
        if self._timing is not None:
            self._timing.flush()
        if step is None:
            raise StopIteration
        self._look_for_loss(step)
        return Step(step, self._config, self._epochs, self._timing)

    def _look_for_loss(self, step: RankStep) -> None:
        """Log once that a step's masks leave nothing to train on."""
        header = step.header
        if self._speaks and not self._has_logged_no_loss and header.loss_tokens == 0:
            self._has_logged_no_loss = True
            log.warning(
                "step %d has %d samples and no loss token: loss_mask marks none of their tokens, "
                "so the step has no gradient; push loss_mask with 1 for each token that the loss "
                "counts. This is logged once",
                header.step, header.num_samples,
            )  # fmt: skip

    def measure_model(self, model: nn.Module) -> None:
        """Measure waiting in this model apart from computing, where the stream has not found it.

        By itself it searches for DDP and FSDP2 models when the first steps begin, among the objects
        that Python's garbage collector knows; after `gc.freeze()` earlier ones are not among them.
        Raises ConfigError where no part of the model is one of these.
        """
        if self._timing is not None:
            self._timing.measure(model.modules())

    @property
    def generation(self) -> int:
        """Identity of this start of all ranks together, given by the dispatcher."""
        return self._client.generation

    @property
    def end_reason(self) -> EndReason | None:
        """Why the stream has ended; None while it has not.

        A string: `finished` (every rank has called `finish`), `ended` (producers, or a controller,
        have ended the stream, and all of it is trained on) or `drained` (the dispatcher shuts down
        on request; producers may have more).
        """
        return self._client.end_reason

    def finish(self, *, discard: bool = False) -> None:
        """End the run, as after a number of steps.

        Call it on every rank after the same step, then close; it returns once every rank has.
        Producers that wait in `push`, or push later, get RunFinished, and the dispatcher ends with
        exit code 0 once the ranks have left. What was not used stays in the journal for the next
        start on it; without a journal, or with `discard`, it is dropped and counted (`unused`). A
        step that was taken and of which nothing was iterated is not used. Where the stream has
        ended by itself it does nothing.

        Raises StepContractError where ranks finish after different steps or one goes on, on all of
        them, and for a step that is begun and not committed; PeerLost where a rank has left without
        it; StepTimeout after the stream's `timeout`.
        """
        self._client.finish(discard=discard, timeout=self._timeout)

    def set_policy_version(self, version: int) -> None:
        """Report the version of the weights that training goes on with.

        It counts for the step at hand if that step is taken, not committed, and none of its
        micro-batches was asked for yet; otherwise from the step after the last one taken. So call
        it when the weights of a new version are in place: after `optimizer.step()`, and before
        `commit()`, so that a plan that is made upon the commit knows it; or first thing in the
        loop's body. After a checkpoint was loaded report its version: not before `load_state_dict`.

        DP rank 0's report counts; on other ranks this does nothing, so every rank may call it.
        Raises ConfigError below 0, and StepContractError for a version below the last one once a
        step was taken: versions only rise.
        """
        if self._speaks:
            self._client.set_policy_version(version)

    def state_dict(self) -> dict[str, int | str]:
        """What a checkpoint of the trainer has to hold of this stream; the same on every rank.

        It counts the steps that this rank committed, not those prefetched, so take it at the same
        place of every rank's loop. It releases nothing: see `checkpoint_saved`.
        """
        return state_of(self._client.run_id, self._client.position)

    def load_state_dict(
        self, state: Mapping[str, object], *, strict: bool = True, allow_lost_steps: bool = False
    ) -> None:
        """Go on after the step that `state_dict` was taken after; on every rank, before any step.

        With a journal the steps that were committed since come again, identical. Without one, or
        with `sample_retention=commit`, they are gone: that is logged as a warning, and counted, and
        the stream goes on with the next step. Raises CheckpointRefused when the checkpoint is of
        another run, ahead of the dispatcher, or older than what the journal still has, or when
        other ranks have loaded another one (which iterating may raise too); StepContractError after
        the first step.

        allow_lost_steps: go on, with a warning, where steps that were trained after the checkpoint
            are not there any more, as they were more than `retain_bytes`, or a later checkpoint
            was reported saved: their samples are not in the weights.

        strict: whether the checkpoint must be of this run. If it need not and is not, as when a
            new run begins with the weights of another, the stream goes on where this dispatcher
            stands, with a warning.
        """
        asked = position_of(state)
        if not strict and asked.run_id != self._client.run_id:
            log.warning(
                "the checkpoint was taken after step %d of run %s, and this dispatcher serves run "
                "%s: training goes on with what it has, after its step %d",
                asked.step, asked.run_id, self._client.run_id, self._client.position,
            )  # fmt: skip
            return
        self._client.resume(asked.model_copy(update={"allow_lost_steps": allow_lost_steps}))
        missing = self._client.position - asked.step
        if missing > 0:
            log.warning(
                "the %d steps after step %d were trained after this checkpoint and cannot be given "
                "again; training goes on after step %d. A dispatcher with --journal-dir, and "
                "--set retain-bytes large enough, gives such steps again",
                missing, asked.step, asked.step + missing,
            )  # fmt: skip

    def checkpoint_saved(self, state: Mapping[str, object]) -> None:
        """The checkpoint with this state is durable: nothing up to it is needed again.

        With a journal this frees the samples; the run can no longer go back behind it.
        DP rank 0's word counts; on other ranks this does nothing, so every rank may call it.
        Raises CheckpointRefused for a state that is not of this stream's past.
        """
        position = position_of(state)
        if position.run_id != self._client.run_id or position.step > self._client.position:
            raise CheckpointRefused(
                f"the checkpoint saved was taken after step {position.step} of run "
                f"{position.run_id}, and this stream stands after step {self._client.position} of "
                f"run {self._client.run_id}; hand over what its own state_dict returned"
            )
        if self._speaks:
            self._client.checkpoint_saved(position.step)

    def statistics(self) -> RankStatistics:
        """A frozen snapshot of what this stream has done so far."""
        return self._client.statistics()

    def close(self) -> None:
        """Deliver what was committed and disconnect. Idempotent, bounded in time.

        A `with` block that ends by an exception, and an interpreter that exits because of one, call
        `abandon` instead.
        """
        self._close()

    def abandon(self) -> None:
        """As `close`, for a program that has failed: the dispatcher counts this rank as lost."""
        if self._close.detach() is not None:
            self._client.abandon()


def _training(losses: Mapping[str, str], **options: object) -> dict[str, str]:
    """The given options that shape gradients, as text: DP ranks have to agree on them.

    A long one is cut, with a checksum.
    """
    given = {name: str(value) for name, value in options.items() if value is not None}
    given |= {f"losses[{name!r}]": word for name, word in losses.items()}
    most = m.MAX_TRAINING_VALUE
    return {
        name: words if len(words) <= most else f"{words[:200]}... ({crc32(words.encode()):08x})"
        for name, words in given.items()
    }
