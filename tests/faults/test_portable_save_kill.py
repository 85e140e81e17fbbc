"""`kill -9` in the middle of saving in one of Megatron's formats.

What declares itself a checkpoint loads, the one before and the snapshot are as they were, nothing
stays where the state was, and the next save takes the place of the one that died.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.megatron import HAS_ALL_FORMS
from tests.megatron.checkpointing import BUCKET_SHAPED, MODEL_SHAPED

pytestmark = [pytest.mark.faults, pytest.mark.megatron, pytest.mark.slow]

FORMATS = (BUCKET_SHAPED, MODEL_SHAPED)
POINTS = 20
"""Deaths in each format."""


FORMS: dict[str, dict[str, str]] = {"fp32": {}}
if HAS_ALL_FORMS:
    FORMS["int8-remainder"] = {"moment_dtype": "int8", "main": "remainder"}


@pytest.fixture(scope="module", params=FORMS)
def deaths(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("portable")
    command = [sys.executable, "-m", "tests.faults.portable_save", str(directory), str(POINTS)]
    command.append(json.dumps(FORMS[request.param]))
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    by_kind = {kind: [each for each in results if each["kind"] == kind] for kind in FORMATS}
    for each in by_kind.values():
        assert [result["died"] for result in each] == [False] + [True] * POINTS
    return by_kind


@pytest.mark.parametrize("kind", FORMATS)
def test_killed_anywhere(deaths, kind):
    untouched, *others = deaths[kind]
    assert not untouched["died"]
    first, second = untouched[f"first-{kind}"], untouched[f"second-{kind}"]
    assert first != second
    # What is decoded for a checkpoint is encoded to the same when it is loaded.
    assert untouched["snapshot"] == first == untouched["was"]
    for found in others:
        assert found[f"first-{kind} is declared"], found["at"]
        assert found[f"first-{kind}"] == first, found["at"]
        assert found["damages"] == [], found["at"]
        assert (found["snapshot is of"], found["snapshot"]) == (1, first), found["at"]
        assert found["left"] == [], found["at"]
        if found[f"second-{kind} is declared"]:
            assert found[f"second-{kind}"] == second, found["at"]
        else:
            # It is saved again, from the snapshot's state.
            assert found["saved again"] == first, found["at"]
    # Deaths before and behind the moment at which it becomes one.
    assert {found[f"second-{kind} is declared"] for found in others} == {True, False}
