import pytest
from translating import PAIRS, write_pairs


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Files of simple sentences, aligned by line: the training text is all of them, the others are parts."""
    folder = tmp_path_factory.mktemp("text")
    for name, pairs in (("train", PAIRS), ("valid", PAIRS[::4]), ("test", PAIRS[1::6])):
        write_pairs(folder, name, pairs)
    return folder
