"""What several tests share. Modules with assertions are rewritten by pytest like tests."""

import pytest

pytest.register_assert_rewrite("tests.support.io_conformance")
