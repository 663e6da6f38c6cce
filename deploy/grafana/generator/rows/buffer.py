"""What is held, against what may be, and how long samples wait in it."""

from deploy.grafana.generator.panels import Panel, Unit, chosen, quantile, rate

PANELS = [
    Panel(
        "Samples against the window",
        "Ready samples, the window that a step is chosen from, and where producers wait. Below the "
        "window all the time: rollout is the bottleneck.",
        {
            "held": chosen("dispatcher_buffer_samples"),
            "ready": chosen("dispatcher_ready_samples"),
            "window": chosen("dispatcher_window_samples"),
            "producers wait at": chosen("dispatcher_buffer_capacity_samples"),
        },
    ),
    Panel(
        "Backpressure",
        "Share of the time that a cap holds producers back, and how many pushes wait. As it should "
        "be while ranks compute; all the time means more rollout machines than training can use.",
        {
            "share of the time": rate("dispatcher_backpressure_seconds_total"),
            "pushes that wait": chosen("dispatcher_pushes_held"),
        },
    ),
    Panel(
        "Bytes",
        "In memory: the buffer (--buffer-bytes), pushes that wait (--set blocked-push-bytes), "
        "frames being received (--set receive-bytes); in payload stores: what is buffered (--set "
        "referenced-bytes); on disk: steps kept until a checkpoint (--set retain-bytes).",
        {
            "buffer": chosen("dispatcher_buffer_bytes"),
            "pushes that wait": chosen("dispatcher_pushes_held_bytes"),
            "being received": chosen("dispatcher_receiving_bytes"),
            "in payload stores": chosen("dispatcher_buffer_referenced_bytes"),
            "retained": chosen("dispatcher_retained_bytes"),
        },
        Unit.BYTES,
    ),
    Panel(
        "Samples wait",
        "How long dispatched samples were buffered, and the age of the oldest one held. Grows "
        "without end: ranks do not train, or a group lacks a member.",
        {
            "median": quantile(0.5, "dispatcher_sample_wait_seconds"),
            "99 %": quantile(0.99, "dispatcher_sample_wait_seconds"),
            "oldest": chosen("dispatcher_buffer_oldest_age_seconds"),
        },
        Unit.SECONDS,
    ),
    Panel(
        "Groups that lack members",
        "Groups under way, and their samples. Grows without end: a producer names another "
        "group_size than it pushes; --set group-timeout gives them up.",
        {
            "groups": chosen("dispatcher_open_groups"),
            "their samples": chosen("dispatcher_open_group_samples"),
        },
    ),
    Panel(
        "Open steps",
        "Planned and not committed, of at most --max-open-steps, their samples, and committed "
        "steps that no saved checkpoint covers.",
        {
            "steps": chosen("dispatcher_open_steps"),
            "their samples": chosen("dispatcher_samples_in_flight"),
            "retained steps": chosen("dispatcher_steps_retained"),
        },
    ),
]
