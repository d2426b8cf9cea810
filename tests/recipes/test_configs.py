# Licensed under the Apache License, Version 2.0.
"""The files in recipes/configs explain all flags of their recipes, with the values of the demonstrations."""

import pytest
from config_files import FOLDER, configured, text


@pytest.mark.parametrize("name", configured())
def test_the_file_of_a_recipe_is_written_from_its_flags(name):
    path = FOLDER / f"{name}.yaml"
    assert path.read_text(encoding="utf-8") == text(name), "run python tests/reference/config_files.py"
