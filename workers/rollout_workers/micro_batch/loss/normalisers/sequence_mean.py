"""`sequence-mean`: every sample of the step weighs the same, however long it is."""

from rollout_workers.micro_batch.loss.normalisers.base import FloatArray, Samples, Totals


class SequenceMean:
    """1/S sum over i of (sum over t of w[i,t] l[i,t] / W[i]).

    GRPO as it was published; verl's `seq-mean-token-mean`; TRL's `grpo`, which counts samples
    without any weight too.
    """

    by_group = False

    def shares(self, samples: Samples, totals: Totals) -> FloatArray:  # noqa: ARG002
        """The weight of each sample."""
        return samples.weights

    def denominator(self, totals: Totals) -> float:
        """Samples that have any weight."""
        return totals.weighted_samples
