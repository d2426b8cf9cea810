import pytest
from matplotlib.figure import Figure
from translating import PAIRS, write_pairs


@pytest.fixture(scope="session", autouse=True)
def rough_pictures():
    """Recipes draw without layout and in few dots here, for time: what pictures show is tested with the plots."""
    savefig = Figure.savefig

    def rough(figure, path, **settings):
        figure.set_layout_engine("none")
        savefig(figure, path, **{**settings, "dpi": 20})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", rough)
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Files of simple sentences, aligned by line: the training text is all of them, the others are parts."""
    folder = tmp_path_factory.mktemp("text")
    for name, pairs in (("train", PAIRS), ("valid", PAIRS[::4]), ("test", PAIRS[1::6])):
        write_pairs(folder, name, pairs)
    return folder
