"""`dispatcher simulate`: replays a length trace through the planner, to choose a window.

Options, trace and output files are checked before the first step is planned.
"""

import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from rollout_dispatcher.cli.options import Layer, Loaded, load_config, options_of
from rollout_dispatcher.cli.simulate_options import (
    Arrivals,
    Format,
    SimulateOptions,
    defaults_of,
    measured_defaults,
    own_environment,
    own_setting,
    setting_of,
)
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.recording import Recording, load_recording
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.simulate.figures import summary
from rollout_dispatcher.simulate.recorded import as_it_ran, trace_of
from rollout_dispatcher.simulate.replay import Setting
from rollout_dispatcher.simulate.result import Result
from rollout_dispatcher.simulate.run import DEFAULT_STEPS, Scenario, simulate
from rollout_dispatcher.simulate.table import recommend, table
from rollout_dispatcher.simulate.trace import grouped, load_trace
from rollout_planner.cost import AUTO

DESCRIPTION = """\
Replay a length trace through the planner and triggers that serve uses, for each window asked for
and for plain strategies beside it, and show what ranks lose to waiting and what samples wait.

TRACE is a CSV file, gzip or not, with the columns arrival_s, group, run, prompt_tokens,
response_tokens, truncated (an empty cell is unknown), or one of the built-in length profiles:
lineage, reasoning-gym, azure-conv, azure-code, deepseek-r1-arc, tau-airline.

DIR is what `dispatcher serve --record-dir DIR` wrote: samples come as they came, options that are
not given are those that it ran with, and the table shows how it ran beside how it would have."""
EPILOG = """\
Options are read from flags, DISPATCHER_<NAME> variables and the --config file, as for serve. The
file of serve may be given: what only serve needs in it is ignored. These defaults differ:

                   simulate               serve
  --window         1 1.25 1.5 2           1.5
  --groups         ignore; step with      step
                   --group-size
  --on-oversize    alone                  error
  --max-imbalance  0                      0.01
  --cost           quadratic:1,24576,0    auto, which begins with the same

examples:
  dispatcher simulate lineage --dp-size 64 --global-batch-size 512 --micro-batch-tokens 131072
  dispatcher simulate trace.csv.gz --dp-size 8 --global-batch-size 512 --micro-batch-size 4 \\
      --sync step --window 1 1.25 2 --recommend
  which window would have been best yesterday?
    dispatcher simulate /var/lib/dispatcher/record --recommend

exit codes: 0 done, 1 failure, 2 usage, config or trace
"""


def run(argv: Sequence[str]) -> int:
    """Simulate and report."""
    recording: Recording | None = None

    def recorded(source: str | None) -> Layer:
        nonlocal recording
        recording = _recording(source, None)
        return str(source), {} if recording is None else defaults_of(recording)

    found = _options(argv, recorded)
    options, source = found.config, found.given
    if source is None:
        raise ConfigError(
            "name a trace first, a CSV file or a built-in profile: "
            "dispatcher simulate lineage ...; see dispatcher simulate --help"
        )
    if options.run is not None and recording is not None:
        recording = _recording(source, options.run)
    own = None
    if recording is not None:  # its options are the defaults, with the pace of its last steps
        count = options.steps or DEFAULT_STEPS
        if before := recording.keep_last(count):
            recording.notes.append(
                f"of {before + count:,} recorded steps the last {count} are replayed; --steps N "
                "replays the last N"
            )
        own, defaults = own_setting(recording), defaults_of(recording)
        fits = found.sources.get("cost") == source and options.cost.startswith(AUTO)
        defaults |= measured_defaults(recording, own, fits=fits)
        options = _options(argv, lambda given: (str(given), defaults)).config
    result = _simulate(source, options, recording, own)
    if options.format is Format.JSON:
        print(result.to_json())
    else:
        print(table(result), end="")
        if result.recommendation is not None:
            print(f"\n{textwrap.fill(result.recommendation.why, 99, break_on_hyphens=False)}")
    return 0


def _options(
    argv: Sequence[str], defaults: Callable[[str | None], Layer]
) -> Loaded[SimulateOptions]:
    """The options, with the recorded run's as defaults, and their sources."""
    return load_config(
        SimulateOptions,
        ["--format=json" if word == "--json" else word for word in argv],
        own_environment(os.environ),
        prog="dispatcher simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
        takes="TRACE|DIR",
        defaults=defaults,
        unused=options_of(ServeConfig),
    )


def _recording(source: str | None, run: str | None) -> Recording | None:
    """The recorded run, if the source is a directory."""
    if source is None or not Path(source).is_dir():
        return None
    draw = _progress()
    return load_recording(Path(source), run, lambda share: draw(share, f"reading {source}"))


def _simulate(
    source: str, options: SimulateOptions, recording: Recording | None, own: Setting | None
) -> Result:
    """own: the setting of the recording."""
    settings = [setting_of(options, *each) for each in options.combinations]
    if recording is None:
        by_groups = options.global_batch_groups is not None
        trace = load_trace(source, options.run, options.seed)
        trace = grouped(trace, options.group_size, needed=by_groups)
    else:
        trace = trace_of(recording)
        _show("")
        for note in recording.notes:
            print(f"dispatcher simulate: {note}", file=sys.stderr)
    load = options.trainer_load if options.arrivals is Arrivals.TRACE else None
    scenario = Scenario(options.seed, options.steps, load)
    with ExitStack() as files:
        plans = None if options.plans is None else _open(files, options.plans)
        draw = _progress()

        def progress(setting: Setting, share: float) -> None:
            draw(share, f"{setting.strategy}, window {setting.window:g}")

        runs = simulate(trace, settings, scenario, plans=plans, progress=progress)
    _show("")
    ran = None if recording is None or own is None else as_it_ran(recording, own)
    return Result(
        trace=summary(trace),
        options={"trace": source} | options.written(),
        runs=runs,
        recommendation=recommend(runs, ran.run if ran else None) if options.recommend else None,
        recorded=ran,
    )


def _open(files: ExitStack, path: Path) -> TextIO:
    try:
        return files.enter_context(path.open("w", encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _progress() -> Callable[[float, str], None]:
    """Draws a progress bar, at most ten times a second."""
    last = 0.0

    def draw(share: float, what: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= 0.1:
            last = now
            _show(f"[{'#' * round(40 * share):.<40}] {share:4.0%}  {what}")

    return draw


def _show(text: str) -> None:
    """Replace the live line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
