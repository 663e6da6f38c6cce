"""`token-mean-expected`: every token of the run weighs the same, whatever step it is in."""

from rollout_workers.micro_batch.loss.normalisers.base import Share, Totals


class TokenMeanExpected:
    """sum over i, t of w[i,t] l[i,t] / (N E), E the running mean of W[i] as samples arrive.

    As `token-mean` divides on average, but long samples that leave together weigh no less for it:
    their step's gradient is longer instead. The dispatcher fixes E when it plans the step.
    """

    share = Share.NOTHING

    def denominator(self, totals: Totals) -> float:
        """N E as a whole number, which is `token-mean`'s where all samples have E."""
        assert totals.expected is not None, "the dispatcher was asked for it"
        return totals.expected
