"""Slots and bucket size, from how fast the drives are.

Scope: what suits the drives within the memory that the defaults take, and where more memory would
pay. Anti-scope: what is measured, and when; see `tuning`.
"""

from __future__ import annotations

from gds_optimizer.config import StreamConfig
from gds_optimizer.tuning_result import Tuning

MiB = 2**20
BUCKET_OVERHEAD = 0.05
"""What part of a bucket's time may be spent on what does not depend on its size."""
MANY_DRIVES = 3
"""Drives for which three slots are too few to keep all of them busy."""
VISIT_S = 0.001
"""That the control loop and kernels' launches take for a bucket, about."""


def choose_shape(tuning: Tuning, config: StreamConfig) -> tuple[int, int]:
    """Number of slots, and bytes of a bucket, within the memory that the configured ones take.

    Each drive wants a transfer in flight while two more slots overlap with it; with one or two
    drives three slots do that as well. More slots mean smaller buckets, down to where what a bucket
    costs however small it is would show. Nothing changes where somebody chose either number, or
    where moments are rounded: each bucket is rounded by itself, so that others would come out.
    """
    usual = config.slots, config.bucket_size
    is_free = not config.is_given("slots") and not config.is_given("bucket_size")
    if len(tuning.own) < MANY_DRIVES or not is_free or config.moment_dtype != "fp32":
        return usual
    slots = len(tuning.own) + 2
    if slots <= config.slots:
        return usual
    bucket_bytes = config.slots * config.bucket_size // slots // MiB * MiB
    return (slots, bucket_bytes) if bucket_bytes >= least_bucket_bytes(tuning) else usual


def least_bucket_bytes(tuning: Tuning) -> float:
    """What a bucket must have for its fixed cost to be a twentieth of its time, at most.

    That cost is a page's round trip, and what the loop takes; its time, what the drives need to
    read and to write it.
    """
    cost_s = VISIT_S + max(each.measurement.round_trip_s for each in tuning.own)
    return cost_s / BUCKET_OVERHEAD * tuning.mixed / 2


def bucket_advice(tuning: Tuning, config: StreamConfig) -> str:
    """Where more slots or larger buckets would pay for their memory, in words; often empty.

    Args:
        tuning: what was measured.
        config: with the slots and the bucket size that are used.
    """
    if not tuning.own:
        return ""
    advice = []
    wanted_slots = len(tuning.own) + 2
    if config.slots < wanted_slots and len(tuning.own) >= MANY_DRIVES:
        advice.append(f"--stream-optimizer-state-slots {wanted_slots}")
    wanted_bytes = least_bucket_bytes(tuning)
    if config.bucket_size < wanted_bytes:
        wanted_mib = -(-int(wanted_bytes) // (64 * MiB)) * 64
        advice.append(f"--stream-optimizer-state-bucket-size {wanted_mib}MiB")
    if not advice:
        return ""
    return (
        f"the drives give {tuning.mixed / 1e9:.1f} GB/s: {' and '.join(advice)} would let a step "
        "have more of it, for more device memory"
    )
