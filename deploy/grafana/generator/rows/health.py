"""Whether it runs at all, at a glance; the headline stands here too."""

from deploy.grafana.generator.panels import Panel, Unit, chosen, share_of_time

YES_OR_NO = {0: ("no", "red"), 1: ("yes", "green")}

PANELS = [
    Panel(
        "Up",
        "Whether Prometheus reaches it. If not: the process, its address, its certificates.",
        {"up": chosen("up")},
        words=YES_OR_NO,
        single=True,
        width=3,
        height=4,
    ),
    Panel(
        "Ready",
        "Whether samples are accepted. If not: /readyz says why.",
        {"ready": chosen("dispatcher_ready")},
        words=YES_OR_NO,
        single=True,
        width=3,
        height=4,
    ),
    Panel(
        "Ranks missing",
        "DP ranks that are not connected. /statusz names them; no step is planned before all have "
        "joined.",
        {"missing": f"{chosen('dispatcher_dp_size')} - {chosen('dispatcher_ranks_connected')}"},
        steps=[(1, "red")],
        single=True,
        width=3,
        height=4,
    ),
    Panel(
        "Producers",
        "Producers connected; those that push over HTTP are not. None: look at the rollout "
        "workers.",
        {"producers": chosen("dispatcher_producers_connected")},
        single=True,
        width=3,
        height=4,
    ),
    Panel(
        "Time lost",
        "Share of the ranks' time that did not go to work, whatever the cause. Row Ranks says to "
        "which. Unknown: no step was begun.",
        {"lost": f"1 - {share_of_time('work')}"},
        Unit.SHARE,
        steps=[(0.05, "yellow"), (0.1, "red")],
        single=True,
        width=4,
        height=4,
        highest=1,
    ),
    Panel(
        "Steps committed",
        "Since the run began, restarts on a journal included. Not growing: /readyz says whom the "
        "next step waits for.",
        {"steps": chosen("dispatcher_steps_committed_total")},
        single=True,
        width=3,
        height=4,
    ),
    Panel(
        "Journal writes",
        "Whether what is accepted becomes durable. If not, everything waits: make room on its "
        "disk. Unknown: it runs without a journal.",
        {"writes": f"1 - {chosen('dispatcher_journal_failing')}"},
        words=YES_OR_NO,
        single=True,
        width=3,
        height=4,
    ),
    Panel(
        "Runs for",
        "Since this process started. Restarts again and again: see its log, and the supervisor's.",
        {"runs": f"time() - {chosen('process_start_time_seconds')}"},
        Unit.SECONDS,
        single=True,
        width=2,
        height=4,
    ),
]
