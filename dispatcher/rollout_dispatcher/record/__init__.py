"""The record of a run: files with its arrivals, plans and times, for later analysis.

A segment (`record-000001.jsonl.gz`, the highest number the newest) is gzip with a member a write,
one JSON object a line. Its first line is its header: `event` is `segment`; `format` 1; `number`;
`run` and `process`, ids (a run outlives a process with a journal); `release`; `unix`, the time of
`at` = 0 in seconds since 1970; `config`, the options of serve. Every other line has `event` and,
except `lost`, `at` in seconds. Samples have tickets (numbers in order of acceptance), groups
numbers. A reader skips unknown events.

accepted     within one second. first: ticket, the others follow; pushes: pairs of a time and a
             number of samples; tokens, loss (loss tokens), group (-1 for none): one a sample;
             version: the policy version of all, or a list
dropped      reason, as in dispatcher_samples_dropped_total; tickets
planned      step, attempt, generation; first: ticket; tickets: by DP rank and micro-batch, less
             first; sizes: by rank, samples of each micro-batch; cost: of each micro-batch;
             fifo_excess, fifo_imbalance: in order of arrival; lower_bound: the least cost of the
             step. On the first attempt: trigger; eligible: samples to choose from; skips:
             dispatches that passed over each; staleness: of all if a number, else of those with a
             known one
withdrawn    no sample of the step remains; the next step has its number
released     step: all ranks may train it
committed    step; taken, done: when each rank began and committed; null if not seen
measured     step, cost_key (the pass), ranks; busy, collective: seconds of each micro-batch, null
             if unknown; why. Several of a pass add up, with the first report of each rank
redelivered  step, reason
waited       ranks, since, seconds: one each for a wait for a step that is over
version      the trainer reported another policy version
state        each second: buffered, ready, in_flight in samples; held_pushes: blocked pushes;
             rank_time: seconds of DP ranks since the first step, by cause
settings     config: the options that change while serving, as they are from now on
lost         events: how many could not be written before
"""
