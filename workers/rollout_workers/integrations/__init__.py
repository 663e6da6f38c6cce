"""Integrations with training frameworks, beyond `StreamDataset`, to train on whole steps.

Each module is for one framework, which its user has installed, and imports no more of it than
necessary. It relies on parts of the framework that may change; docs/guide.md lists the tested
versions.
"""
