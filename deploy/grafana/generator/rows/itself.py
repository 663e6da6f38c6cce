"""What the dispatcher needs, and whether it keeps up."""

from deploy.grafana.generator.panels import WINDOW, Panel, Unit, chosen, quantile, rate

PANELS = [
    Panel(
        "CPU",
        "Cores in use. It has one event loop: near 1 it is the bottleneck; fewer and larger "
        "pushes, or more tokens a sample for each message.",
        {"cores": rate("process_cpu_seconds_total")},
        Unit.RATIO,
        steps=[(0.9, "red")],
    ),
    Panel(
        "Memory",
        "Resident. What may be held is --buffer-bytes, --set blocked-push-bytes and --set "
        "receive-bytes together; docs/operate.md.",
        {"resident": chosen("process_resident_memory_bytes")},
        Unit.BYTES,
    ),
    Panel(
        "Late by",
        "How late the event loop runs what is due, and what a plan takes. Late without long plans: "
        "the machine is busy, or the disk of a journal or log hangs; py-spy dump says more.",
        {
            "event loop, 99 %": quantile(0.99, "dispatcher_event_loop_lag_seconds", within=WINDOW),
            "a plan, 99 %": quantile(0.99, "dispatcher_plan_duration_seconds"),
        },
        Unit.SECONDS,
        steps=[(1, "red")],
    ),
    Panel(
        "Answers",
        "Time from a readable message to its answer, durable if there is a journal. "
        "Producers' include the time that they wait for room.",
        {
            "{{role}}, 99 %": quantile(
                0.99, "dispatcher_message_duration_seconds", "role", within=WINDOW
            )
        },
        Unit.SECONDS,
    ),
    Panel(
        "Journal on disk",
        "It grows with what is held and retained. Let the disk have twice that: docs/operate.md.",
        {"journal": chosen("dispatcher_journal_bytes")},
        Unit.BYTES,
    ),
    Panel(
        "Journal syncs",
        "Time to make a group of batches durable; pushes wait for it with --journal-sync batch. "
        "Long: a disk that others use too.",
        {
            "median": quantile(0.5, "dispatcher_journal_fsync_duration_seconds", within=WINDOW),
            "99 %": quantile(0.99, "dispatcher_journal_fsync_duration_seconds", within=WINDOW),
        },
        Unit.SECONDS,
    ),
    Panel(
        "Journal errors",
        "Times that it had no room, or broke.",
        {"{{reason}}": f"increase({chosen('dispatcher_journal_errors_total')}[{WINDOW}])"},
        steps=[(1, "red")],
    ),
    Panel(
        "Connections that ended badly",
        "Otherwise than by a goodbye, by role and reason. Many: the reason is in the log too.",
        {
            "{{role}}, {{reason}}": "sum by (role, reason) "
            f"(increase({chosen('dispatcher_connection_errors_total')}[{WINDOW}]))"
        },
    ),
    Panel(
        "Files and connections",
        "Open files of the most allowed, and connections that have not introduced themselves. Near "
        "1: raise the limit on open files.",
        {
            "open files": f"{chosen('process_open_fds')} / {chosen('process_max_fds')}",
            "pending, {{plane}}": chosen("dispatcher_pending_connections"),
        },
        Unit.RATIO,
    ),
    Panel(
        "Scrapes",
        "What a scrape takes. Long with very many ranks: --set per-rank-metrics=off.",
        {"scrape": chosen("scrape_duration_seconds")},
        Unit.SECONDS,
    ),
    Panel(
        "Connections",
        "Accepted each second, by role. Many without an end: clients reconnect again and again.",
        {"{{role}}": rate("dispatcher_connections_total")},
        Unit.PER_SECOND,
    ),
    Panel(
        "Process groups",
        "Generations that have joined: one more for each start of the trainers.",
        {"generations": chosen("dispatcher_generation")},
    ),
    Panel(
        "Settings",
        "How often they were read or posted anew, by outcome. Refused: the log says why; "
        "docs/operate.md.",
        {"{{outcome}}": f"increase({chosen('dispatcher_config_reloads_total')}[{WINDOW}])"},
    ),
    Panel(
        "Changes of settings",
        "Since the start; dispatcher_config_info says what is in force.",
        {"changes": chosen("dispatcher_config_generation")},
    ),
]
