import runpy
import sys

import pytest
from launching import ROOT
from rough_pictures import draw_roughly
from translating import PAIRS, write_pairs


@pytest.fixture(scope="session", autouse=True)
def rough_pictures():
    """Recipes draw without layout and in few dots here, for time: what pictures show is tested with the plots."""
    with pytest.MonkeyPatch.context() as patch:
        draw_roughly(patch)
        yield


@pytest.fixture
def run_as_script(monkeypatch, capsys):
    """Runs a recipe with a command line, as a script but in this process; returns what it prints."""

    def run(recipe, *argv):
        script = str(ROOT / "recipes" / recipe)
        monkeypatch.setattr(sys, "argv", [script, *map(str, argv)])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Files of simple sentences, aligned by line: the training text is all of them, the others are parts."""
    folder = tmp_path_factory.mktemp("text")
    for name, pairs in (("train", PAIRS), ("valid", PAIRS[::4]), ("test", PAIRS[1::6])):
        write_pairs(folder, name, pairs)
    return folder
