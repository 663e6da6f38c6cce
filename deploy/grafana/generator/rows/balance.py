"""What balancing does: a plain split beside the plan beside what was measured."""

from deploy.grafana.generator.panels import Panel, Unit, chosen, lost_by_plan, mean, of_steps, rate

PANELS = [
    Panel(
        "Time lost to lengths",
        "Share of the ranks' time, by the cost model: what a plain split of the same samples would "
        "have lost, what the plan loses, and what no split could avoid. The last two far apart: a "
        "larger --window or --set planning-budget. Close and high: single samples exceed a rank's "
        "share, so only more samples a step help.",
        {
            "baseline": lost_by_plan("baseline"),
            "planned": lost_by_plan("planned"),
            "no split is better": lost_by_plan("bound"),
        },
        Unit.SHARE,
        width=16,
    ),
    Panel(
        "Lost to the cost model",
        "Share of the ranks' time that plans lose beyond what they promise, as the cost that they "
        "balance differs from the one fitted to measured times. --cost auto uses that one.",
        {"lost": chosen("dispatcher_cost_loss_ratio")},
        Unit.SHARE,
        steps=[(0.02, "red")],
    ),
    Panel(
        "Why steps are planned",
        "Steps each second by what triggered them. Mostly max-wait: ranks wait before the window "
        "is full, so it buys nothing.",
        {"{{trigger}}": rate("dispatcher_steps_planned_total")},
        Unit.PER_SECOND,
    ),
    Panel(
        "Padding",
        "Share of the tokens computed that are there for layout's sake. High with --layout padded: "
        "see --micro-batch-tokens.",
        {
            "padding": f"{of_steps('dispatcher_padding_tokens_total')} / "
            f"({of_steps('dispatcher_padding_tokens_total')}"
            f" + {of_steps('dispatcher_dispatched_tokens_total')})"
        },
        Unit.SHARE,
        highest=1,
    ),
    Panel(
        "Micro-batches a step",
        "On each DP rank, in the mean. More than expected: --micro-batch-tokens is small for these "
        "lengths.",
        {"micro-batches": mean("dispatcher_step_micro_batches")},
    ),
    Panel(
        "Cost by rank",
        "Share of the planned cost that each rank was given. They differ in the long run only "
        "where ranks are to differ.",
        {
            "rank {{dp_rank}}": f"{of_steps('dispatcher_rank_dispatched_cost_total')}"
            f" / on(job, instance) group_left sum by (job, instance) "
            f"({of_steps('dispatcher_rank_dispatched_cost_total')})"
        },
        Unit.SHARE,
    ),
]
