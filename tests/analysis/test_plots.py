import pytest

from hf_attn_dynamics.analysis.plots import plot_pretraining


def history(guided):
    entries = []
    for step in (10, 20, 30):
        guidance = {"guidance_loss": 4 / step, "guidance_weight": 1 - step / 30} if guided else {}
        entries += [{"step": step, "task_loss": 7 - step / 10, **guidance}, {"step": step, "eval_loss": 7 - step / 12}]
    return entries


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("crossing", [(20, 5.3), None])
def test_a_picture_is_a_png_with_an_svg_that_names_what_it_shows(tmp_path, guided, crossing):
    runs = {"one run": history(guided), "another": history(False)}
    path = plot_pretraining(runs, tmp_path / "curves.pdf", "title", unigram_entropy=6.5, crossing=crossing)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "curves.svg").read_text()
    assert "one run" in svg
    assert ("guidance loss" in svg) == guided
    assert ("step 20" in svg) == (crossing is not None)


def test_the_same_history_gives_the_same_picture(tmp_path):
    paths = [plot_pretraining({"run": history(True)}, tmp_path / name / "c.png") for name in "ab"]
    assert paths[0].with_suffix(".svg").read_bytes() == paths[1].with_suffix(".svg").read_bytes()
