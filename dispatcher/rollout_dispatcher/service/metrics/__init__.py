"""Prometheus metrics: snapshots that are read at each scrape, and histograms."""
