"""A small GLUE: the nine tasks in the formats of the benchmark's own files, as JSON lines, and as on the Hub."""

import json

from datasets import ClassLabel, Dataset, Features, Value


ROWS = 8
NAMES = {
    "cola": ["unacceptable", "acceptable"],
    "sst2": ["negative", "positive"],
    "mrpc": ["not_equivalent", "equivalent"],
    "qqp": ["not_duplicate", "duplicate"],
    "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
    "wnli": ["not_entailment", "entailment"],
}
TITLES = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "stsb": "STS-B",
    "qqp": "QQP",
    "mnli": "MNLI",
    "qnli": "QNLI",
    "rte": "RTE",
    "wnli": "WNLI",
}
HUB_COLUMNS = {
    "cola": ["sentence"],
    "sst2": ["sentence"],
    "mrpc": ["sentence1", "sentence2"],
    "stsb": ["sentence1", "sentence2"],
    "qqp": ["question1", "question2"],
    "mnli": ["premise", "hypothesis"],
    "ax": ["premise", "hypothesis"],
    "qnli": ["question", "sentence"],
    "rte": ["sentence1", "sentence2"],
    "wnli": ["sentence1", "sentence2"],
}
# Header and cells of labelled rows and of test rows, as in the files of the benchmark: `{a}` and `{b}` are the texts,
# `{n}` the number of the row, `{label}` what the file has for a label.
PARSES = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
MNLI = f"index\tpromptID\tpairID\tgenre\t{PARSES}\tsentence1\tsentence2"
MNLI_CELLS = "{n}\t31193\t31193n\ttelephone\t(\t(\t(\t(\t{a}\t{b}"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
STSB_CELLS = "{n}\tmain-news\tMSRvid\t2012\t7\tnone\tnone\t{a}\t{b}"
PAIRS = (
    ("index\tsentence1\tsentence2\tlabel", "{n}\t{a}\t{b}\t{label}"),
    ("index\tsentence1\tsentence2", "{n}\t{a}\t{b}"),
)
TSV = {
    "cola": ((None, "gj04\t{label}\t*\t{a}"), ("index\tsentence", "{n}\t{a}")),
    "sst2": (("sentence\tlabel", "{a}\t{label}"), ("index\tsentence", "{n}\t{a}")),
    "mrpc": (
        ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{label}\t702876\t702977\t{a}\t{b}"),
        ("\ufeffindex\t#1 ID\t#2 ID\t#1 String\t#2 String", "{n}\t702876\t702977\t{a}\t{b}"),
    ),
    "stsb": ((STSB + "\tscore", STSB_CELLS + "\t{label}"), (STSB, STSB_CELLS)),
    "qqp": (
        ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "13\t21\t22\t{a}\t{b}\t{label}"),
        ("id\tquestion1\tquestion2", "{n}\t{a}\t{b}"),
    ),
    "mnli": ((MNLI + "\tlabel1\tgold_label", MNLI_CELLS + "\tneutral\t{label}"), (MNLI, MNLI_CELLS)),
    "qnli": (
        ("index\tquestion\tsentence\tlabel", "{n}\t{a}\t{b}\t{label}"),
        ("index\tquestion\tsentence", "{n}\t{a}\t{b}"),
    ),
    "rte": PAIRS,
    "wnli": PAIRS,
}
NAMED_IN_TSV = ("mnli", "qnli", "rte")


def splits(task):
    """Names of the splits on the Hub and of their files in the benchmark."""
    kinds = ("_matched", "_mismatched") if task == "mnli" else ("",)
    named = {"train": "train"}
    for kind in kinds:
        named |= {f"validation{kind}": f"dev{kind}", f"test{kind}": f"test{kind}"}
    return named


def texts(task, split, row):
    """One text, or two: with a quote that is never closed, and characters that other files break lines at."""
    number = 100 * sorted(splits(task)).index(split) + row if split != "ax" else 900 + row
    first = f'the "{("dull", "fine")[row % 2]} film\u2028number {number}'
    return [first, f"it is {('dull', 'fine')[row // 2 % 2]}"][: len(HUB_COLUMNS[task])]


def label(task, row):
    """The number of a class, or a score."""
    return row * 5 / (ROWS - 1) if task == "stsb" else row % len(NAMES[task])


def rows(task, split):
    """What `load_glue` is to return."""
    found = []
    for row in range(ROWS):
        last = {"index": row} if split.startswith(("test", "ax")) else {"label": label(task, row)}
        found.append({**dict(zip(("text", "text_pair"), texts(task, split, row))), **last})
    return found


def write_tsv(folder, tasks=TITLES):
    """The folders and files of the benchmark."""
    for task in tasks:
        for split, name in splits(task).items():
            _write_rows(folder / TITLES[task] / f"{name}.tsv", task, split, *TSV[task][split.startswith("test")])
    if "mnli" in tasks:
        _write_rows(folder / "diagnostic" / "diagnostic.tsv", "mnli", "ax", *PAIRS[1])


def _write_rows(path, task, split, header, cells):
    def of_file(row):
        number = label(task, row)
        return NAMES[task][number] if task in NAMED_IN_TSV else f"{number:.3f}" if task == "stsb" else number

    lines = [] if header is None else [header]
    for row in range(ROWS):
        a, b = [*texts(task, split, row), None][:2]
        lines.append(cells.format(n=row, a=a, b=b, label=of_file(row)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _hub_row(task, split, row):
    cells = dict(zip(HUB_COLUMNS[task], texts(task, "ax" if task == "ax" else split, row)))
    hidden = split.startswith("test")
    return {**cells, "label": -1 if hidden else label(task, row), "idx": row}


def write_jsonl(folder, task, named=True):
    """The columns of the Hub in JSON lines, with names of classes or their numbers; test sets without labels."""
    (folder / task).mkdir(parents=True)
    for split in splits(task):
        lines = []
        for row in range(ROWS):
            cells = _hub_row(task, split, row)
            if cells["label"] == -1:
                del cells["label"]
            elif named and task != "stsb":
                cells["label"] = NAMES[task][cells["label"]]
            lines.append(json.dumps(cells))
        (folder / task / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def write_hub(folder, tasks=(*TITLES, "ax")):
    """A folder that `datasets.load_dataset` takes for the dataset of the Hub."""
    configs = ["---", "configs:"]
    for task in tasks:
        kind = Value("float32") if task == "stsb" else ClassLabel(names=NAMES["mnli" if task == "ax" else task])
        features = Features(
            {**dict.fromkeys(HUB_COLUMNS[task], Value("string")), "label": kind, "idx": Value("int32")}
        )
        configs += [f"- config_name: {task}", "  data_files:"]
        for split in ["test"] if task == "ax" else splits(task):
            examples = [_hub_row(task, split, row) for row in range(ROWS)]
            Dataset.from_list(examples, features=features).to_parquet(folder / task / f"{split}.parquet")
            configs += [f"  - split: {split}", f"    path: {task}/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*configs, "---", ""]))
