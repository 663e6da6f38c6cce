"""`sequence-mean`: every sample of the step weighs the same, however long it is."""

from rollout_workers.micro_batch.loss.normalisers.base import Share, Totals


class SequenceMean:
    """1/S sum over i of (sum over t of w[i,t] l[i,t] / W[i]).

    GRPO as it was published; verl's `seq-mean-token-mean`; TRL's `grpo`, which counts samples
    without any weight too.
    """

    share = Share.SAMPLE

    def denominator(self, totals: Totals) -> float:
        """Samples that have any weight."""
        return totals.weighted_samples
