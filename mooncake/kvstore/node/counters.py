"""The counters of a pool node, by the names that its load reports and /metrics show. Constants
only.
"""

from __future__ import annotations

COUNTERS = {
    "puts": "PutStart messages handled",
    "blocks_granted": "blocks given room",
    "blocks_refused": "blocks that were not here and were not given room",
    "blocks_put": "blocks completely written by their writers",
    "bytes_put": "bytes of the blocks in blocks_put",
    "blocks_dropped": "granted blocks that their writer gave up",
    "blocks_evicted": "blocks evicted from DRAM to make room",
    "pins": "PinBlocks messages handled",
    "blocks_hit": "blocks asked for and pinned",
    "blocks_missed": "blocks asked for and not pinned, because they or earlier ones are not here",
    "grants_reclaimed": "puts open when their writer was lost",
    "pins_reclaimed": "pins held when their reader was lost",
    "blocks_quarantined": "blocks of lost writers whose memory was put into quarantine",
    "puts_overdue": "puts open for longer than put_timeout_s although their writer lives",
    "ssd_blocks_found": "blocks that an earlier boot had left on the disks",
    "ssd_blocks_torn": "slots of the disks that held no valid block at the start",
    "ssd_blocks_written": "blocks written to a disk",
    "ssd_blocks_read": "blocks read from a disk",
    "ssd_blocks_evicted": "blocks on a disk overwritten by others",
    "ssd_blocks_too_late": "blocks evicted from DRAM before their turn to be written to a disk",
    "ssd_blocks_corrupt": "blocks read from a disk with other contents than were written",
    "ssd_blocks_no_room": "blocks not written because the file system was full",
    "ssd_read_errors": "blocks that a disk failed to read",
    "ssd_write_errors": "blocks that a disk failed to write",
    "blocks_replicated": "blocks copied from other nodes",
    "replicas_refused": "orders to copy that were refused: no room, or too many other orders",
    "replicas_failed": "copies that did not arrive",
    "replicas_dropped": "copies dropped because they were not read",
    "blocks_taken_over": "blocks copied from nodes that drained",
    "blocks_prefetched": "blocks read from a disk before their reader came",
    "blocks_removed": "blocks removed on request",
    "blocks_reported_corrupt": "blocks that arrived at a reader with a wrong checksum",
    "blocks_damaged": "blocks whose contents in DRAM have changed since they were written",
    "messages_refused": "messages whose sender's credential does not allow them",
    "stray_messages": "messages about unknown or ended tickets, or from lost workers",
}
"""Counter name -> what it counts."""
