"""`token-mean`: every token of the step weighs the same."""

from rollout_workers.micro_batch.loss.normalisers.base import Share, Totals


class TokenMean:
    """sum over i, t of w[i,t] l[i,t] / sum over i, t of w[i,t].

    Long samples weigh more. DAPO; verl's `token-mean`, TRL's `dapo`.
    """

    share = Share.NOTHING

    def denominator(self, totals: Totals) -> float:
        """The sum of all weights; of a mask, the number of tokens that it counts."""
        return totals.weight
