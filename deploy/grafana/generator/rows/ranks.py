"""The headline: what ranks really lose, and which of them the others wait for."""

from deploy.grafana.generator.panels import TIME, WINDOW, Panel, Unit, chosen, of_steps

PANELS = [
    Panel(
        "Where the ranks' time goes",
        "Share of all ranks' time by cause; together they are all of it. Loss by slow-rank: see "
        "Slowness by rank. By lengths: the row Balance. By no-samples: the row Flow.",
        {
            "{{cause}}": f"sum by (cause) ({of_steps(TIME)})"
            f" / ignoring(cause) group_left sum({of_steps(TIME)})"
        },
        Unit.SHARE,
        width=12,
        highest=1,
    ),
    Panel(
        "Slowness by rank",
        "Seconds for the same work, over the median rank's. Above 1.1 look at that machine: "
        "clocks, temperature, neighbours, its data loading.",
        {"rank {{dp_rank}}": chosen("dispatcher_rank_slowness_ratio")},
        Unit.RATIO,
        steps=[(1.1, "yellow"), (1.25, "red")],
        width=12,
    ),
    Panel(
        "Waiting for slower ranks",
        "Share of the time that each rank waits inside collectives. The one that waits least is "
        "waited for.",
        {
            "rank {{dp_rank}}": f"sum by (dp_rank) "
            f"({of_steps('dispatcher_rank_straggler_wait_seconds_total')})"
        },
        Unit.SHARE,
    ),
    Panel(
        "Computing",
        "Share of the time that each rank computes, outside collectives.",
        {
            "rank {{dp_rank}}": f"sum by (dp_rank) "
            f"({of_steps('dispatcher_rank_compute_seconds_total')})"
        },
        Unit.SHARE,
    ),
    Panel(
        "Transport in collectives",
        "Share of the time in collectives that is nobody's fault: what even the last rank spends.",
        {"every rank": f"sum({of_steps('dispatcher_collective_transport_seconds_total')})"},
        Unit.SHARE,
    ),
    Panel(
        "Silent for",
        "Since each rank was last heard of, heartbeats included. Beyond --rank-timeout it is let "
        "go: look for its process.",
        {"rank {{dp_rank}}": f"time() - {chosen('dispatcher_rank_last_seen_timestamp_seconds')}"},
        Unit.SECONDS,
        steps=[(30, "red")],
    ),
    Panel(
        "Steps measured, and not",
        "Passes over steps that say what was lost, and those that do not, by reason; "
        "docs/metrics.md has the reasons.",
        {
            "measured": f"increase({chosen('dispatcher_measured_steps_total')}[{WINDOW}])",
            "{{reason}}": f"increase({chosen('dispatcher_steps_without_timing_total')}[{WINDOW}])",
        },
    ),
]
