import math

import pytest

from hf_attn_dynamics import HeadScores, HeadTimeline


def timeline():
    made = HeadTimeline()
    made.record(0, "confidence", HeadScores({"encoder": [[0.1, 0.2], [1 / 3, math.nan]], "cross": [[0.5]]}))
    made.record(0, "roles/nsubj", HeadScores({"encoder": [[0.3, 0.2]]}))
    made.record(50, "guidance_weight", 0.75)
    made.record(50, "confidence", HeadScores({"encoder": [[0.9, 0.2], [0.8, math.nan]], "cross": [[0.4]]}))
    made.record(100, "confidence", HeadScores({"encoder": [[0.7, 0.2], [0.9, math.nan]], "cross": [[0.9]]}))
    return made


def test_there_is_a_record_for_each_number():
    records = list(timeline())
    assert len(timeline()) == len(records) == 3 * 5 + 2 + 1
    assert records[1] == (0, "confidence", "encoder", 0, 1, 0.2)
    assert (50, "guidance_weight", None, None, None, 0.75) in records
    assert timeline().statistics == ["confidence", "roles/nsubj", "guidance_weight"]


def test_steps_come_in_their_order_however_they_were_recorded():
    made = HeadTimeline()
    for step in (100, 0, 50):
        made.record(step, "loss", float(step))
    assert list(made.of("loss")) == [0, 50, 100]
    assert [record.step for record in made] == [0, 50, 100]


def test_the_first_step_is_that_at_which_a_head_reaches_the_score():
    first = timeline().first_step("confidence", 0.8)
    assert first == HeadScores({"encoder": [[50, math.nan], [50, math.nan]], "cross": [[100]]})


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda made: made.of("entropy"), "no statistic 'entropy', but confidence, roles/nsubj, guidance_weight"),
        (lambda made: made.first_step("guidance_weight", 0.5), "'guidance_weight' is a metric of the whole model"),
        (lambda made: HeadTimeline().of("entropy"), "no statistic 'entropy', but nothing"),
    ],
    ids=["unknown", "whole model", "empty"],
)
def test_what_is_not_there_is_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(timeline())


def test_a_file_gives_back_every_bit_and_removed_heads(tmp_path):
    timeline().save(tmp_path / "heads.csv")
    assert HeadTimeline.load(tmp_path / "heads.csv") == timeline()
    assert HeadTimeline.load(tmp_path / "heads.csv").statistics == timeline().statistics
    lines = (tmp_path / "heads.csv").read_text().splitlines()
    assert lines[:2] == ["step,statistic,site,layer,head,value", "0,confidence,encoder,0,0,0.1"]
    assert "0,confidence,encoder,1,1," in lines
    assert HeadTimeline.from_csv(HeadTimeline().to_csv()) == HeadTimeline()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the columns must be step,statistic"),
        ("step,value\n1,2\n", "got step,value"),
        ("0,confidence,encoder,0,0,0.1\n0,confidence,encoder,0,1,high\n", "line 3 is not a record of a head"),
        ("0,confidence,encoder,0,0\n", "line 2 is not a record of a head: 0,confidence,encoder,0,0"),
        ("0,confidence,encoder,0,1,0.5\n", "line 2 is not a record"),
        ("0,confidence,encoder,1,0,0.5\n", "line 2 has head 0 of layer 1, but the heads before it are missing"),
        (
            "0,confidence,encoder,0,0,0.5\n0,confidence,encoder,0,2,0.5\n",
            "line 3 has head 2 of layer 0, but the heads before it are missing",
        ),
        ("0,confidence,,,,0.5\n0,confidence,encoder,0,0,0.5\n", "line 3 is not a record"),
        ("0,confidence,entrance,0,0,0.5\n", "the site 'entrance'"),
    ],
    ids=["empty", "columns", "number", "short", "order", "layer", "gap", "both", "site"],
)
def test_what_is_no_timeline_is_refused_by_its_file(tmp_path, text, message):
    header = "" if "the columns" in message or "got" in message else "step,statistic,site,layer,head,value\n"
    (tmp_path / "heads.csv").write_text(header + text)
    with pytest.raises(ValueError, match=r"heads\.csv does not hold a timeline of heads: .*" + message):
        HeadTimeline.load(tmp_path / "heads.csv")


def test_a_data_frame_has_the_same_rows():
    pytest.importorskip("pandas")
    table = timeline().to_pandas()
    assert list(table.columns) == ["step", "statistic", "site", "layer", "head", "value"]
    assert len(table) == len(timeline())
    assert table[table.statistic == "confidence"].groupby("step").value.max().tolist() == [0.5, 0.9, 0.9]
    assert table[table.statistic == "guidance_weight"].layer.isna().all()
