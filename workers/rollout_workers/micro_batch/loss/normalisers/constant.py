"""`constant:C`: the sum over all tokens, over a number of tokens that the data have no say in."""

from dataclasses import dataclass
from typing import ClassVar

from rollout_workers.micro_batch.loss.normalisers.base import Share, Totals


@dataclass(frozen=True, slots=True)
class Constant:
    """1/(C N) sum over i, t of w[i,t] l[i,t], with C = `tokens`: the longest completion, usually.

    Unbiased where the means above are not: how long samples are, and which of their tokens count,
    changes nothing about the weight of others. Samples without any weight count in N. Dr. GRPO;
    TRL's `dr_grpo`; verl's `seq-mean-token-sum-norm`, which leaves N out.
    """

    tokens: float
    share: ClassVar = Share.NOTHING

    def denominator(self, totals: Totals) -> float:
        """So many tokens for each sample of the step."""
        return self.tokens * totals.samples
