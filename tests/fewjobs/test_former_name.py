"""`fewbits.build`, as the guide once named the runner."""

from __future__ import annotations

import importlib

import pytest

import fewjobs


def test_the_former_name_gives_the_same_things_and_a_warning():
    former = importlib.import_module("fewbits.build")
    for name in former.__all__:
        with pytest.warns(DeprecationWarning, match="fewbits.build is called fewjobs"):
            assert getattr(former, name) is getattr(fewjobs, name)
    with pytest.raises(AttributeError, match="the build runner is fewjobs"):
        _ = former.no_such_name
