import pytest
from rough_pictures import draw_truly


@pytest.fixture(autouse=True)
def true_pictures(monkeypatch):
    """What pictures show is tested here, also in a process that has drawn those of recipes roughly."""
    draw_truly(monkeypatch)
