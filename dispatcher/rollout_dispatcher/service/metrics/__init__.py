"""Prometheus metrics: snapshots read at each scrape, and histograms."""
