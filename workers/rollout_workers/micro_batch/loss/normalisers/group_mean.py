"""`group-mean`: every group of the step weighs the same, and every token within a group."""

from rollout_workers.micro_batch.loss.normalisers.base import Share, Totals


class GroupMean:
    """1/G sum over g of (sum over i in g, t of w[i,t] l[i,t] / V[g]).

    The token mean of each prompt's answers, averaged over prompts. A sample without a group is one
    of its own. Members of a group may be on any ranks; those that were dropped do not count.
    """

    share = Share.GROUP

    def denominator(self, totals: Totals) -> float:
        """Groups that have any weight."""
        if totals.groups is None:
            return totals.weighted_samples
        return int((totals.groups > 0).sum())
