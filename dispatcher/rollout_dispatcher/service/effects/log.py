"""What of the core's effects is for people: lines in the log, with causes and remedies."""

import logging

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.buffer.limits import STORES_CAP
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.statistics import Statistics

log = logging.getLogger(__name__)


def accepted_unknown(effect: e.AcceptedUnknown) -> None:
    """The journal is not the one that has acknowledged."""
    log.error(
        "producer %s was told that its sample %d is accepted, and the journal knows %s: it is an "
        "older copy, or its disk has lost what came last; the samples between are not trained on. "
        "Start the dispatcher with the journal that has them, or go on without",
        effect.producer, effect.accepted,
        f"none after its sample {effect.newest}" if effect.newest >= 0 else "none of its samples",
    )  # fmt: skip


def given_up(effect: e.GroupGivenUp) -> None:
    """A group left, for want of room."""
    in_stores = effect.cap.cap == STORES_CAP
    log.warning(
        "group %s was given up with its %d samples: beginnings of groups fill the buffer at its %s "
        "cap (%d of %d) and none could become whole; raise %s, or have fewer groups under way",
        effect.group_id, effect.num_samples, effect.cap.cap, effect.cap.held, effect.cap.capacity,
        "--referenced-bytes" if in_stores else "--buffer-bytes, or use --journal-dir",
    )  # fmt: skip


def unresolved(effect: e.SamplesUnresolved) -> None:
    """Samples left their step."""
    where = "payload store" if effect.reason is DropReason.UNRESOLVED else "journal, damaged there"
    log.warning(
        "DP rank %d cannot get samples of step %d from their %s: %d are dropped (%s), groups "
        "whole, sample %s first, and the step is planned again%s",
        effect.dp_rank, effect.step, where, effect.samples, effect.reason, effect.first,
        f" ({effect.why})" if effect.why else "",
    )  # fmt: skip


def rewound(effect: e.Rewound) -> None:
    """An older checkpoint was loaded."""
    if effect.missing:
        log.warning(
            "a checkpoint taken after step %d was loaded: the %d steps trained after it cannot "
            "be given again (with --journal-dir, and --retain-bytes large enough, they could); "
            "training goes on with the next one",
            effect.after, effect.missing,
        )  # fmt: skip
    else:
        log.info(
            "a checkpoint taken after step %d was loaded: %d steps of %d samples go back",
            effect.after, effect.steps, effect.samples,
        )  # fmt: skip


def evicted(effect: e.StepsEvicted) -> None:
    """Steps can be given again no more."""
    log.warning(
        "there is no room for more than %.1f MiB of committed steps that no saved checkpoint "
        "covers: the steps up to %d have gone (%d in all), and a checkpoint before that cannot be "
        "resumed from; call stream.checkpoint_saved, or raise --retain-bytes",
        effect.limit / 2**20, effect.through, effect.steps,
    )  # fmt: skip


def ids_repeated(effect: e.IdsRepeated) -> None:
    """Samples come under ids that were accepted before, and are not trained on."""
    who = f"producer {effect.producer}" if effect.producer else "an HTTP client"
    if effect.conflicts:
        log.warning(
            "sample %s of %s has other content than the accepted sample of this id, which is kept; "
            "the new one is not trained on (counted in samples_received_total{outcome=conflict}): "
            "give each rollout an id of its own, with its epoch or step in it, or none",
            effect.sample_id, who,
        )  # fmt: skip
        return
    log.warning(
        "%d samples in a row of %s, up to %s, have ids of samples that were accepted before, and "
        "are not trained on: either it replays what it has pushed before a crash, which is right, "
        "or ids are used again (for each epoch, say): then put the epoch into them",
        effect.in_a_row, who, effect.sample_id,
    )  # fmt: skip


def schema_decided(effect: e.SchemaDecided) -> None:
    """Which fields samples have."""
    fields = ", ".join(f"{field.name} {field}" for field in effect.schema.fields)
    log.info("samples have the fields %s (%s)", fields, effect.set_by)


def cost_changed(effect: e.CostChanged) -> None:
    """Plans are made with what was measured."""
    fitted = effect.fitted
    log.info(
        "from step %d on plans are made with the cost %s, fitted to what micro-batches took (they "
        "stray from it by %.1f %%); the one before has lost %.1f %% of the ranks' time",
        fitted.first_step, fitted.cost, 100 * fitted.error, 100 * effect.loss,
    )  # fmt: skip


def speeds_changed(effect: e.SpeedsChanged) -> None:
    """Plans are made for ranks of other speed."""
    measured = effect.measured
    slow = [f"{rank} takes {slow:.2f}" for rank, slow in enumerate(measured.slowness) if slow != 1]
    log.info(
        "from step %d on plans give each DP rank work in proportion to its speed: %s",
        measured.first_step,
        f"rank {', '.join(slow[:8])}{', ...' * (len(slow) > 8)} times as long as the median one"
        if slow else "no rank is slower than the median one",
    )  # fmt: skip


def drained(effect: e.Drained, at: Statistics) -> None:
    """Nothing is left to train."""
    if effect.reason == "finished":
        log.info(
            "the DP ranks have finished the run after %d steps: %d samples that were not used are "
            "dropped, %d stay in the journal for the next start",
            at.steps_committed, at.dropped[DropReason.UNUSED], at.buffered + at.in_flight,
        )  # fmt: skip
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in at.dropped.items() if count)
    dropped = f"; of {at.accepted} accepted samples some were dropped: {reasons}"
    log.info("%s: every step is committed%s", effect.reason, dropped if reasons else "")
