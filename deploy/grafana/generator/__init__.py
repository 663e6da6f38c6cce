"""The Grafana dashboard as code, a module a row: `python -m deploy.grafana.generator` writes it."""
