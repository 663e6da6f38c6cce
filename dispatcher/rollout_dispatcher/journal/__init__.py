"""The durable journal: facts in, and after a crash everything that they add up to.

Every batch of facts goes, with the payloads of the samples in it, as one *block* into an
append-only log of preallocated segment files. An index trails the log: a *snapshot* brings it up to
date whenever a segment is full, always after the log was synced up to there, and always synced
itself. So:

- one fdatasync makes a group of batches durable, however many pushes it serves;
- no sync policy can damage a file: an index whose last snapshot is torn has the one before it, and
  a log whose last blocks are missing or torn is still a readable, shorter log;
- recovery reads the index, then replays the blocks after its snapshot, as a rule less than one
  segment of them; it looks for a block in one place only, and what payloads look like is nothing
  to it;
- what was synced and is gone is said: each segment knows its own size, what of it is on the disk,
  and that all before it is; `newest` names the last one before anything is written to it;
- payloads never pass through the index. They stay where the log has them until their samples are
  committed or dropped; a segment without such samples, and before the snapshot, is used again.

    facts -> rows (records) -> block (blocks) -> segment file (segments) -> fdatasync -> told
                 |                                                  snapshot
                 +-> state (state) ----------------------------------> index

`journal.Journal` is the door, and has the one thread that does all of this.
"""
