"""What `dispatcher top` shows, as lines of text, made of what a dispatcher said lately.

Invariant: nothing is told by a style alone, as a terminal may have no colours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A text, and how `rich` is to draw it.
Line = tuple[str, str]
PLAIN, DIM, BAD, WARN, GOOD, TITLE = "", "dim", "bold red", "yellow", "green", "reverse"

#: Families of /metrics that are shown; nothing else is read.
FAMILIES = (
    "process_start_time_seconds",
    "window_samples",
    "buffer_capacity_samples",
    "step_imbalance_ratio_sum",
    "step_imbalance_ratio_count",
    "step_straggler_excess_ratio_sum",
    "step_straggler_excess_ratio_count",
    "sample_staleness_versions_sum",
    "sample_staleness_versions_count",
    "rank_wait_seconds_total",
    "rank_slowness_ratio",
    "rank_last_seen_timestamp_seconds",
)
#: Of what imbalance is told: a plain split, the plan by its costs, and what ranks measured.
STAGES = ("fifo", "planned", "measured")
#: A rank that needs a tenth more than the median is named, as in docs/measured.md.
SLOW = 1.1
#: Lines of a step's delays that are shown.
_MAX_DELAYS = 3
_TABLE = (
    f"{'rank':>5}  {'':9}{'step':>7}{'computes':>11}{'for others':>12}{'for data':>10}"
    f"{'slowness':>11}{'seen':>10}"
)
#: How states of ranks are sorted, the worst first.
_WORST = ("missing", "absent", "left", "hangs", "")


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a dispatcher: what `/statusz` and `/metrics` said.

    at: when it was read, on our monotonic clock. time: the dispatcher's time of day.
    """

    at: float
    time: float
    status: Mapping[str, Any]
    metrics: Mapping[str, Mapping[tuple[str, ...], float]]

    @property
    def process(self) -> tuple[str, float]:
        """The run, and the start of its process: counters go on as long as both are the same."""
        return str(self.status["run_id"]), self.value("process_start_time_seconds")

    def value(self, name: str, *labels: str) -> float:
        """A series; 0 where there is none."""
        return self.metrics[name].get(labels, 0.0)

    def by_rank(self, name: str) -> dict[int, float]:
        """A family by DP rank."""
        return {int(labels[-1]): value for labels, value in self.metrics[name].items()}


def lines(
    readings: Sequence[Reading], address: str = "", away: str = "", height: int | None = None
) -> list[Line]:
    """The picture; no more than `height` lines, if that is given.

    readings: of one process, the oldest first. away: why there was no answer of late.
    """
    if not readings:
        return [(f" dispatcher top  {address}", TITLE), *_block("", away, BAD)]
    first, last = readings[0], readings[-1]
    said = last.status
    state = "no answer" if away else said["run_state"]
    state += "" if away or said["is_ready"] else ", not ready"
    up = duration(max(0.0, last.time - last.value("process_start_time_seconds")))
    title = (
        f" dispatcher top  {address}  run {said['run_id'][:8]}  {state}  up {up}  {said['version']}"
    )
    shown = [
        (title, TITLE),
        *(_block("", away, BAD) if away else []),
        *_lost(first, last),
        *_flow(first, last),
        *_buffer(last),
        *_waits(said["delays"]),
        *_imbalance(first, last),
        *_people(first, last),
    ]
    return [*shown, *_ranks(first, last, None if height is None else height - len(shown))][:height]


def _lost(first: Reading, last: Reading) -> list[Line]:
    name = "step_straggler_excess_ratio"
    measured, planned = (_mean(name, first, last, stage) for stage in ("measured", "planned"))
    found = measured or planned
    if found is None:
        return _block("lost", "nothing is told before the first step", DIM)
    excess, steps, lately = found
    share = excess / (1 + excess)
    kind = "measured" if measured else "by the plans alone"
    over = f"{'the last' if lately else 'all'} {steps} step{'' if steps == 1 else 's'}"
    text = f"{percent(share)} of the ranks' time, {kind}, over {over}"
    shown = _block("lost", text, BAD if share >= 0.1 else PLAIN)
    if not measured:
        why = last.status["measured"]["why_not"] or "no step has been yet"
        return [*shown, *_block("", f"not measured: {why}", WARN)]
    slow = sorted(
        ((ratio, rank) for rank, ratio in _slowness(last).items() if ratio >= SLOW), reverse=True
    )
    if not slow:
        return [*shown, *_block("", "no rank is a tenth slower than the median rank", DIM)]
    named = ", ".join(f"rank {rank} takes {ratio:.2f}" for ratio, rank in slow[:3])
    more = f", and {len(slow) - 3} more" if len(slow) > 3 else ""
    return [*shown, *_block("", f"{named} times as long as the median{more}", BAD)]


def _flow(first: Reading, last: Reading) -> list[Line]:
    said, over = last.status, last.at - first.at
    names = {"steps_committed": "steps", "samples_committed": "samples"}
    rates = []
    for name, what in (names | {"dispatched_tokens": "tokens"}).items():
        gained = said[name] - first.status[name]
        rates.append(f"{count(gained / over) if over else '-'} {what}/s")
    version = said["policy_version"]
    trainer = "" if version is None else f", trainer at version {version}"
    return [
        *_block("rate", "   ".join(rates) + (f"   over {duration(over)}" if over else "")),
        *_block(
            "steps",
            f"{said['steps_committed']} committed, {said['open_steps']} open with "
            f"{said['in_flight']} samples{trainer}",
        ),
    ]


def _buffer(last: Reading) -> list[Line]:
    """What is ready; of tokens and bytes what is held, as their caps count it."""
    said, config = last.status, last.status["config"]
    window, capacity = last.value("window_samples"), last.value("buffer_capacity_samples")
    ready = f"{count(said.get('ready_units', said['ready']))} of window {count(window)}"
    caps = [
        (f"{count(said['buffered_tokens'])} tokens", config["buffer_tokens"], count, ""),
        (nbytes(said["buffered_bytes"]), config["buffer_bytes"], nbytes, ""),
    ]
    if config.get("payload_stores"):
        stored = nbytes(said["buffered_referenced_bytes"])
        caps.append((stored, config["referenced_bytes"], nbytes, " in payload stores"))
    held = [
        text + ("" if cap is None else f" of {show(cap)}") + where
        for text, cap, show, where in caps
    ]
    if said["open_groups"]:
        held.append(f"{said['open_groups']} groups lack members")
    cap = "" if window >= capacity else f", cap {count(capacity)}"
    return [*_block("ready", ready + cap), *_block("held", ", ".join(held))]


def _waits(delays: Sequence[Mapping[str, Any]]) -> list[Line]:
    if not delays:
        return _block("next step", "waits for nobody", GOOD)
    longest = max(each["seconds"] for each in delays)
    style = BAD if longest >= 60 else WARN if longest >= 10 else PLAIN
    shown: list[Line] = []
    for each in delays[:_MAX_DELAYS]:
        since = f" ({duration(each['seconds'])})" if each["seconds"] >= 1 else ""
        shown += _block("" if shown else "next step", f"waits: {each['text']}{since}", style)
    return shown


def _imbalance(first: Reading, last: Reading) -> list[Line]:
    found = {stage: _mean("step_imbalance_ratio", first, last, stage) for stage in STAGES}
    told = [f"{stage} {percent(mean[0] if mean else None)}" for stage, mean in found.items()]
    return _block("imbalance", "   ".join(told))


def _people(first: Reading, last: Reading) -> list[Line]:
    said = last.status
    stale = _mean("sample_staleness_versions", first, last)
    held = "held back" if said["backpressure"] else "not held back"
    waiting = "1 push waits" if said["pushes_held"] == 1 else f"{said['pushes_held']} pushes wait"
    pushes = f", {waiting} for room" if said["pushes_held"] else ""
    reasons = {reason: number for reason, number in said["dropped"].items() if number}
    why = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
    drops = f"{sum(reasons.values())} of {said['accepted']} accepted samples"
    producers = f"{said['producers_connected']} connected, {held}{pushes}"
    return [
        *_block("staleness", f"{stale[0]:.1f} policy versions in the mean" if stale else "-"),
        *_block("producers", producers, WARN if said["backpressure"] else PLAIN),
        *_block("dropped", drops + (f": {why}" if why else "")),
    ]


# -- ranks ------------------------------------------------------------------------------------


def _ranks(first: Reading, last: Reading, room: int | None) -> list[Line]:
    """A header and a row a rank; the worst first where not all fit."""
    said = last.status
    states = {rank: _state(said, rank) for rank in range(said["dp_size"])}
    slowness, over = _slowness(last), last.at - first.at
    step = said["measured"]["last_step"] or {"ranks": []}
    took = {each["dp_rank"]: each for each in step["ranks"]}
    waited, before = (each.by_rank("rank_wait_seconds_total") for each in (last, first))
    seen = last.by_rank("rank_last_seen_timestamp_seconds")
    order = list(states)
    text = f"{said['ranks_connected']} of {len(order)} connected, generation {said['generation']}"
    if room is not None and len(order) + 2 > room:
        order.sort(key=lambda rank: (_WORST.index(states[rank]), -slowness.get(rank, 0.0), rank))
        order = order[: max(0, room - 2)]
        text += f"; the worst {len(order)} of them"
    if gone := [rank for rank, state in states.items() if state in {"missing", "absent"}]:
        more = f" and {len(gone) - 8} more" if len(gone) > 8 else ""
        text += f"; not there: {', '.join(map(str, gone[:8]))}{more}"
    shown = [*_block("ranks", text, BAD if gone else PLAIN), (_TABLE, DIM)]
    for rank in order:
        own, ratio = took.get(rank, {}), slowness.get(rank)
        data = None
        if over and rank in waited and states[rank] not in {"missing", "absent"}:
            data = max(0.0, waited[rank] - before.get(rank, waited[rank])) / over
        is_slow = ratio is not None and ratio >= SLOW
        slow = f"{'-' if ratio is None else f'{ratio:.2f}'}{' <' if is_slow else '  '}"
        at = said["ranks"].get(str(rank), {"taken": -1})["taken"]
        since = duration(max(0.0, last.time - seen[rank])) if rank in seen else "-"
        row = (
            f"{rank:>5}  {states[rank]:9}{'-' if at < 0 else at:>7}"
            f"{_seconds(own.get('compute_s')):>11}{_seconds(own.get('wait_s')):>12}"
            f"{percent(data):>10}{slow:>11}{since:>10}"
        )
        shown.append((row, BAD if is_slow or states[rank] else PLAIN))
    return shown


def _state(said: Mapping[str, Any], rank: int) -> str:
    about, absent = said["ranks"].get(str(rank)), rank in said["absent_ranks"]
    if about is None:
        return "missing"
    if rank in said["hung_ranks"]:
        return "hangs"
    if about["connected"]:
        return ""
    return "absent" if absent else "left"


def _slowness(last: Reading) -> dict[int, float]:
    """Where metrics of single ranks are off, /statusz has the last step that was measured."""
    if found := last.by_rank("rank_slowness_ratio"):
        return found
    step = last.status["measured"]["last_step"] or {"ranks": []}
    told = {each["dp_rank"]: each["slowness"] for each in step["ranks"]}
    return {rank: ratio for rank, ratio in told.items() if ratio is not None}


def _mean(name: str, first: Reading, last: Reading, *labels: str) -> tuple[float, int, bool] | None:
    """Mean and count of what a histogram was given lately, else of all, and whether it is lately;
    None where that is nothing.
    """
    total, number = (last.value(f"{name}_{part}", *labels) for part in ("sum", "count"))
    new = number - first.value(f"{name}_count", *labels)
    if new > 0:
        return (total - first.value(f"{name}_sum", *labels)) / new, int(new), True
    return (total / number, int(number), False) if number else None


# -- words ------------------------------------------------------------------------------------


def _block(label: str, text: str, style: str = PLAIN) -> list[Line]:
    """A text behind its label, in lines that an 80-column terminal has room for."""
    parts = [""]
    for word in text.split(" "):
        if parts[-1] and len(parts[-1]) + 1 + len(word) > 68:
            parts.append("")
        parts[-1] = f"{parts[-1]} {word}" if parts[-1] else word
    return [(f"{'' if at else label:<11}{part}", style) for at, part in enumerate(parts)]


def count(value: float) -> str:
    """`999`, `1.50k`, `21.3M`: at most five characters below a million billions."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_three(value / size)}{unit}"
    return f"{value:.0f}" if value == int(value) else _three(value)


def nbytes(value: float) -> str:
    """`183 KiB`, `2.00 GiB`, as sizes are written in options."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{_three(value / 1024**power)} {unit}"
    return f"{value:.0f} B"


def percent(value: float | None) -> str:
    """`0.13 %`, `27 %`; `-` where it is not known."""
    if value is None:
        return "-"
    value *= 100
    if value == 0 or value >= 9.95:
        return f"{value:.0f} %"
    return f"{value:.2f} %" if value < 0.995 else f"{value:.1f} %"


def duration(seconds: float) -> str:
    """`3 s`, `12 min`, `5.2 h`: the two figures that matter."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            value = seconds / size
            return f"{value:.{1 if value < 9.95 and size > 60 else 0}f} {unit}"
    return f"{seconds:.0f} s"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
