"""Assertions of the helpers say what they compared, as those of tests do."""

import pytest

pytest.register_assert_rewrite("tests.e2e.groups")
