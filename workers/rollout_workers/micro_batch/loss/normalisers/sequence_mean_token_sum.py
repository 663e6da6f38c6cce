"""`sequence-mean-token-sum`: the mean over samples of the sum over their tokens."""

from rollout_workers.micro_batch.loss.normalisers.base import FloatArray, Samples, Totals


class SequenceMeanTokenSum:
    """1/S sum over i, t of w[i,t] l[i,t].

    A sample weighs by its length, a step does not: steps of long samples have long gradients.
    verl's `seq-mean-token-sum`.
    """

    by_group = False

    def shares(self, samples: Samples, totals: Totals) -> FloatArray | None:  # noqa: ARG002
        """Nothing: the weights stay what they are."""
        return None

    def denominator(self, totals: Totals) -> float:
        """Samples that have any weight."""
        return totals.weighted_samples
