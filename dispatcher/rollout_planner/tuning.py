"""Every fitted or chosen number of planning: what it does, what it trades, and where it is from.

Invariant: none of them decides whether a plan is legal, only how good it is and how long it takes.

"By" names the command whose figures a number was chosen by; run it again after changing one, on
all its rows, as a number that is better for one trace is often worse for another. "Chosen" says
that it is a sensible value that nothing was fitted to, "chosen by trial" that others were tried on
real and lognormal lengths and did no better. What any of them trades, in excess and in time, is
shown by `python -m tests.bench.constants NAME VALUE ...`; where that is named here with values, the
figures of its cells move between these; others matter to rarer batches than it has. The numbers of
`LengthBucketSampler` stand beside its order of samples, as no plan depends on them.
"""

import numpy as np

# How even is even enough, and for how long it is tried.

#: Waiting below which nothing better is looked for, as a share of a step: the error of any cost
#: model is larger, and a better selection would disturb the order of arrival. By
#: `tests.bench.windows`, and `tests.bench.constants LEVEL 1e-4 1e-3 1e-2 --cell budget-512`.
LEVEL = 1e-3
#: The same of columns of equal counts, of which there are many: a step of 4096 samples takes
#: a third longer to plan with 1e-3, `tests.bench.planner`.
LEVEL_COLUMNS = 3e-3
#: Loads within this of their mean, or times of their bound, count as equal: finer takes more swaps
#: and trades. By `tests.bench.constants TOLERANCE 2e-4 2e-3 1e-2 --cell small`.
TOLERANCE = 2e-4

# Four counts that many methods share. Of each, half as many wait longer somewhere, and more hardly
# less; none is fitted to more than a power of two.

#: Micro-batches beyond the fewest that are tried; where ranks keep their samples, numbers of
#: micro-batches that are looked at closer: 2 take longer steps. Selections that are split, where
#: the first waits longer than estimated: by `tests.bench.properties`, of lengths of two kinds, 2
#: wait longer, 6 as long.
MORE_TRIED = RECUT_COUNTS = SELECTIONS = FEW = 4
#: At most one of so many of a dispatch batch is held where there are outliers: more gains little
#: and biases what is left, by `tests.bench.mix`. Micro-batches that the dearest is compared with:
#: `tests.bench.constants TRADE_PARTNERS 1 2 8`. Parts in which places and paces are tried.
HELD = TRADE_PARTNERS = EIGHTHS = 8
#: Rounds of swaps; slots of a bin that one looks at, as many are alike; different levels of padded
#: micro-steps, where these are many; the part of a step that the next try has fewer of, where it is
#: too much by its parts' unevenness alone. By `tests.bench.constants SWAP_SLOTS 8 16 32`, STAGES.
ROUNDS = SWAP_SLOTS = STAGES = CAP_STEPS_DOWN = 16
#: As HELD, where there are no outliers; columns of each size of runs of the column DP, of one
#: column, of two, and so on; places of padded runs that are filled one by one.
HELD_FOR_SHAPE = SINGLE_COLUMNS = FILL_STEPS = 32

#: What sums of floats may be off by, in shares of them.
ROUNDING = 1e-9

# Selection: what skipping costs.

#: Price of skipping ahead of or behind an even share, and how much of the window may be, at any
#: length. More of the price keeps lengths alike, and waits more; a wider band waits less and biases
#: the lengths that leave. By `tests.bench.windows`, waiting and distance.
SKIPS, BAND = 3.5, 0.2

#: Samples of a padded micro-batch that should be alike where a budget decides how many there are:
#: of its long ones, which are dear, it holds few. Chosen.
ALIKE_IN_BUDGET = 2

# The column DP: how finely it looks.

#: States of the program. More are finer and take longer:
#: `tests.bench.constants STATES 256 1024 --cell fixed-4096`.
STATES = 256

# The outlier lane: how many of the heaviest wait for company.

#: How many columns' worth of the heaviest leave together, as tried in turn. By
#: `tests.bench.windows`: 16 would empty the heavy end and make lengths swing.
COMPANY = (1, FEW)
#: Columns from the heavy end that are watched for running into their deadline. Chosen.
WATCHED = 2

# Splitting: how evenly, and how long.

#: How often a level may rise to hold more tokens. By `tests.bench.constants RISES 1 2 8`.
RISES = 2

# The public packer and partition: how long they try.

#: So many bins fewer than sorted fits need are tried: rarely one is enough for a more even method.
#: Chosen by trial.
FEWER_BINS = 2
#: Trades between bins may take so many seconds of one core, which are counted. Chosen by trial.
EVENED = 5e-4

# A cap on the tokens of a rank.

#: What tokens count as work beside cost, where both have the same mean, as tried in turn. Chosen by
#: trial.
TOKEN_WEIGHTS = (1.0, float(FEW), float(ROUNDS), np.inf)

# Groups that stay on one rank.

#: Layers of cost, denser towards the dear end. More cost time and change nothing. Chosen by trial.
LAYERS = 12

# Padded micro-batches.

#: What it costs to begin a micro-step, as a share of a micro-batch that fills the budget: another
#: one has to save as much. Less is too little for launches and gathered parameters, more pads more:
#: `tests.bench.constants BEGIN_MICRO_STEP 0.01 0.04 0.16 --cell padded-budget`. Chosen.
BEGIN_MICRO_STEP = 0.04
#: Micro-batches tried: up to so many times the fewest that fit, as they are to be worth it. By
#: `tests.bench.constants TIMES_FEWEST 1 2 3 --cell padded-budget`: 1 pads much more, 3 no less.
TIMES_FEWEST = 2
#: Tries of each round; the best few that the next tries are around, rounds, and steps of levels to
#: each side. More find more, and take longer. Chosen by trial.
TRIES, KEPT = 64, 3
#: Levels that an estimate tries, in shares of a micro-batch, from half to twice.
ESTIMATE_SHARES = 2 ** (np.arange(-KEPT, KEPT + 1) / KEPT)
#: Runs up to twice of which all tries are made, then each second, and so on; and items that have as
#: many levels as there may be, of which twice as many have half. Chosen by trial.
ALL_TRIED = 128
#: Levels that are tried first: at least, at most, and entries of a table of them; then around each
#: level that was found, as many as the table has room for. Chosen by trial.
LEVELS = (24, 96)
LEVEL_TABLE = LEVELS[1] * ALL_TRIED
FINE_LEVELS = 1 + np.append(0, np.outer(2 ** np.arange(KEPT), (-1, 1))) / TRIES
#: Of each round, try and level, how far it is off: from half to a thirtieth, then closer.
NOISE = np.random.default_rng(7).standard_normal((KEPT, TRIES, STAGES))
NOISE *= np.geomspace(1, 1 / STAGES, TRIES)[:, None]
NOISE *= np.geomspace(1 / 2, 0.05, KEPT)[:, None, None]
#: Where ranks meet once a step: places tried for a run's end, in parts of what is between its
#: neighbours' and beside where it is. Chosen by trial.
END_SPREAD, END_CLOSE = np.arange(1, EIGHTHS) / EIGHTHS, np.arange(1 + 2 * 2) - 2

# Comparisons: when other splits are tried, and what they take.

#: Steps of up to so many samples are compared with other selections and plain methods. Chosen.
COMPARED_UP_TO = 1024
#: Of more slots bins are not levelled: most are empty then, as one bin has a thousand samples and
#: others have one, and it would take a second. Chosen.
TOO_MANY_SLOTS = COMPARED_UP_TO**2
#: Up to so many trade samples under a budget, and padded ones are compared: of more samples single
#: ones hardly matter. Chosen.
SMALL_STEP = 200
#: What a method takes, in seconds of one core: once, for each sample that Karmarkar-Karp or whole
#: groups place, and for each number that others read. By their times on lognormal lengths, 64 to
#: 4,096 samples on 4 to 256 ranks, read off by eye.
ONCE, SAMPLE, LOOK = 6e-5, 1.8e-6, 1.2e-8

# Trades between micro-batches under a token budget, and equal counts.

#: Samples of a micro-batch that one turn looks at: more find more, and take longer. By
#: `tests.bench.constants TRADED_FROM 2 4 6 --cell small`.
TRADED_FROM = 6
#: Turns without a gain for each micro-step, with other samples and partners, after which it ends.
#: By `tests.bench.constants TRADE_PATIENCE 0 1 2 --cell small`.
TRADE_PATIENCE = 2
#: So little of what a trade takes off counts that it decides between equals only. Chosen.
BETWEEN_EQUALS = LEVEL**2

# Giants over several ranks.

#: Paces that are tried, in shares of a micro-step that is level: what cannot keep up is split. By
#: `tests.bench.blocks`.
PACES = np.geomspace(1.3, 0.6, EIGHTHS)
#: What each doubling of the ranks of a sample costs, as a share of its time, until users say it.
SPLIT_OVERHEAD = 0.05
