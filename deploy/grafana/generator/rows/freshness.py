"""How old the policy is that wrote what is trained, and whether selection changes the data."""

from deploy.grafana.generator.panels import Panel, Unit, chosen, mean, of_steps, quantile

PANELS = [
    Panel(
        "Staleness",
        "Policy versions between the weights that wrote a sample and those that it trains. High: a "
        "smaller window or buffer, fewer producers, or --max-staleness.",
        {
            "mean": mean("dispatcher_sample_staleness_versions"),
            "99 %": quantile(0.99, "dispatcher_sample_staleness_versions"),
        },
    ),
    Panel(
        "Policy version",
        "As the trainer last reported it. Flat while steps are committed: `set_policy_version` is "
        "not called.",
        {"version": chosen("dispatcher_policy_version")},
    ),
    Panel(
        "Are the data biased?",
        "How far dispatched lengths are from those that were there, over what chance does. Above "
        "1: samples dropped first, then --max-delay. Large groups may reach 2 by chance.",
        {
            "over chance": f"{chosen('dispatcher_selection_bias_ratio')} / "
            f"{chosen('dispatcher_selection_bias_chance_ratio')}"
        },
        Unit.RATIO,
        steps=[(1, "yellow"), (2, "red")],
    ),
    Panel(
        "Weight of the longest samples",
        "What a loss token of the longest hundredth weighs under token-mean, mean token 1. "
        "Below 0.8: lower --max-step-variation.",
        {"weight": chosen("dispatcher_long_sample_weight_ratio")},
        Unit.RATIO,
    ),
    Panel(
        "Passed over",
        "How often a dispatched sample had been passed over: the longest hundredth, and the mean. "
        "At --max-delay it has to go.",
        {
            "mean": mean("dispatcher_sample_skips"),
            "99 %": quantile(0.99, "dispatcher_sample_skips"),
        },
    ),
    Panel(
        "Share of samples too stale",
        "Of accepted samples, what is dropped as stale. High: generation is too far ahead of "
        "training.",
        {
            "stale": f"{of_steps('dispatcher_samples_dropped_total', reason='stale')} / "
            "ignoring(reason, "
            f"outcome) {of_steps('dispatcher_samples_received_total', outcome='accepted')}"
        },
        Unit.SHARE,
        steps=[(0.01, "yellow"), (0.1, "red")],
    ),
    Panel(
        "Rewound",
        "Steps and samples that a loaded checkpoint opened again, and trained steps that were gone "
        "by then; steps that had to go before a checkpoint covered them (--set retain-bytes).",
        {
            "steps": chosen("dispatcher_steps_rewound_total"),
            "samples": chosen("dispatcher_samples_rewound_total"),
            "steps that were gone": chosen("dispatcher_steps_lost_total"),
            "steps that had to go": chosen("dispatcher_steps_evicted_total"),
        },
    ),
]
