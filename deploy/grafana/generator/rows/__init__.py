"""Rows of the dashboard; each module has its panels in order."""
