"""Splitting where groups stay together: on one rank, or in one micro-batch."""
