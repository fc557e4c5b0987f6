"""Wheels of the core and of an example work in an environment that has nothing else of this repository."""

import pytest

from scripts import check_wheels


@pytest.mark.slow
def test_wheels_work_in_a_clean_environment(capsys):
    check_wheels.main([])
    printed = capsys.readouterr().out
    assert "installed: deepseek_v4 (loaded)\n" in printed
    assert "run `pip install atom-deepseek-v4`" in printed
