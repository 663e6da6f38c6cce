"""The log's files: a directory with one user, segments in it, and blocks in those.

    blocks (a group of batches) -> segments (preallocated files) -> front (what a file is)
    newest (the last segment's name)    directory (lock and format)    disk (errors, names)

What rows mean is not known here, but for which of them come with a payload.
"""
