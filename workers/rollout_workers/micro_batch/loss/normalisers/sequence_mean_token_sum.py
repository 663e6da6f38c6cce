"""`sequence-mean-token-sum`: the mean over samples of the sum over their tokens."""

from rollout_workers.micro_batch.loss.normalisers.base import Share, Totals


class SequenceMeanTokenSum:
    """1/S sum over i, t of w[i,t] l[i,t].

    A sample weighs by its length, a step does not: steps of long samples have long gradients.
    verl's `seq-mean-token-sum`.
    """

    share = Share.NOTHING

    def denominator(self, totals: Totals) -> float:
        """Samples that have any weight."""
        return totals.weighted_samples
