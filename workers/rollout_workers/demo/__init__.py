"""The demo's processes: rollout producers and trainers that `dispatcher demo` starts."""
