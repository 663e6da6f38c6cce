"""The log's files: a locked directory, segments in it, and blocks in these.

    blocks (a group of batches) -> segments (preallocated files) -> segment_header
    directory (lock, format, newest segment)    disk (errors, durable names)

This folder does not interpret rows, except that some have a payload.
"""
