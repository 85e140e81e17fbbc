"""The layout: every element once, cuts where kernels do not notice, files without overlaps."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gds_optimizer import layout as layout_module
from gds_optimizer.codecs import get_codec
from gds_optimizer.errors import ConfigError, UnsupportedError
from gds_optimizer.io import base as io_base
from gds_optimizer.layout import (
    BUCKET_ALIGNMENT,
    MAX_PLANES,
    PAGE_BYTES,
    SHARD_ALIGNMENT,
    Layout,
    PlaneSpec,
    Shard,
    SpaceSpec,
    align_up,
    bucket_numel_for,
    decoded_bytes_per_element,
    plan_layout,
)

ADAM = (PlaneSpec(name="main"), PlaneSpec(name="exp_avg"), PlaneSpec(name="exp_avg_sq"))
MOMENTUM = (PlaneSpec(name="main"), PlaneSpec(name="momentum_buffer", codec="bf16"))
MIB = 2**20


def space_of(*numels: int, planes: tuple[PlaneSpec, ...] = ADAM, prefix: str = "p") -> SpaceSpec:
    """A space with shards of these lengths."""
    return SpaceSpec(
        planes=planes,
        shards=tuple(Shard(name=f"{prefix}{i}", numel=n) for i, n in enumerate(numels)),
    )


def check(layout: Layout, specs: list[SpaceSpec]) -> None:
    """Everything that must hold for any layout, from its definition rather than from its code."""
    assert [(s.planes, s.shards) for s in layout.spaces] == [(s.planes, s.shards) for s in specs]
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    assert [b.space for b in layout.buckets] == sorted(b.space for b in layout.buckets)
    for space in layout.spaces:
        check_space(layout, space.index)
    for bucket in layout.buckets:
        check_file(bucket, layout.spaces[bucket.space].planes)
    assert layout.numel == sum(shard.numel for spec in specs for shard in spec.shards)
    assert layout.total_bytes == sum(bucket.file_bytes for bucket in layout.buckets)
    assert layout.max_file_bytes == max([0, *(bucket.file_bytes for bucket in layout.buckets)])


def check_space(layout: Layout, index: int) -> None:
    space = layout.spaces[index]
    buckets = [bucket for bucket in layout.buckets if bucket.space == index]

    # Shards do not overlap, and a gap is what alignment needs.
    end = 0
    for shard, start in zip(space.shards, space.shard_starts, strict=True):
        assert start % SHARD_ALIGNMENT == 0
        assert end <= start < end + SHARD_ALIGNMENT
        end = start + shard.numel
    assert space.numel == end

    # Buckets follow each other; only the last may be short, and then by whole alignments.
    for number, bucket in enumerate(buckets):
        assert bucket.start == number * layout.bucket_numel
        assert bucket.numel % BUCKET_ALIGNMENT == 0
        assert bucket.pieces
        if bucket is not buckets[-1]:
            assert bucket.numel == layout.bucket_numel
    if buckets:
        last = buckets[-1]
        assert last.numel <= layout.bucket_numel
        needed = max(piece.bucket_offset + piece.numel for piece in last.pieces)
        assert needed <= last.numel < needed + BUCKET_ALIGNMENT

    # Every element of every shard is in exactly one piece, at its own place; gaps are in none.
    times_covered = np.zeros(align_up(end, layout.bucket_numel), dtype=np.int8)
    for bucket in buckets:
        for piece in bucket.pieces:
            assert piece.numel >= 1
            assert piece.shard_offset % SHARD_ALIGNMENT == 0
            assert 0 <= piece.bucket_offset <= bucket.numel - piece.numel
            shard_end = space.shards[piece.shard].numel
            piece_end = piece.shard_offset + piece.numel
            assert piece_end == shard_end or piece_end % SHARD_ALIGNMENT == 0
            position = bucket.start + piece.bucket_offset
            assert position == space.shard_starts[piece.shard] + piece.shard_offset
            times_covered[position : position + piece.numel] += 1
        assert list(bucket.pieces) == sorted(bucket.pieces, key=lambda piece: piece.bucket_offset)
    for shard, start in zip(space.shards, space.shard_starts, strict=True):
        assert (times_covered[start : start + shard.numel] == 1).all()
    assert times_covered.sum(dtype=np.int64) == sum(shard.numel for shard in space.shards)


def check_file(bucket, specs: tuple[PlaneSpec, ...]) -> None:
    assert [(p.name, p.codec) for p in bucket.planes] == [(s.name, s.codec) for s in specs]
    end = 0
    for plane in bucket.planes:
        assert plane.offset % PAGE_BYTES == 0
        assert plane.nbytes % PAGE_BYTES == 0
        assert plane.offset == end, "planes overlap or leave a hole"
        encoded_bytes = get_codec(plane.codec).encoded_bytes(bucket.numel)
        assert encoded_bytes <= plane.nbytes < encoded_bytes + PAGE_BYTES
        end = plane.offset + plane.nbytes
    assert bucket.footer_offset == end
    assert bucket.file_bytes == end + PAGE_BYTES


plane_tuples = st.lists(
    st.builds(
        PlaneSpec,
        name=st.sampled_from(["main", "exp_avg", "exp_avg_sq", "momentum_buffer", "step"]),
        codec=st.sampled_from(["fp32", "bf16", "int8", "fp64"]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda plane: plane.name,
).map(tuple)


@st.composite
def any_specs(draw) -> list[SpaceSpec]:
    # Lengths near the boundaries are where cuts go wrong.
    near_boundary = st.builds(
        lambda base, delta: max(0, base + delta),
        st.sampled_from([0, 64, 1024, 2048, 5120, 10240]),
        st.integers(-2, 2),
    )
    lengths = st.lists(st.integers(0, 5000) | near_boundary, max_size=12)
    return [
        space_of(*numels, planes=draw(plane_tuples), prefix=f"s{index}.")
        for index, numels in enumerate(draw(st.lists(lengths, max_size=3)))
    ]


bucket_numels = st.integers(1, 6).map(lambda n: n * BUCKET_ALIGNMENT)


@given(specs=any_specs(), bucket_numel=bucket_numels)
def test_any_layout_is_sound(specs, bucket_numel):
    check(plan_layout(specs, bucket_numel=bucket_numel), specs)


@pytest.mark.parametrize("bucket_numel", [1024, 3072, 65536])
def test_every_small_size_in_one_layout(bucket_numel):
    specs = [space_of(*range(1, 4098))]
    check(plan_layout(specs, bucket_numel=bucket_numel), specs)


def test_every_small_size_by_itself():
    for numel in range(1, 4098):
        specs = [space_of(numel)]
        layout = plan_layout(specs, bucket_numel=2048)
        check(layout, specs)
        assert len(layout.buckets) == -(-numel // 2048)


def test_empty_shards_have_a_place_and_no_piece():
    specs = [space_of(0, 0, 70, 0, 1024, 0)]
    layout = plan_layout(specs, bucket_numel=1024)
    check(layout, specs)
    assert layout.spaces[0].shard_starts == (0, 0, 0, 128, 128, 1152)
    assert {piece.shard for bucket in layout.buckets for piece in bucket.pieces} == {2, 4}


@pytest.mark.parametrize("specs", [[], [space_of()], [space_of(0, 0)], [space_of(), space_of(0)]])
def test_nothing_to_keep_means_no_bucket(specs):
    layout = plan_layout(specs, bucket_numel=1024)
    check(layout, specs)
    assert layout.buckets == ()
    assert (layout.total_bytes, layout.max_file_bytes, layout.numel) == (0, 0, 0)


def test_a_parameter_ten_times_the_bucket():
    specs = [space_of(100, 10 * 4096, 7)]
    layout = plan_layout(specs, bucket_numel=4096)
    check(layout, specs)
    pieces = [piece for b in layout.buckets for piece in b.pieces if piece.shard == 1]
    assert len(pieces) == 11
    assert [pieces[0].numel, pieces[1].numel, pieces[-1].numel] == [4096 - 128, 4096, 128]
    assert max(bucket.file_bytes for bucket in layout.buckets) == 3 * 4 * 4096 + PAGE_BYTES


def test_twenty_thousand_tiny_shards():
    specs = [space_of(*(1 + i % 97 for i in range(20_000)))]
    layout = plan_layout(specs, bucket_numel=256 * 1024)
    check(layout, specs)
    assert sum(len(bucket.pieces) for bucket in layout.buckets) == 20_000 + sum(
        bucket.pieces[0].shard_offset > 0 for bucket in layout.buckets
    )


def test_the_last_bucket_is_as_short_as_it_can_be():
    layout = plan_layout([space_of(2 * 8192 + 1)], bucket_numel=8192)
    assert [bucket.numel for bucket in layout.buckets] == [8192, 8192, 1024]
    assert layout.buckets[-1].file_bytes == 3 * 4096 + PAGE_BYTES
    assert layout.max_file_bytes == layout.buckets[0].file_bytes


def test_spaces_keep_their_own_planes_and_never_share_a_bucket():
    specs = [
        space_of(3000, prefix="a"),
        space_of(10, planes=MOMENTUM, prefix="b"),
        space_of(5000, planes=(PlaneSpec(name="main", codec="int8"),), prefix="c"),
    ]
    layout = plan_layout(specs, bucket_numel=2048)
    check(layout, specs)
    assert [bucket.space for bucket in layout.buckets] == [0, 0, 1, 2, 2, 2]
    assert [len(bucket.planes) for bucket in layout.buckets] == [3, 3, 2, 1, 1, 1]
    # 1024 int8 values fill a quarter of a page; the plane still takes a whole one.
    assert layout.buckets[-1].planes[0].nbytes == PAGE_BYTES


def test_the_default_bucket_is_what_the_documentation_says():
    """192 MiB hold 16 Mi elements of 12 bytes, and the footer adds a page."""
    specs = [space_of(20 * MIB)]
    bucket_numel = bucket_numel_for(192 * MIB, specs)
    assert bucket_numel == 16 * MIB
    first = plan_layout(specs, bucket_numel=bucket_numel).buckets[0]
    assert [plane.offset for plane in first.planes] == [0, 64 * MIB, 128 * MIB]
    assert first.footer_offset == 192 * MIB
    assert first.file_bytes == 192 * MIB + 4096


def test_pages_mean_the_same_below_and_above():
    assert layout_module.PAGE_BYTES == io_base.PAGE_BYTES == 4096


# --- identity -------------------------------------------------------------------------------

REFERENCE = [
    space_of(1000, 2000, prefix="a"),
    space_of(64, planes=MOMENTUM, prefix="b"),
]


def replace_shard(spec: SpaceSpec, index: int, **changes) -> SpaceSpec:
    shards = list(spec.shards)
    shards[index] = dataclasses.replace(shards[index], **changes)
    return dataclasses.replace(spec, shards=tuple(shards))


def replace_plane(spec: SpaceSpec, index: int, **changes) -> SpaceSpec:
    planes = list(spec.planes)
    planes[index] = dataclasses.replace(planes[index], **changes)
    return dataclasses.replace(spec, planes=tuple(planes))


first, second = REFERENCE
DIFFERENT = {
    "shard name": [replace_shard(first, 0, name="c"), second],
    "shard length": [replace_shard(first, 1, numel=2001), second],
    "shard length within the same bucket file": [first, replace_shard(second, 0, numel=63)],
    "shard order": [dataclasses.replace(first, shards=first.shards[::-1]), second],
    "shard missing": [dataclasses.replace(first, shards=first.shards[:1]), second],
    "shard added, empty": [
        dataclasses.replace(first, shards=(*first.shards, Shard(name="x", numel=0))),
        second,
    ],
    "shard in the other space": [
        dataclasses.replace(first, shards=first.shards[:1]),
        dataclasses.replace(second, shards=(first.shards[1], *second.shards)),
    ],
    "plane name": [replace_plane(first, 1, name="exp_inf"), second],
    "plane codec": [replace_plane(first, 1, codec="bf16"), second],
    "codec of the same size": [replace_plane(first, 1, codec="int32"), second],
    "plane order": [dataclasses.replace(first, planes=first.planes[::-1]), second],
    "plane missing": [dataclasses.replace(first, planes=first.planes[:2]), second],
    "space order": REFERENCE[::-1],
    "space missing": [first],
    "space added, empty": [*REFERENCE, space_of()],
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_layout_id_changes_with(what):
    reference = plan_layout(REFERENCE, bucket_numel=2048)
    assert plan_layout(DIFFERENT[what], bucket_numel=2048).layout_id != reference.layout_id


def test_layout_id_changes_with_bucket_length_and_format_version(monkeypatch):
    reference = plan_layout(REFERENCE, bucket_numel=2048).layout_id
    assert plan_layout(REFERENCE, bucket_numel=4096).layout_id != reference
    monkeypatch.setattr(layout_module, "LAYOUT_VERSION", 2)
    assert plan_layout(REFERENCE, bucket_numel=2048).layout_id != reference


@given(specs=any_specs(), other=any_specs(), bucket_numel=bucket_numels, other_numel=bucket_numels)
def test_layout_ids_are_equal_exactly_when_layouts_are(specs, other, bucket_numel, other_numel):
    layout = plan_layout(specs, bucket_numel=bucket_numel)
    again = plan_layout(list(specs), bucket_numel=bucket_numel)
    assert (layout, layout.layout_id) == (again, again.layout_id)
    another = plan_layout(other, bucket_numel=other_numel)
    assert (layout == another) == (layout.layout_id == another.layout_id)


def test_layout_id_is_the_one_that_files_on_disk_hold():
    """Changing it makes every store unreadable: then LAYOUT_VERSION must change as well."""
    layout_id = plan_layout(REFERENCE, bucket_numel=2048).layout_id
    assert len(layout_id) == 32
    assert layout_id.hex() == "4db6754d60bdd65005a47254123d51ba805e47d8dffb4a247c9fb655b1b566a8"


def test_the_description_is_json_and_describes_everything():
    description = plan_layout(REFERENCE, bucket_numel=2048).describe()
    assert json.loads(json.dumps(description)) == description
    assert description["version"] == layout_module.LAYOUT_VERSION
    assert description["bucket_numel"] == 2048
    assert description["spaces"][1] == {
        "planes": [
            {"name": "main", "codec": "fp32"},
            {"name": "momentum_buffer", "codec": "bf16"},
        ],
        "shards": [{"name": "b0", "numel": 64}],
    }


def test_a_layout_cannot_be_changed():
    layout = plan_layout(REFERENCE, bucket_numel=2048)
    for thing, field in (
        (layout, "bucket_numel"),
        (layout.buckets[0], "numel"),
        (layout.buckets[0].planes[0], "offset"),
        (layout.buckets[0].pieces[0], "numel"),
        (layout.spaces[0], "numel"),
        (REFERENCE[0].shards[0], "numel"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, 1)


# --- bucket length from bytes ---------------------------------------------------------------


@given(
    bucket_size_bytes=st.integers(0, 2**40),
    planes=st.lists(plane_tuples, min_size=1, max_size=3),
)
def test_bucket_length_is_the_largest_that_fits(bucket_size_bytes, planes):
    specs = [space_of(1, planes=p, prefix=f"s{i}.") for i, p in enumerate(planes)]

    def encoded_bytes(numel: int) -> int:
        return max(
            sum(get_codec(plane.codec).encoded_bytes(numel) for plane in spec.planes)
            for spec in specs
        )

    if bucket_size_bytes < encoded_bytes(BUCKET_ALIGNMENT):
        with pytest.raises(ConfigError, match=f"is {bucket_size_bytes} bytes"):
            bucket_numel_for(bucket_size_bytes, specs)
        return
    numel = bucket_numel_for(bucket_size_bytes, specs)
    assert numel >= BUCKET_ALIGNMENT
    assert numel % BUCKET_ALIGNMENT == 0
    assert encoded_bytes(numel) <= bucket_size_bytes < encoded_bytes(numel + BUCKET_ALIGNMENT)


def test_encoding_makes_files_smaller_and_buckets_no_longer():
    encoded = (ADAM[0], *(dataclasses.replace(plane, codec="fp32:bf16") for plane in ADAM[1:]))
    plain, small = [space_of(20 * MIB)], [space_of(20 * MIB, planes=encoded)]
    assert bucket_numel_for(192 * MIB, small) == bucket_numel_for(192 * MIB, plain) == 16 * MIB
    layout = plan_layout(small, bucket_numel=16 * MIB)
    assert layout.max_file_bytes == 128 * MIB + PAGE_BYTES
    assert layout.max_scratch_bytes == 128 * MIB
    assert plan_layout(plain, bucket_numel=16 * MIB).max_scratch_bytes == 0


def test_shards_start_where_blocks_do():
    planes = (PlaneSpec(name="main"), PlaneSpec(name="exp_avg", codec="fp32:int8-signed-sr"))
    specs = [space_of(1, 300, 64, planes=planes), space_of(1, 300, prefix="plain")]
    layout = plan_layout(specs, bucket_numel=1024)
    assert layout.spaces[0].shard_starts == (0, 256, 768)
    assert layout.spaces[1].shard_starts == (0, 64)
    assert Layout.from_description(layout.describe()) == layout


def test_bucket_length_names_the_smallest_size_that_works():
    with pytest.raises(ConfigError, match=r"12287 bytes.*1024 elements of 12 bytes.*takes 12288"):
        bucket_numel_for(12287, [space_of(1)])
    assert bucket_numel_for(12288, [space_of(1)]) == 1024


def test_bucket_length_without_any_state_is_the_smallest():
    assert bucket_numel_for(0, []) == BUCKET_ALIGNMENT


@pytest.mark.parametrize(
    ("codecs", "expected"),
    [
        (("fp32",) * 3, 12),
        (("fp32", "bf16", "bf16"), 8),
        (("int8",), 1),
        (("fp64", "int16"), 10),
        (("fp32", "fp32:bf16", "fp32:int8-unsigned-sr"), 12),
    ],
)
def test_bytes_per_element(codecs, expected):
    planes = [PlaneSpec(name=str(i), codec=codec) for i, codec in enumerate(codecs)]
    assert decoded_bytes_per_element(planes) == expected


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_numel", [0, -1024, 1, 1023, 1025, 64])
def test_a_bucket_length_that_would_cut_pages_is_refused(bucket_numel):
    with pytest.raises(ConfigError, match=f"{bucket_numel} elements, wanted a positive multiple"):
        plan_layout([space_of(1)], bucket_numel=bucket_numel)


def test_a_space_without_planes_is_refused():
    with pytest.raises(ValueError, match="without planes"):
        plan_layout([space_of(1, planes=())], bucket_numel=1024)


def test_more_planes_than_a_footer_describes_are_refused():
    planes = tuple(PlaneSpec(name=f"plane{i}") for i in range(MAX_PLANES + 1))
    plan_layout([space_of(1, planes=planes[:-1])], bucket_numel=1024)
    with pytest.raises(UnsupportedError, match=f"keeps {MAX_PLANES + 1} state tensors"):
        plan_layout([space_of(1, planes=planes)], bucket_numel=1024)


@pytest.mark.parametrize(
    "specs",
    [
        [SpaceSpec(planes=ADAM, shards=(Shard(name="w", numel=1), Shard(name="w", numel=2)))],
        [SpaceSpec(planes=ADAM, shards=(Shard(name="w", numel=1),))] * 2,
    ],
    ids=["in one space", "in two spaces"],
)
def test_two_shards_of_one_name_are_refused(specs):
    with pytest.raises(ValueError, match="two shards are called 'w'"):
        plan_layout(specs, bucket_numel=1024)


def test_an_unknown_codec_is_refused():
    with pytest.raises(KeyError, match="fp31"):
        plan_layout([space_of(1, planes=(PlaneSpec(name="x", codec="fp31"),))], bucket_numel=1024)
