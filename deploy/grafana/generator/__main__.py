"""Writes the dashboard that Grafana is given: python -m deploy.grafana.generator"""

from pathlib import Path

from deploy.grafana.generator.dashboard import as_json

PATH = Path(__file__).parents[1] / "dashboards" / "rollout-dispatcher.json"

if __name__ == "__main__":
    PATH.write_text(as_json())
