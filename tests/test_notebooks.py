"""The notebooks run, say what their text says, and are committed with the outputs of a run."""

import getpass
import re
from pathlib import Path

import pytest
from tiny_models import tiny_config, vivid
from transformers import AutoModelForMaskedLM

from hf_attn_dynamics.data import embedded_sentences, train_byte_level_bpe


pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
from notebooks import FOLDER, NAMES, execute, read, text_of  # noqa: E402


ROOT = FOLDER.parents[1]
LARGEST = 300_000  # bytes of a file


def outputs(notebook):
    """All that the code cells printed and showed."""
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [output for cell in codes for output in cell.outputs if output.get("name") == "stderr"]
    return "\n".join(map(text_of, codes))


def number(pattern, text):
    return float(re.search(pattern, text)[1])


def test_heads_of_a_real_model_are_read(real_models, tmp_path):
    text = outputs(execute("read_heads", tmp_path, str(real_models / "minilm")))
    assert "bert: 6 layers of 12 heads" in text
    assert "20 sentences with" in text
    # The head of MiniLM that attends to the previous token, in the grid of confidences.
    assert number(r'title="encoder 0\.2">([\d.]+)<', text) > 0.9
    assert re.search(r"nsubj to head<.*?encoder 2\.3<", text)
    assert 0.1 < number(r"heads\.html: ([\d.]+) MB", text) < 3
    assert '<iframe srcdoc="' in text


def test_heads_of_the_demonstration_model_are_read_without_a_real_one(tmp_path):
    """A model that was trained already is found, so that nothing is trained here."""
    folder = tmp_path / "notebooks" / "trained" / "model"
    tokenizer = train_byte_level_bpe([tree.text for tree in embedded_sentences()], 400, kind="roberta")
    config = tiny_config("roberta", vocab_size=len(tokenizer), max_position_embeddings=80)
    vivid(AutoModelForMaskedLM.from_config(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = outputs(execute("read_heads", tmp_path))
    assert "NOTEBOOK_MODEL is not set" in text
    assert f"{config.num_hidden_layers} layers of {config.num_attention_heads} heads" in text


def test_masking_equals_pruning_and_what_is_pushed_is_what_is_loaded(tmp_path):
    text = outputs(execute("prune_and_push", tmp_path))
    assert "masked and pruned agree: True" in text
    assert number(r"accuracy with all 8 heads: ([\d.]+)", text) > 0.95
    assert number(r"accuracy with 6 heads: ([\d.]+)", text) > 0.9
    assert "config.json, model.safetensors" in text
    assert "\nBertForSequenceClassification True\nHeadwiseBertForSequenceClassification True\n" in text


def test_the_guided_decoder_learns_sooner_and_needs_its_guided_head(tmp_path):
    text = outputs(execute("guide_a_decoder", tmp_path))
    guided, unguided = (number(rf"\b{name} +loss on new texts: ([\d.]+)", text) for name in ("guided", "unguided"))
    assert guided < unguided - 0.5
    copying, others = (number(rf"\b{name} +best head [\d.]+: ([\d.]+)", text) for name in ("guided", "unguided"))
    assert copying > others + 0.1
    assert number(r"without head 0\.0: ([\d.]+)", text) > number(r"without any other head: at most ([\d.]+)", text)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_as_it_was_executed(name):
    notebook, path = read(name), FOLDER / f"{name}.ipynb"
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in codes] == list(range(1, len(codes) + 1))
    assert not [output for cell in codes for output in cell.outputs if output.output_type == "error"]
    assert len(notebook.cells) < 25
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_outputs_say_nothing_about_the_machine(name):
    text = outputs(read(name))
    assert not re.search(r"/(tmp|home|root|work|usr|var|mnt)/|site-packages|Warning|\b20\d\d-\d\d-\d\d\b", text)
    user = getpass.getuser()
    assert user == "root" or not re.search(rf"\b{re.escape(user)}\b", text)


LINKS = [
    (name, link)
    for name in NAMES
    for cell in read(name).cells
    if cell.cell_type == "markdown"
    for link in re.findall(r"\]\(((?!http|#)[^)\s]+)\)", cell.source)
]


@pytest.mark.parametrize(("name", "link"), LINKS)
def test_links_lead_somewhere(name, link):
    assert (FOLDER / link.partition("#")[0]).exists()


def test_every_notebook_is_run_and_is_a_page_of_the_site():
    assert {path.stem for path in Path(FOLDER).glob("*.ipynb")} == {*NAMES}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"- notebooks/{name}.md" in navigation for name in NAMES)
