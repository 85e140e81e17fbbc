"""Errors: catchable as what they are, precise in what they say."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest

from gds_optimizer import errors
from gds_optimizer.errors import GdsOptimizerError, IoError, IoTimeoutError

CLASSES = [
    error_class
    for _, error_class in inspect.getmembers(errors, inspect.isclass)
    if error_class.__module__ == errors.__name__
]


@pytest.mark.parametrize("error_class", CLASSES)
def test_every_error_has_the_common_base_and_says_what_it_is_for(error_class):
    assert issubclass(error_class, GdsOptimizerError)
    assert inspect.getdoc(error_class)


@pytest.mark.parametrize("name", ["ConfigError", "UnsupportedError", "IoPathError"])
def test_what_a_user_can_mend_beforehand_is_a_value_error(name):
    assert issubclass(getattr(errors, name), ValueError)


@pytest.mark.parametrize("name", ["IoError", "IoTimeoutError", "NoSpaceError"])
def test_what_a_disk_does_is_an_os_error(name):
    assert issubclass(getattr(errors, name), OSError)


@pytest.mark.parametrize(
    ("got", "words"), [(512, "got 512 bytes"), ("no such file", "got no such file")]
)
def test_io_error_says_path_offset_wanted_and_got(got, words):
    error = IoError(Path("/d/b.bin"), "read", file_offset=8192, wanted_bytes=4096, got=got)
    message = "read of /d/b.bin failed at offset 8192: wanted 4096 bytes, "
    assert str(error) == message + words
    assert (error.path, error.operation) == ("/d/b.bin", "read")
    assert (error.file_offset, error.wanted_bytes, error.got) == (8192, 4096, got)


def test_a_timeout_is_caught_as_an_io_error():
    with pytest.raises(IoError, match="at offset 0: wanted 4096 bytes, got nothing in 5 s"):
        raise IoTimeoutError("f", "write", file_offset=0, wanted_bytes=4096, got="nothing in 5 s")


@pytest.mark.parametrize("error_class", [c for c in CLASSES if not issubclass(c, IoError)])
def test_a_message_survives_the_way_to_another_process(error_class):
    error = pickle.loads(pickle.dumps(error_class("wanted a, got b")))
    assert type(error) is error_class
    assert str(error) == "wanted a, got b"
