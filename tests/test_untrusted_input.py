"""Files from elsewhere: whatever is in them, there is a result or one clear error, no code runs and nothing is written
elsewhere. `ATTN_DYNAMICS_FUZZ_CASES` sets how many cases each property is tried with; 300 make 20,000."""

import ast
import gzip
import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.numpy
import torch
from cards import write_card
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, KINDS, PRETRAINED, headwise_class, sizes, tiny_config, tiny_model
from transformers import BertConfig, BertModel

from hf_attn_dynamics import (
    BowAttentionConfig,
    GateHistory,
    HeadScores,
    HeadTimeline,
    IbmModel1,
    LstmConfig,
    LstmSeq2SeqConfig,
    ProxyConfig,
    headwise_model,
    load_pruned,
    read_pharaoh,
)
from hf_attn_dynamics.data import (
    load_class_files,
    load_classification,
    load_conllu,
    load_coreference,
    load_documents,
    load_glue,
    load_parallel,
    load_texts,
    load_token_classification,
    load_word_vectors,
)
from hf_attn_dynamics.hub.card import Metric
from hf_attn_dynamics.hub.push import model_files
from hf_attn_dynamics.models.size_limits import SIZE_LIMITS
from hf_attn_dynamics.recipes.arguments.base import PublishArguments
from hf_attn_dynamics.recipes.run import check_output_dir, parse_yaml_or_flags, read_summaries, run_or_read
from hf_attn_dynamics.recipes.sweeps import Sweep, collect, run_sweep
from hf_attn_dynamics.training import newest_checkpoint


ROOT = Path(__file__).parents[1]
OTHER_CONFIGS = (BowAttentionConfig, LstmConfig, LstmSeq2SeqConfig, ProxyConfig)
CLEAR = (ValueError, OSError, StrictDataclassError)
fuzzed = settings(
    max_examples=int(os.environ.get("ATTN_DYNAMICS_FUZZ_CASES", "12")),
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def result_or_clear_error(read, *arguments, names=""):
    """What is returned, or `None` if it is a clear error; its message has to have these names."""
    try:
        return read(*arguments)
    except CLEAR as error:
        message = str(error)
    assert message.strip()
    assert str(names) in message
    return None


# ---------------------------------------------------------------------------------------------------------------------
# What cases are made of
# ---------------------------------------------------------------------------------------------------------------------

ODD_NUMBERS = [0, -1, 1, 2, 3, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5, 0.5, 1e308, float("inf"), float("nan")]
scalars = st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | st.text(max_size=4)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def dictionaries(**values):
    """Dictionaries with some of these keys, whose values are meant or anything."""
    return st.fixed_dictionaries({}, optional={key: value | json_values for key, value in values.items()})


heads = st.lists(st.integers(-1, 4), max_size=3)
layers = st.dictionaries(st.sampled_from(["0", "1", "2", "-1", 0, 1, "x"]), heads | json_values, max_size=3)
patterns = st.sampled_from(["next", "prev", "first", "self", "delim", "period", "mine"])
layouts = st.dictionaries(patterns, heads | json_values, max_size=3)
guidance = dictionaries(
    fraction=st.sampled_from([0.25, 0.5, 1]),
    patterns=st.lists(patterns, max_size=3),
    heads=layouts | st.dictionaries(st.sampled_from(["0", "1", "7", "x"]), layouts, max_size=2),
    reduction=st.sampled_from(["row_mean", "paper", "code"]),
    edge_rows=st.sampled_from(["uniform", "zero"]),
    delimiter_token_ids=st.lists(st.integers(-1, 80), max_size=2),
    period_token_ids=st.lists(st.integers(-1, 80), max_size=2),
)
gates = dictionaries(
    variant=st.sampled_from(["paper", "paper_code"]),
    initial_log_alpha=st.floats() | st.lists(st.floats(), max_size=3),
    evaluation=st.sampled_from(["binary", "fractional"]),
    penalty=st.sampled_from(["sum", "module_mean"]),
    temperature=st.floats(),
    limits=st.lists(st.floats(), max_size=3) | st.just([-0.1, 1.1]),
)
hard_coded = dictionaries(offsets=st.lists(st.integers(), max_size=3), std=st.floats())


def by_site(settings_):
    """Bare, or for each kind of site."""
    named = st.dictionaries(st.sampled_from(["encoder", "decoder", "cross", "x"]), settings_ | json_values, max_size=3)
    return st.none() | settings_ | named | json_values


head_settings = st.fixed_dictionaries(
    {},
    optional={
        "guidance": by_site(guidance),
        "gates": by_site(gates),
        "pruned_heads": by_site(layers),
        "hard_coded": by_site(hard_coded),
    },
)

PAYLOADS = [b"\n", b"\n\n", b"\t", b" ", b"\r", b"\x00", b"\xff", b"\xef\xbb\xbf", "\u2028".encode(), b'"', b"{", b"}",
            b"[", b"]", b",", b":", b"-", b"-1", b"9" * 30, b"1e999", b"NaN", b"null", b"[" * 5000,
            "²".encode(), b"!!bool x"]  # fmt: skip
edits = st.lists(
    st.tuples(
        st.floats(0, 1), st.integers(0, 12), st.sampled_from(PAYLOADS) | st.binary(max_size=4), st.integers(0, 3)
    ),
    max_size=4,
)


def mutated(content):
    """The bytes of a file in which places are cut out, replaced or repeated; or any bytes."""

    def edit(changes):
        changed = content
        for place, length, payload, times in changes:
            start = int(place * len(changed))
            changed = changed[:start] + payload * times + changed[start + length :]
        return changed

    return edits.map(edit) | st.binary(max_size=40)


ODD_CELLS = ["", " ", '"', "\x00", "\ufeff", "\u2028", "nan", "-inf", "1e999", "-1", "2", "9" * 30, "²", "1_0",
             "…"]  # fmt: skip
LONG = "é" * 140_000  # which "…" stands for
SEPARATORS = {"": " ", ".0": "\t", ".align": " ", ".conll": " ", ".conllu": "\t", ".csv": ",", ".tsv": "\t",
              ".txt": " "}  # fmt: skip


def torn(content, separator):
    """The bytes of a file with lines and cells of another one in any order and number, and odd ones among them."""
    lines = content.decode().split("\n")
    cells = sorted({cell for line in lines for cell in line.split(separator)})
    odd = st.lists(st.sampled_from(cells) | st.sampled_from(ODD_CELLS), max_size=6).map(separator.join)
    return st.lists(st.sampled_from(lines) | odd, max_size=5).map(
        lambda some: "\n".join(some).replace("…", LONG).encode()
    )


def revalued(content):
    """The bytes of a file of JSON, a line each: the first object of another one with any values, or anything."""
    known = json.loads(content.partition(b"\n")[0])
    known = known[0] if isinstance(known, list) else known
    objects = dictionaries(**{key: st.just(value) for key, value in known.items()})
    return st.lists(objects | json_values, max_size=3).map(lambda some: "\n".join(map(json.dumps, some)).encode())


# ---------------------------------------------------------------------------------------------------------------------
# Configurations and weights
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@fuzzed
@given(settings_=head_settings)
def test_any_setting_of_heads_gives_a_model_or_a_clear_error(kind, settings_):
    config = result_or_clear_error(lambda: CONFIGS[kind](**sizes(kind), **settings_))
    if config is not None:
        with torch.device("meta"):
            headwise_class(kind, PRETRAINED[kind])(config)
        again = CONFIGS[kind].from_dict(json.loads(config.to_json_string(use_diff=False)))
        assert again.kept_heads() == config.kept_heads()
        assert again.guidance == config.guidance


@pytest.mark.parametrize("kind", KINDS)
@fuzzed
@given(data=st.data())
def test_any_size_is_within_limits_or_a_clear_error(kind, data):
    names = sorted({*sizes(kind), "type_vocab_size", "num_labels"} & SIZE_LIMITS.keys())
    changes = data.draw(st.dictionaries(st.sampled_from(names), scalars, min_size=1, max_size=2))
    config = result_or_clear_error(lambda: CONFIGS[kind](**{**sizes(kind), **changes}))
    if config is not None:
        for name in (name for name, value in changes.items() if value is not None):
            least, most = SIZE_LIMITS[name]
            assert least <= getattr(config, name) <= most


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folders of small models, by kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        tiny_model(kind, gates=None).save_pretrained(folder)
    return folders


def copied(folder, to, *names):
    """A folder with links to the files of another one, but for these."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name not in names and not (to / file.name).exists():
            (to / file.name).symlink_to(file)
    return to


@pytest.mark.parametrize("config_class", [*CONFIGS.values(), *OTHER_CONFIGS])
@fuzzed
@given(data=st.data())
def test_any_configuration_file_is_read_or_a_clear_error(config_class, tmp_path, data):
    content = config_class().to_json_string(use_diff=False)
    changed = mutated(content.encode()) | revalued(json.dumps(json.loads(content)).encode())
    (tmp_path / "config.json").write_bytes(data.draw(changed))
    result_or_clear_error(config_class.from_pretrained, tmp_path)


@pytest.mark.parametrize("config_class", [*CONFIGS.values(), *OTHER_CONFIGS])
@pytest.mark.parametrize("names", [[], ["a", "b"], "ab"])
def test_names_of_classes_that_are_no_dictionary_are_refused(config_class, names):
    with pytest.raises(ValueError, match="id2label must be a dictionary from class ids to names"):
        config_class(id2label=names)
    with pytest.raises(ValueError, match="dtype must be the name of a dtype"):
        config_class(dtype=list(names))


@pytest.mark.parametrize("load", ["headwise", "load_pruned"])
@fuzzed
@given(data=st.data())
def test_any_weights_are_those_of_the_model_or_a_clear_error(load, checkpoint, tmp_path, data):
    folder = copied(checkpoint["roberta"], tmp_path / "model", "model.safetensors")
    content = (checkpoint["roberta"] / "model.safetensors").read_bytes()
    # Part of the header; numbers may be anything.
    changed = data.draw(mutated(content[:1500])) + content[1500:]
    (folder / "model.safetensors").write_bytes(changed)
    read = load_pruned if load == "load_pruned" else headwise_class("roberta", "ForMaskedLM").from_pretrained
    model = result_or_clear_error(read, folder)
    if model is not None:
        assert not any(parameter.is_meta for parameter in model.parameters())


HUGE = {"vocab_size": 2**24, "hidden_size": 2**12, "num_attention_heads": 4, "intermediate_size": 2**14}


@pytest.mark.parametrize("load", ["headwise", "load_pruned"])
def test_a_configuration_for_much_more_than_the_weights_hold_takes_no_memory(load, tmp_path):
    stock = BertConfig(hidden_size=16, num_attention_heads=4, intermediate_size=16, num_hidden_layers=1, vocab_size=30)
    BertModel(stock).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **HUGE}))
    read = load_pruned if load == "load_pruned" else headwise_model
    with pytest.raises(
        ValueError, match=r"needs 6.,...,...,... elements that are missing from the weights, which have"
    ):
        read(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("num_hidden_layers", 10**9), ("num_labels", 10**9), ("vocab_size", 0)])
def test_sizes_of_stock_checkpoints_are_limited_too(name, value, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**BertConfig(num_hidden_layers=1).to_dict(), "architectures": ["BertModel"], name: value})
    )
    with pytest.raises(ValueError, match=f"{name} must be an integer from . to .*, got {value}"):
        load_pruned(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": [3]}, "names no architectures"),
        ({"architectures": "BertModel"}, "names no architectures"),
        ({"architectures": ["pipeline"]}, "architecture 'pipeline', which transformers .* does not have"),
        (
            {"architectures": ["HeadwiseBertModel"], "model_type": []},
            "'HeadwiseBertModel', which transformers .* does not have",
        ),
    ],
)
def test_architectures_that_are_none_are_refused(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BertConfig().to_dict(), **changes}))
    with pytest.raises(ValueError, match=message):
        load_pruned(tmp_path)


class _Marker:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("load", ["headwise", "load_pruned"])
def test_pickled_weights_run_no_code(load, checkpoint, tmp_path):
    folder = copied(checkpoint["roberta"], tmp_path / "model", "model.safetensors")
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump({"lm_head.bias": _Marker(tmp_path / "ran")}, file)
    read = load_pruned if load == "load_pruned" else headwise_class("roberta", "ForMaskedLM").from_pretrained
    with pytest.raises((*CLEAR, pickle.UnpicklingError)):
        read(folder)
    assert not (tmp_path / "ran").exists()


def test_models_are_saved_without_pickles(checkpoint):
    kinds = {file.suffix for folder in checkpoint.values() for file in folder.iterdir()}
    assert kinds == {".json", ".safetensors", ".py"}


FORBIDDEN = {
    "eval", "exec", "pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "os.system", "torch.load",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip


def test_no_code_of_this_project_runs_what_it_reads():
    for folder in ("hf_attn_dynamics", "recipes"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    used = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                elif isinstance(node, ast.Call):
                    used = {ast.unparse(node.func)}
                    flags = {word.arg for word in node.keywords if ast.unparse(word.value) == "True"}
                    assert not flags & {"trust_remote_code", "allow_pickle", "shell"}, f"{file}, line {node.lineno}"
                else:
                    continue
                assert not used & FORBIDDEN, f"{file}, line {node.lineno}"


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def parquet(**columns):
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def texts(path):
    return list(load_texts([str(path)], None, streaming=True))


JSON_LINES = b'{"text": "a cat", "label": "x"}\n{"text": "a dog", "label": "y"}\n'
CONLLU = b"# sent_id = a\n1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No\n1\tdo\tdo\tAUX\t_\t_\t0\troot\t_\t_\n" \
         b"2\tn't\tnot\tPART\t_\t_\t1\tadvmod\t_\t_\n2.1\te\t_\t_\t_\t_\t_\t_\t_\t_\n\n"  # fmt: skip
WINOGENDER = b"occupation(0)\tother-participant(1)\tanswer\tsentence\n" \
             b"nurse\tman\t0\tThe $OCCUPATION told the $PARTICIPANT that $NOM_PRONOUN was late.\n"  # fmt: skip
CONLL2012 = b"#begin document (a); part 000\na 0 0 The DT * - - - - * (1\na 0 1 king NN * - - - - * 1)\n" \
            b"a 0 2 saw VBD * - - - - * -\na 0 3 himself PRP * - - - - * (1)\n\n#end document\n"  # fmt: skip
GLOVE = b"2 3\nthe 0.1 0.2 0.3\nfilm -1 2e-3 0\n"
GLUE_PAIRS = b"index\tsentence1\tsentence2\tlabel\n0\ta cat\tcats\tentailment\n1\ta\tb\tnot_entailment\n"
ODD_ARRAYS = [
    np.array(["the", "film"]), np.array(["the"]), np.array([["the"]]), np.array("the"), np.array([b"the", b"film"]),
    np.array([], "U1"), np.array(["the", None], object), np.ones((2, 3), "f2"), np.ones((2, 3), "i8"), np.ones((2, 0)),
    np.ones((1, 2)), np.full((2, 1), np.nan), np.full((2, 1), 1e300), np.ones((2, 1), complex), np.full((2, 1), True),
    np.array([["1"], ["x"]]), np.zeros((2, 1), "M8[s]"), np.zeros((2, 1), [("the", "f4")]), np.zeros(2),
]  # fmt: skip
ALIGNED_WORDS = {
    "source_words": [None, "ein"],
    "target_words": ["a"],
    "skipped_pairs": 0,
    "prior": {"tension": 4.0, "null_probability": 0.08, "fit_tension": True},
    "tension": 5.0,
}
ALIGNED_COUNTS = {"counts": [1.0, 2.0], "columns": [0, 0], "rows": [0, 1, 2], "log_likelihoods": [-1.0]}
SWEEP = Sweep(recipe="a.py", figures={"loss": "loss"}, seeds=[1])


def word_vectors(path):
    return load_word_vectors(path, ["the", "film"])


def npz(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def alignments(words, counts):
    """The bytes of an `IbmModel1`."""
    arrays = {name: np.array(values) for name, values in counts.items()}
    return safetensors.numpy.save(arrays, {"ibm_model_1": json.dumps(words)})


MODEL = {
    "config.json": b"{}",
    "model.safetensors": safetensors.numpy.save({"a": np.ones(2, "f4")}),
    "README.md": b"---\nlicense: mit\ntags: [a]\n---\n# A model\n",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model.safetensors"}}',
    "trainer_state.json": b"{}",
}


def folder_of(path, files):
    """The folder of a file, with these beside it."""
    for name in files.keys() - {path.name}:
        (path.parent / name).write_bytes(files[name])
    return path.parent


def newest_of(path):
    return newest_checkpoint(folder_of(path, MODEL).parent)


def resumed_sweep(path):
    """A sweep whose only run is finished."""
    summary = path.parent / "runs" / "seed-1" / "summary.json"
    summary.parent.mkdir(parents=True, exist_ok=True)
    summary.write_bytes(b"{}")
    return run_sweep(SWEEP, Path(__file__), path.parent, resume=True)


# What is read, the name of a file, and what it holds.
READERS = {
    "texts txt": (texts, "a.txt", b"a cat\n\na dog\n"),
    "texts txt.gz": (texts, "a.txt.gz", gzip.compress(b"a cat\na dog\n", mtime=0)),
    "texts jsonl": (texts, "a.jsonl", JSON_LINES),
    "texts json": (texts, "a.json", b'[{"text": "a cat"}, {"text": "a dog"}]'),
    "texts csv": (texts, "a.csv", b'text,label\n"a, cat",x\na dog,y\n'),
    "texts tsv": (texts, "a.tsv", b"text\tlabel\na cat\tx\na dog\ty\n"),
    "texts parquet": (texts, "a.parquet", parquet(text=["a cat", "a dog"])),
    "classes tsv": (load_classification, "a.tsv", b"sentence\tlabel\na cat\tx\na dog\ty\n"),
    "classes csv": (load_classification, "a.csv", b'sentence1,sentence2,label\n"a, cat",b,0\na dog,c,1\n'),
    "classes jsonl": (load_classification, "a.jsonl", JSON_LINES),
    "classes parquet": (load_classification, "a.parquet", parquet(text=["a", "b"], label=[0, 1])),
    "words conll": (load_token_classification, "a.conll", b"-DOCSTART- O\n\nAnna B-PER\nsings O\n\nRome B-LOC\n"),
    "words jsonl": (load_token_classification, "a.jsonl", b'{"tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]}\n'),
    "documents": (lambda path: load_documents([str(path)], None), "a.txt", b"A cat. Cats.\n\nA dog.\n"),
    "classes of files": (lambda path: load_class_files({"a": path, "b": path.parent}), "a.txt", b"a cat\na dog\n"),
    "GLUE tsv": (lambda path: load_glue("rte", folder=path.parent), "train.tsv", GLUE_PAIRS),
    "GLUE without header": (lambda path: load_glue("cola", folder=path.parent), "train.tsv",
                            b"gj04\t1\t\tA cat.\nbc01\t0\t*\tCat a.\n"),
    "GLUE test": (lambda path: load_glue("sst2", "test", path.parent), "test.tsv", b"index\tsentence\n0\ta cat\n"),
    "GLUE jsonl": (lambda path: load_glue("stsb", folder=path.parent), "train.jsonl",
                   b'{"sentence1": "a cat", "sentence2": "cats", "label": 2.5}\n'),
    "word vectors": (word_vectors, "a.txt", GLOVE),
    "word vectors gz": (word_vectors, "a.txt.gz", gzip.compress(GLOVE, mtime=0)),
    "word vectors npz": (word_vectors, "a.npz", npz({"words": ODD_ARRAYS[0], "vectors": np.ones((2, 3), "f2")})),
    "lines of pairs": (lambda path: load_parallel(path, folder_of(path, {"b.txt": b"a house\n"}) / "b.txt"), "a.txt",
                       b"ein Haus\n"),
    "pairs": (load_parallel, "a.tsv", b"source\ttarget\nein Haus\ta house\n"),
    "trees": (load_conllu, "a.conllu", CONLLU),
    "open_sesame": (lambda path: load_coreference("open_sesame", path), "refl.0",
                    b"the king by the men hurt himself\t6\t0 1\t3 4\n"),
    "winobias": (lambda path: load_coreference("winobias", path), "a.txt",
                 b"1 [The nurse] called the man because [she] was late.\n"),
    "winogender": (lambda path: load_coreference("winogender", path), "templates.tsv", WINOGENDER),
    "conll2012": (lambda path: load_coreference("conll2012", path), "a_conll", CONLL2012),
    "alignments": (read_pharaoh, "a.align", b"0-0 1?2\n\n3-1\n"),
    "alignment model": (IbmModel1.load, "a.safetensors", alignments(ALIGNED_WORDS, ALIGNED_COUNTS)),
    "head scores": (HeadScores.load, "a.json", b'{"encoder": [[0.5, null], [1.0, 0.25]]}'),
    "timeline": (HeadTimeline.load, "a.csv",
                 b"step,statistic,site,layer,head,value\n0,loss,,,,2.5\n0,entropy,encoder,0,0,0.5\n"),
    "gate history": (GateHistory.load, "a.json",
                     b'{"steps": [0], "log_alpha": {"encoder": [[[2.5]]]}, "open_heads": {"encoder": [1.0]}, '
                     b'"settled_heads": {"encoder": [1]}}'),
    "sweep": (Sweep.load, "a.yaml",
              b"recipe: a.py\nfigures: {loss: loss}\nseeds: [1, 2]\ngrid: {rate: [1, 2]}\nvariants: {b: {c: 1}}\n"),
    "summary": (lambda path: read_summaries([path.parent], ("seed",)), "summary.json", b'{"seed": 3, "loss": 0.5}'),
    "summary of a sweep": (lambda path: collect(SWEEP, path.parents[2]), "runs/seed-1/summary.json", b'{"loss": 0.5}'),
    "stopped sweep": (resumed_sweep, "sweep.yaml", b"recipe: a.py\nfigures: {loss: loss}\nseeds: [1]\n"),
    "record of a run": (lambda path: run_or_read("a", path.parents[2], None), "checkpoints/a/run.json", b'{"a": 1}'),
    **{f"checkpoint, {name}": (newest_of, f"checkpoint-1/{name}", MODEL[name]) for name in MODEL},
    **{f"model, {name}": (lambda path: model_files(folder_of(path, MODEL)), name, MODEL[name]) for name in MODEL},
    "run": (lambda path: check_output_dir(path.parent, {"seed": 3}, True), "config.yaml", b"seed: 3\n"),
}  # fmt: skip
numbers = st.lists(st.sampled_from([-1, 0, 1, 2, 2**40, 0.5, float("nan")]), max_size=3)
FITTING = {
    "word vectors npz": st.dictionaries(st.sampled_from(["words", "vectors"]), st.sampled_from(ODD_ARRAYS)).map(npz),
    "alignment model": st.builds(
        alignments,
        dictionaries(**{name: st.just(value) for name, value in ALIGNED_WORDS.items()}) | json_values,
        st.fixed_dictionaries({name: st.just(value) | numbers for name, value in ALIGNED_COUNTS.items()}),
    ),
}


def fitting(name):
    """Bytes of files of the same format that hold something else than is meant."""
    _, file, content = READERS[name]
    suffix = Path(file).suffix
    if suffix in SEPARATORS:
        return torn(content, SEPARATORS[suffix])
    return revalued(content) if suffix in (".json", ".jsonl") else FITTING.get(name, st.nothing())


@pytest.mark.parametrize("name", READERS)
def test_readers_read_what_cases_are_made_from(name, tmp_path):
    read, file, content = READERS[name]
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    read(path)


@pytest.mark.parametrize("name", READERS)
@fuzzed
@given(data=st.data())
def test_any_file_is_read_or_a_clear_error_that_names_it(name, tmp_path, data):
    read, file, content = READERS[name]
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.draw(mutated(content) | fitting(name)))
    result_or_clear_error(read, path, names=tmp_path)


@fuzzed
@given(content=mutated(b"resume: true\ndevice: cpu\ncpu_threads: 2\nlicense: mit\n"))
def test_any_configuration_of_a_recipe_is_read_or_refused(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        try:
            parse_yaml_or_flags(PublishArguments, argv=[str(path)])
        except SystemExit as stop:
            status = stop.code
        else:
            status = 0
    assert status in (0, 2)


# ---------------------------------------------------------------------------------------------------------------------
# What is written
# ---------------------------------------------------------------------------------------------------------------------


@fuzzed
@given(variants=st.lists(st.text(min_size=1, max_size=12) | st.just("../../x"), min_size=1, max_size=3, unique=True))
def test_runs_of_a_sweep_stay_in_its_folder(variants):
    named = {"recipe": "a.py", "figures": {"loss": "loss"}, "seeds": [1], "grid": {"../rate": ["../1", "/"]}}
    sweep = result_or_clear_error(lambda: Sweep(**named, variants={name: {} for name in variants}))
    for run in [] if sweep is None else sweep.runs():
        assert Path(run.name).name == run.name not in ("", ".", "..")


@fuzzed
@given(
    name=st.text(min_size=1, max_size=20),
    text=st.text(max_size=20) | st.sampled_from(["---\n", "{{ 7 * 7 }}", "{% raw %}", "a: [", "</script>"]),
    value=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_words_in_a_card_leave_its_metadata_whole(checkpoint, tmp_path_factory, name, text, value):
    folder = copied(checkpoint["roberta"], tmp_path_factory.getbasetemp() / "carded")
    card = result_or_clear_error(
        lambda: write_card(
            folder,
            tiny_config("roberta", guidance=None),
            name=name,
            description=text,
            figures={text: value},
            metric=Metric("loss", text, value),
            dataset=text,
        )
    )
    if card is not None:
        assert card.data.model_name == " ".join(name.split())
        assert card.data.eval_results[0].metric_value == round(value, 4)
        assert card.data.eval_results[0].dataset_name == " ".join(text.split())
        assert card.text.lstrip().startswith("# ")
