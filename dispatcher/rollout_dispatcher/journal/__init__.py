"""The durable journal: stores facts, and recovers their state after a crash.

Batches of facts, with the payloads of their samples, are written as *blocks* to an append-only log
of preallocated segment files. An index trails the log: a *snapshot* brings it up to date whenever a
segment is full, after the log is synced up to there, and is synced itself. So:

- one fdatasync makes a group of batches durable, for any number of pushes;
- no sync policy can damage a file: an index whose last snapshot is torn has the one before it, and
  a log whose last blocks are missing or torn is a readable, shorter log;
- recovery reads the index, then replays the blocks after its snapshot, normally less than one
  segment of them; each block is read at one known place, whatever payloads contain;
- the loss of synced data is reported: each segment has its size, a mark up to where it is on the
  disk, and that all before it is; `newest` names a segment before anything is written to it;
- payloads stay in the log, not in the index, until their samples are committed or dropped; a
  segment before the snapshot and without live samples is reused.

    facts -> rows (records) -> block (blocks) -> segment file (segments) -> fdatasync -> on_durable
                 |                                                  snapshot
                 +-> state (state) ----------------------------------> index

`journal.Journal` is the interface, and runs all of this in one thread.
"""
