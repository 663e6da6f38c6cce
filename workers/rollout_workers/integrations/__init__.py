"""Adapters for trainers of other frameworks that need more than a `StreamDataset`.

Each module is about one framework and imports no more of it than it has to; whoever asks for it has
that framework. What is here leans on parts of theirs that may change: the versions that it is
tested with stand in docs/guide.md.
"""
