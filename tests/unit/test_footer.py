"""The footer: what is on its page, and what it notices."""

from __future__ import annotations

import pytest
import torch

from gds_optimizer import footer as module
from gds_optimizer.checksum import checksum
from gds_optimizer.footer import (
    MAGIC,
    WORDS,
    BucketRecord,
    build_footer,
    describe_difference,
    expected_words,
    footer_words,
    replace_plane_checksum,
)
from gds_optimizer.layout import MAX_PLANES, PAGE_BYTES, PlaneSpec, Shard, SpaceSpec, plan_layout

PLANES = (PlaneSpec(name="main"), PlaneSpec(name="exp_avg"), PlaneSpec(name="short", codec="bf16"))


def make_layout(numel: int = 3000):
    shards = (Shard(name="a", numel=1500), Shard(name="b", numel=numel))
    return plan_layout([SpaceSpec(planes=PLANES, shards=shards)], bucket_numel=1024)


LAYOUT = make_layout()
BUCKET = LAYOUT.buckets[2]


def slot(record: BucketRecord, *, seed: int = 0) -> torch.Tensor:
    """A slot's bytes: random planes and the footer that belongs to them."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randint(0, 256, (BUCKET.file_bytes,), generator=generator, dtype=torch.uint8)
    footer_words(buffer, BUCKET).copy_(build_footer(buffer, BUCKET, LAYOUT, record))
    return buffer


def difference(buffer: torch.Tensor, record: BucketRecord, planes=(0, 1, 2), bucket=BUCKET) -> str:
    """What a reader of these bytes is told; empty where nothing is wrong."""
    expected = expected_words(buffer, bucket, LAYOUT, record, planes)
    found = footer_words(buffer, bucket)
    if torch.equal(expected, found):
        return ""
    return describe_difference(expected, found, bucket)


ALL = BucketRecord(7, [True, True, True])


def test_the_words_on_the_page():
    buffer = slot(ALL)
    page = buffer[-PAGE_BYTES:]
    assert page.numpy()[:8].tobytes() == b"GDSOPTB1"
    words = page.view(torch.int64).tolist()
    assert len(words) == WORDS == 512
    assert words[:2] == [MAGIC, 1]
    layout_id = b"".join(word.to_bytes(8, "little", signed=True) for word in words[2:6])
    assert layout_id == LAYOUT.layout_id
    assert words[6:9] == [BUCKET.index, 7, 3]
    for plane, spec in enumerate(BUCKET.planes):
        plane_bytes = buffer[spec.offset : spec.offset + spec.nbytes]
        assert words[16 + 2 * plane : 18 + 2 * plane] == [1, int(checksum(plane_bytes))]
    assert not any(words[9:16])
    assert not any(words[22:511])
    assert words[511] == int(checksum(torch.tensor([*words[:511], 0]).view(torch.uint8)))


def test_what_was_written_is_accepted():
    assert difference(slot(ALL), ALL) == ""


@pytest.mark.parametrize("written", [[True, False, False], [False, True, True]])
def test_planes_that_were_not_written_do_not_count(written):
    record = BucketRecord(0, written)
    buffer = slot(record)
    words = footer_words(buffer, BUCKET).tolist()
    for plane, is_written in enumerate(written):
        if not is_written:
            assert words[16 + 2 * plane : 18 + 2 * plane] == [0, 0]
            offset = BUCKET.planes[plane].offset
            buffer[offset : offset + BUCKET.planes[plane].nbytes] = 99
    assert difference(buffer, record) == ""


def test_only_what_was_read_is_compared():
    buffer = slot(ALL)
    buffer[BUCKET.planes[1].offset] ^= 1
    assert difference(buffer, ALL, planes=(0, 2)) == ""
    assert "checksum of plane 'exp_avg'" in difference(buffer, ALL, planes=(1,))


@pytest.mark.parametrize(
    ("plane", "offset"),
    # 1024 bf16 values fill half a page: the rest is padding
    [(0, 0), (0, 4095), (1, 0), (1, 2048), (2, 0), (2, 2047), (2, 2048), (2, 4095)],
)
def test_a_flipped_bit_in_a_plane_or_its_padding_is_named(plane, offset):
    buffer = slot(ALL)
    spec = BUCKET.planes[plane]
    assert spec.nbytes == 4096
    buffer[spec.offset + offset] ^= 0x10
    assert difference(buffer, ALL).startswith(f"checksum of plane {spec.name!r}: wanted ")


def test_a_flipped_bit_anywhere_in_the_footer_is_noticed():
    right = slot(ALL)
    for byte in range(PAGE_BYTES):
        buffer = right.clone()
        buffer[BUCKET.footer_offset + byte] ^= 1 << (byte % 8)
        assert difference(buffer, ALL), byte


@pytest.mark.parametrize(
    ("word", "name"),
    [
        (1, "format version: wanted 1, got 2"),
        (2, "layout id"),
        (5, "layout id"),
        (6, "bucket index: wanted 2, got 3"),
        (7, "step: wanted 7, got 8"),
        (8, "number of planes: wanted 3, got 4"),
        (16, "written flag of plane 'main': wanted 1, got 2"),
        (19, "checksum of plane 'exp_avg'"),
        (100, "word 100: wanted 0, got 1"),
        (511, "footer checksum is wrong"),
    ],
)
def test_the_word_that_differs_is_named(word, name):
    buffer = slot(ALL)
    words = footer_words(buffer, BUCKET)
    words[word] += 1
    if word != 511:
        module._seal(words)  # somebody meant it: the footer itself is consistent
    assert difference(buffer, ALL).startswith(name)


def test_a_file_that_was_never_written_is_named():
    buffer = torch.zeros(BUCKET.file_bytes, dtype=torch.uint8)
    assert difference(buffer, ALL) == "it has no footer (wanted the magic number, got other bytes)"


def test_an_older_write_is_named_by_its_step():
    buffer = slot(BucketRecord(6, [True] * 3), seed=1)
    assert difference(buffer, ALL) == "step: wanted 7, got 6"


def test_another_bucket_and_another_layout_are_named():
    buffer = slot(ALL)
    neighbour = LAYOUT.buckets[1]
    assert neighbour.file_bytes == BUCKET.file_bytes
    assert difference(buffer, ALL, bucket=neighbour) == "bucket index: wanted 1, got 2"
    other = make_layout(3001)
    expected = expected_words(buffer, BUCKET, other, ALL, (0, 1, 2))
    text = describe_difference(expected, footer_words(buffer, BUCKET), BUCKET)
    assert text.startswith("layout id: ")


def test_only_the_first_differences_are_listed():
    buffer = slot(ALL)
    footer_words(buffer, BUCKET)[100:120] = 1
    text = difference(buffer, ALL)
    assert text.count("wanted") == 4
    assert text.endswith("and more")


def test_one_plane_can_be_rewritten():
    buffer = slot(ALL)
    spec = BUCKET.planes[1]
    buffer[spec.offset : spec.offset + spec.nbytes] = 3
    assert difference(buffer, ALL)
    replace_plane_checksum(buffer, BUCKET, 1)
    assert difference(buffer, ALL) == ""


def test_as_many_planes_as_there_is_room_for():
    planes = tuple(PlaneSpec(name=f"plane{i}", codec="uint8") for i in range(MAX_PLANES))
    layout = plan_layout(
        [SpaceSpec(planes=planes, shards=(Shard(name="a", numel=10),))], bucket_numel=1024
    )
    (bucket,) = layout.buckets
    assert MAX_PLANES == (WORDS - 17) // 2
    record = BucketRecord(1, [True] * MAX_PLANES)
    buffer = torch.zeros(bucket.file_bytes, dtype=torch.uint8)
    buffer[bucket.planes[-1].offset] = 5
    footer = build_footer(buffer, bucket, layout, record)
    last = checksum(buffer[bucket.planes[-1].offset : bucket.footer_offset])
    assert footer[16 + 2 * (MAX_PLANES - 1)] == 1
    assert footer[17 + 2 * (MAX_PLANES - 1)] == last


def test_a_record_is_blank_until_a_plane_is_written():
    assert BucketRecord(3, [False, False]).is_blank
    assert not BucketRecord(0, [False, True]).is_blank
