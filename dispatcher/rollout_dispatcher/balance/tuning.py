"""Every fitted or chosen number of planning: what it does, what it trades, and where it is from.

Invariant: none of them decides whether a plan is legal, only how good it is and how long it takes.

"By" names the command whose figures a number was chosen by; run it again after changing one, on
all its rows, as a number that is better for one trace is often worse for another. "Chosen" says
that it is a sensible value that nothing was fitted to.
"""

from rollout_dispatcher.balance.work import Price

# Selection: when to stop, and what skipping costs.

#: Straggler excess below which a better selection is not worth disturbing the order of arrival:
#: less waits less and lets fewer steps leave as they came. By `tests.bench.windows`.
GOOD_ENOUGH = 1e-3
#: Columns of the heaviest that leave together when something is due; with one the next to be due
#: is left alone, four leave less to choose from. By `tests.bench.windows`.
TOGETHER = 2
#: Price of skipping an item again: the share of what its column would wait that it has to bear
#: once it has been skipped for long; half of that at this age. More spreads delays, and waits
#: more. By `tests.bench.windows`.
RIPE, RIPENING = 0.3, 1 / 8
#: How late the price of an item's age rises, as a power: where micro-steps are columns, and
#: elsewhere. By `tests.bench.windows`.
LATE_IN_COLUMNS, LATE = 3, 2
#: Price of skipping ahead of or behind an even share: where micro-steps are columns; elsewhere if
#: as many are skipped as are taken, and more if fewer are. More keeps lengths alike, and waits
#: more. By `tests.bench.windows`, waiting and distance.
SKIPS_IN_COLUMNS, SKIPS = 3.5, 1.3
#: How much of the window the column DP may skip ahead or behind its share at any length: where
#: samples are padded to the longest, where micro-steps are columns, and elsewhere. A wider band
#: waits less and biases the lengths that leave. By `tests.bench.windows`.
BAND_OF_PADDED, BAND_OF_COLUMNS, BAND = 0.2, 0.12, 0.06

#: Samples of a padded micro-batch that should be alike where a budget decides how many there are:
#: of its long ones, which are dear, it holds few. Chosen.
ALIKE_IN_BUDGET = 2

# The column DP: how finely it looks.

#: States of the program: more are finer and take longer. Chosen.
STATES = 1024
#: Columns taken one by one from the heavy end before runs grow; then this many runs of each size.
#: More are finer and take longer. Chosen.
SINGLE_COLUMNS, RUNS_OF_A_SIZE = 32, 4
#: The window counts as waiting for this share of its work at least: alike samples wait for nobody
#: and are to be spread all the same. Chosen.
LEAST_WAITS = 1 / 128

# The outlier lane: how many of the heaviest wait for company.

#: At most one of so many of a dispatch batch is held: outliers with company, or where ranks wait
#: once a step; outliers that stand alone; without an outlier, where it is the shape of a packing
#: that waits, which takes few to mend. More gains little and biases what is left. By
#: `tests.bench.lane`.
HELD, HELD_PER_STEP, HELD_ALONE, HELD_FOR_SHAPE = 4, 8, 8, 16
#: From one count to be held to the next: finer steps are more candidates. Chosen.
HELD_GROWTH = 2.5
#: An outlier has company if a sample for every so many-th rank costs at least this part of it. By
#: `tests.bench.lane`.
COMPANY_RANKS, COMPANY_COST = 4, 0.6
#: Outliers are common, as where lengths are capped, if there is one for every tenth rank, and four
#: at least, that costs this part of the largest. By `tests.bench.windows`, lineage 512/64.
COMMON_RANKS, COMMON_LEAST, COMMON_COST = 10, 4, 0.9
#: How many columns' worth of the heaviest leave together, as tried in turn. By
#: `tests.bench.windows`: 16 would empty the heavy end and make lengths swing.
COMPANY = (1, 4)
#: Columns from the heavy end that are watched for running into their deadline. Chosen.
WATCHED_COLUMNS = 2
#: Weight of a debt against waiting now. By `tests.bench.windows`.
DEBT_WEIGHT = 1.5
#: Share of what is held that may differ from the window's lengths, besides what chance makes of
#: so few, and the price of the rest where as many are held as are taken. By `tests.bench.windows`,
#: waiting and distance.
UNLIKE, BIAS_WEIGHT = 0.05, 0.5

# The estimate: what a good split will take.

#: So many micro-steps exchange dear samples for cheap ones until all hold their share. Fitted by
#: eye to packings of real and lognormal lengths, as are the next two.
MANY_COLUMNS = 3
#: That goes well up to this share of the budget; beyond, one of them or two wait, the more the
#: more samples differ in cost a token.
EASY_FILL, TIGHT_FILL = 0.94, 3.0
#: Share of their tokens up to which micro-steps fill well, in packing too. By
#: `tests.bench.windows`, token budgets.
WELL_FILLED = 0.97

# Splitting: how evenly, and how long.

#: Above this many items, and with so many bins at least, LPT goes by chunks: same idea, vectorised,
#: and no longer item by item. By `tests.bench.planner`, times.
CHUNKED_FROM, CHUNKED_BINS = 3000, 32
#: Loads within this of their mean count as level: finer takes more swaps, and no cost model knows.
#: Chosen.
TOLERANCE = 2e-4
#: Swap candidates a bin; more than this costs time and adds nothing, as many are alike. Chosen.
SWAP_SLOTS = 16
#: When no pair can gain, bins are paired otherwise, this often; under a token budget less often, as
#: it is the budget that stands in the way. By `tests.bench.planner`, times.
OTHER_PAIRINGS, OTHER_PAIRINGS_IN_BUDGET = 3, 1
#: Columns dealt to ranks by load; the ones after that differ too little to be worth it. Chosen.
DEALT_BY_LOAD = 64
#: Equal sums are tried from other starts than LPT above so many tolerances, up to so many items. By
#: `tests.bench.planner`, times.
OTHER_STARTS, OTHER_STARTS_UP_TO = 5, 4096
#: Rows of neighbours that wait no more than this are not worth another construction. Chosen.
FAIR_COLUMNS = 1.01
#: Levelling of columns ends when this share of the step is lost to waiting, or after so many
#: rounds: the error of any cost model is larger. By `tests.bench.planner`, times.
LEVEL_COLUMNS, COLUMN_ROUNDS = 3e-3, 5
#: The same under a token budget.
LEVEL_PACKING, PACKING_ROUNDS = 1e-3, 8
#: Where tokens take more than this share of all budgets, many items are not tried to be packed by
#: cost: the last of them never find room. Chosen.
SCARCE = 0.99
#: So few items that fill so much of all budgets are worth more than one packing: single ones
#: matter, and it takes no time. Chosen.
FEW_ITEMS, FEW_FILL = 64, 0.8
#: A packing of many items that waits no more than this is good enough as it is. Chosen.
EVEN_PACKING = 1.003
#: Items a bin, the smallest ones, that may go by best fit where tokens are tight. Chosen.
TAIL = 3
#: How often a level may rise to hold more tokens. Chosen.
RISES = 8
#: Items of one length, on average, from which on best fit takes them together. By
#: `tests.bench.planner --cell deepseek-16384x8-w1`, time alone.
ALIKE = 3
#: Micro-batches a rank beyond which next fit cuts ranks one after the other; time alone, likewise.
MANY_RUNS = 24

# Comparisons: when other splits are tried, and what they take.

#: Steps up to this many samples are compared with the greedy split even if they wait less than the
#: target: it adds a tenth of a millisecond. Chosen.
ALWAYS_COMPARED = 200
#: Steps under a token budget that wait no more than this above what was thought possible are
#: compared with nothing. Chosen.
AS_THOUGHT = 0.01
#: Operations, a nanosecond of one core each: by the times of each method on lognormal lengths, 64
#: to 4,096 samples on 4 to 256 ranks, read off by eye.
GREEDY_BY_COUNT = Price(once=40_000, sample=350, rank=600)
GREEDY_BY_TOKENS = Price(once=60_000, sample=1400, rank=3000, look=15)
KK_BY_COUNT = Price(once=60_000, sample=1800)
KK_BY_TOKENS = Price(once=60_000, sample=3500, rank=3000, look=15)
#: The same, of the splitter itself.
SPLIT_BY_COUNT = Price(once=400_000, sample=600)
SPLIT_BY_TOKENS = Price(once=250_000, sample=1500)
