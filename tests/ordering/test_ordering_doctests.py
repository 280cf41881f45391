"""The examples in the docstrings of the checker run."""

import doctest
import importlib
import pkgutil

import pytest

from expertwire import ordering

CLI = ["expertwire.cli.models", "expertwire.cli.words"]
MODULES = [f"expertwire.ordering.{m.name}" for m in pkgutil.iter_modules(ordering.__path__)] + CLI


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_checker_knows_no_protocol_and_no_torch():
    for module in pkgutil.iter_modules(ordering.__path__):
        source = importlib.util.find_spec(f"expertwire.ordering.{module.name}").origin
        with open(source, encoding="utf-8") as file:
            text = file.read()
        assert "expertwire.protocols" not in text
        assert "import torch" not in text
