"""The Grafana dashboard as code: a module for each row, and `python -m deploy.grafana.generator`."""
