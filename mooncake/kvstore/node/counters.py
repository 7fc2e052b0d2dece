"""The counters of a pool node, by the names that its load reports and /metrics show. Constants
only.
"""

from __future__ import annotations

COUNTERS = {
    "puts": "PutStarts that were looked at",
    "blocks_granted": "blocks given room",
    "blocks_refused": "blocks not given room although they were not here",
    "blocks_put": "blocks that became whole",
    "bytes_put": "bytes of those",
    "blocks_dropped": "granted blocks that their writer gave up",
    "blocks_evicted": "blocks evicted for room",
    "pins": "PinBlocks that were looked at",
    "blocks_hit": "blocks pinned",
    "blocks_missed": "blocks asked for and not pinned: not here, or behind one that is not",
    "grants_reclaimed": "puts open when their writer was lost",
    "pins_reclaimed": "pins held when their reader was lost",
    "blocks_quarantined": "blocks of lost writers that went to quarantine",
    "puts_overdue": "puts open for longer than put_timeout_s though their writer lives",
    "ssd_blocks_found": "blocks that an earlier boot had left on the disks",
    "ssd_blocks_torn": "slots of the disks that held something else at the start",
    "ssd_blocks_written": "blocks that went down to a disk",
    "ssd_blocks_read": "blocks that came up from a disk",
    "ssd_blocks_evicted": "blocks overwritten on a disk for others",
    "ssd_blocks_too_late": "blocks evicted from DRAM before their turn to go down",
    "ssd_blocks_corrupt": "blocks read from a disk that were not what was written",
    "ssd_blocks_no_room": "blocks not written because the file system was full",
    "ssd_read_errors": "blocks a disk would not read",
    "ssd_write_errors": "blocks a disk would not write",
    "blocks_replicated": "blocks copied from other nodes",
    "replicas_refused": "orders to copy that found no room, or too many others",
    "replicas_failed": "copies that did not come",
    "replicas_dropped": "copies dropped because they were not read",
    "blocks_taken_over": "blocks copied from nodes that drained",
    "blocks_prefetched": "blocks brought up from a disk ahead of their reader",
    "blocks_removed": "blocks removed on request",
    "blocks_reported_corrupt": "blocks that a reader got otherwise than their checksums say",
    "blocks_damaged": "blocks in DRAM that were not any more what was written",
    "messages_refused": "messages whose sender's credential does not allow them",
    "stray_messages": "messages about tickets unknown or ended, or from lost workers",
}
"""Counter name -> what it counts."""
