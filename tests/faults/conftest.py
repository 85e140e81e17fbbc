"""Both ways of moving bytes without a GPU; faults look different on each."""

from __future__ import annotations

import pytest

from tests.support.libcuda_stub import DriverStubUnavailableError, load_driver_stub


@pytest.fixture(params=["host", "posix-cpu"])
def kind(request: pytest.FixtureRequest) -> str:
    """A key of `io_backends.KINDS`."""
    if request.param == "posix-cpu":
        try:
            load_driver_stub()
        except DriverStubUnavailableError as error:
            pytest.skip(str(error))
    return str(request.param)
