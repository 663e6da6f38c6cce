"""Every fitted or chosen constant of planning."""

from rollout_dispatcher.balance.work import Price

#: Steps up to this many samples are compared with the greedy split even if they wait less than the
#: target. Chosen: it adds a tenth of a millisecond.
ALWAYS_COMPARED = 200
#: Steps under a token budget that wait no more than this above what was thought possible are
#: compared with nothing. Chosen.
AS_THOUGHT = 0.01
GREEDY_BY_COUNT = Price(once=40_000, sample=350, rank=600)
GREEDY_BY_TOKENS = Price(once=60_000, sample=1400, rank=3000, look=15)
KK_BY_COUNT = Price(once=60_000, sample=1800)
KK_BY_TOKENS = Price(once=60_000, sample=3500, rank=3000, look=15)
SPLIT_BY_COUNT = Price(once=400_000, sample=600)
SPLIT_BY_TOKENS = Price(once=250_000, sample=1500)
