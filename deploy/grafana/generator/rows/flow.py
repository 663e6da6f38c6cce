"""Samples and steps as they go through, and who holds them up."""

from deploy.grafana.generator.panels import (
    WINDOW,
    Panel,
    Unit,
    chosen,
    mean,
    quantile,
    rate,
    share_of_time,
)

PANELS = [
    Panel(
        "Samples",
        "Each second: pushed by outcome, and trained. Refused ones: their producers were told why.",
        {
            "pushed, {{outcome}}": rate("dispatcher_samples_received_total"),
            "committed": rate("dispatcher_samples_committed_total"),
        },
        Unit.PER_SECOND,
    ),
    Panel(
        "Tokens",
        "Each second: accepted, and sent to ranks.",
        {
            "accepted": rate("dispatcher_received_tokens_total"),
            "dispatched": rate("dispatcher_dispatched_tokens_total"),
        },
        Unit.PER_SECOND,
    ),
    Panel(
        "Is rollout or training the bottleneck?",
        "Share of their time that ranks wait for samples, and of all time that producers wait for "
        "room. More machines help where the other one waits.",
        {
            "ranks wait": share_of_time("no-samples"),
            "producers wait": rate("dispatcher_backpressure_seconds_total"),
        },
        Unit.SHARE,
        highest=1,
    ),
    Panel(
        "Samples dropped",
        "Accepted samples given up each second, by reason: stale (generation is too far ahead), "
        "incomplete-group (a producer lost a member), superseded (another one pushes its group "
        "anew), no-room, schema, oversize.",
        {"{{reason}}": rate("dispatcher_samples_dropped_total")},
        Unit.PER_SECOND,
        steps=[(0.001, "yellow")],
    ),
    Panel(
        "Steps",
        "Each second. Smaller ones: fewer samples than a batch, at --max-wait or at an end.",
        {
            "committed": rate("dispatcher_steps_committed_total"),
            "smaller than a batch": rate("dispatcher_partial_steps_total"),
        },
        Unit.PER_SECOND,
    ),
    Panel(
        "Delivery",
        "From a step's plan to its last micro-batch being written to a rank. Long while ranks "
        "wait: the network, or a rank that does not read.",
        {
            "median": quantile(0.5, "dispatcher_delivery_duration_seconds"),
            "99 %": quantile(0.99, "dispatcher_delivery_duration_seconds"),
        },
        Unit.SECONDS,
    ),
    Panel(
        "Bytes",
        "Payload each second: accepted as it came or by reference, and dispatched, either way.",
        {
            "accepted": rate("dispatcher_received_bytes_total"),
            "by reference": rate("dispatcher_referenced_bytes_total"),
            "dispatched": rate("dispatcher_dispatched_bytes_total"),
        },
        Unit.BYTES_PER_SECOND,
    ),
    Panel(
        "Length of samples",
        "Tokens of accepted samples: mean and longest hundredth. A jump says that rollouts "
        "changed.",
        {
            "mean": mean("dispatcher_sample_tokens"),
            "99 %": quantile(0.99, "dispatcher_sample_tokens"),
        },
    ),
    Panel(
        "Steps delivered again",
        "Open steps sent once more, by reason. Many reconnects: the network, or --rank-timeout.",
        {"{{reason}}": f"increase({chosen('dispatcher_redeliveries_total')}[{WINDOW}])"},
    ),
]
