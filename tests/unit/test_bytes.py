"""Bytes a parameter that a step reads and writes in each form, by the engine and by the kernel."""

from __future__ import annotations

from typing import Any

import pytest

from gds_optimizer.bench.page_cache import resident_pages
from gds_optimizer.bench.process_io import own_io
from gds_optimizer.codecs import get_codec
from gds_optimizer.plan import tie_plane
from tests.support.engines import grads_of, streamed
from tests.support.forms import BF16, FP32, INT8, REMAINDER, name_of
from tests.support.libcuda_stub import DriverStubUnavailableError, load_driver_stub

BUCKET_NUMEL, BUCKETS = 2**18, 10
SIZES = (BUCKET_NUMEL * BUCKETS,)
# Bytes of main, exp_avg and exp_avg_sq, and where a remainder's tie bit is.
EIGHT = 1 + 4 / 256
FORMS: list[tuple[dict[str, str], float, str | None]] = [
    (FP32, 4 + 4 + 4, None),
    (BF16, 4 + 2 + 2, None),
    (INT8, 4 + 2 * EIGHT, None),
    (FP32 | REMAINDER, 2 + 4 + 4, "exp_avg_sq"),
    (BF16 | REMAINDER, 2 + 2 + 2, "exp_avg_sq"),
    (INT8 | REMAINDER, 2 + 1 / 8 + 2 * EIGHT, "bitmap"),
]


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["host", "posix-cpu"])
@pytest.mark.parametrize(("form", "per_param", "ties"), FORMS, ids=name_of)
def test_bytes_of_a_step(tmp_path, kind, form, per_param, ties):
    if own_io() is None:
        pytest.skip("needs the kernel's counters of a process's I/O, /proc/self/io")
    if kind == "posix-cpu":
        try:
            load_driver_stub()
        except DriverStubUnavailableError as error:
            pytest.skip(str(error))
    options: dict[str, Any] = {"slots": 1, "kind": kind, "bucket_size": 12 * BUCKET_NUMEL}
    with streamed(tmp_path, sizes=SIZES, moments=form, **options) as made:
        layout = made.layout
        assert [bucket.numel for bucket in layout.buckets] == [BUCKET_NUMEL] * BUCKETS
        # By the definition of the codecs, padding and footers apart, and those are less than 1 %.
        planes = layout.spaces[0].planes
        encoded = [get_codec(plane.codec).encoded_bytes(BUCKET_NUMEL) for plane in planes]
        assert sum(encoded) / BUCKET_NUMEL == per_param
        rest = layout.total_bytes / (BUCKET_NUMEL * BUCKETS) - per_param
        assert 0 < rest < 0.01 * per_param
        number = tie_plane(layout.buckets[0])
        in_sign = number is not None and planes[number].name
        in_bitmap = planes[0].codec.endswith("-bitmap") and "bitmap"
        assert (in_sign or in_bitmap or None) == ties
        for step in range(2):  # the first reads no moments, and writes blocks for the first time
            made.step(grads_of(SIZES, step))
        made.engine.drain()
        for step in range(2, 4):
            before = own_io()
            made.step(grads_of(SIZES, step))
            made.engine.drain()
            after = own_io()
            stats = made.engine.last_stats
            # One bucket was still in the slot.
            assert stats.cached_buckets == 1
            assert stats.read_bytes * BUCKETS == layout.total_bytes * (BUCKETS - 1)
            assert stats.written_bytes == layout.total_bytes
            assert before is not None
            assert after is not None
            counted = after - before
            # The file system may write a few of its own.
            assert 0 <= counted.read - stats.read_bytes <= 0.005 * stats.read_bytes
            assert 0 <= counted.written - stats.written_bytes <= 0.005 * stats.written_bytes
        # No page of them went through the cache, which the kernel would count only later.
        assert sum(resident_pages(path) for path in made.paths) == 0


def test_the_least_form_takes_no_more_than_4_2_bytes(tmp_path):
    """Footers and padding included, in buckets of the default size, of which none is made."""
    from gds_optimizer.config import StreamConfig
    from gds_optimizer.planning import engine_plan

    config = StreamConfig(directories=(tmp_path,), moment_dtype="int8", main="remainder")
    numel = 2**28
    layout = engine_plan(numel, config).layout
    assert layout.max_file_bytes > 60 * 2**20
    assert 4.15 < layout.total_bytes / numel <= 4.2
