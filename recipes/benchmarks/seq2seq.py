# Licensed under the Apache License, Version 2.0.
"""How fast the LSTM with attention is trained and translates, beside OpenNMT-py's and joeynmt's.

    python recipes/benchmarks/seq2seq.py --source_file train.de.gz --target_file train.en.gz
    python recipes/benchmarks/seq2seq.py --opennmt_python ~/opennmt/bin/python --joeynmt_python ~/joeynmt/bin/python

Without files, the sentences are the embedded number words. All systems read the same pieces of one SentencePiece
model, shared by both sides, and have one table of embeddings for both, two layers, states of 256, dropout, one head of
bilinear attention and no input feeding. Encoders read both ways; their states are concatenated, so that each direction
has half of the units, but joeynmt's has all in each.

Jobs, all in float32 on the CPU:
    train_N   target tokens a second in training with batches of N pairs: the loop of the system's own trainer, with
              clipped gradients and Adam, after the first steps. Targets are counted with `</s>`, without padding.
    greedy    sentences a second of a greedy search by a loaded model, from pieces to pieces
    beam_5    the same of a beam search
Translations all have `--translated_tokens` tokens, whatever the model would say, so that all systems do the same work
and none needs to be trained first. joeynmt knows no such limit and is only trained.

Systems take turns, each in a process of its own with `--cpu_threads`. The peers are no dependencies:
`--opennmt_python` and `--joeynmt_python` name interpreters that have them, by default this one. A system that cannot
be imported is left out, with the reason. Rates are medians over rounds; ratios are medians of the ratio within a
round.

Keys of `summary.json`: for each job J and system X `rate_J_X` (a second of wall time) and `cpu_rate_J_X` (a second of
CPU time of all threads); for each peer `package_to_X_J` (ratio of CPU rates) and `package_to_X_J_wall`;
`parameters_X`; and the settings.
"""

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarking import BenchmarkArguments, run_python, write_summary

from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.data import embedded_translation, load_parallel, train_marian_tokenizer
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.run import run_recipe


# Each gets a folder of texts and the settings of a job, and prints what it did: how much, and wall and CPU seconds.
PREAMBLE = """
import json, os, sys, time, types
# OpenNMT-py's checkpoints hold more than tensors; the benchmark has just written them.
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
folder, job = sys.argv[1], types.SimpleNamespace(**json.loads(sys.argv[2]))
ticks = []
def now():
    return time.perf_counter(), time.process_time()
def report(amount, start, end, model):
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps([amount, end[0] - start[0], end[1] - start[1], parameters]), flush=True)
    os._exit(0)
def tick(tokens, model):
    # Called where a training step begins; the first steps warm up.
    ticks.append((tokens, now()))
    if len(ticks) > job.warmup + job.steps:
        measured = ticks[job.warmup:-1]
        report(sum(tokens for tokens, _ in measured), measured[0][1], ticks[-1][1], model)
"""
SYSTEMS = {
    "package": {
        "train": """
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq
from hf_attn_dynamics import HeadwiseSeq2SeqTrainingArguments
from hf_attn_dynamics import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
from hf_attn_dynamics.training import SimilarLengthSeq2SeqTrainer
class Timed(SimilarLengthSeq2SeqTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
        tick(int((inputs["labels"] != -100).sum()), model)
        return super().training_step(model, inputs, *args, **kwargs)
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
with open(folder + "/train.json") as file:
    pairs = Dataset.from_dict(json.load(file))
model = LstmSeq2SeqForConditionalGeneration(LstmSeq2SeqConfig(**job.model))
arguments = HeadwiseSeq2SeqTrainingArguments(
    folder, max_steps=10**6, per_device_train_batch_size=job.batch_size, train_sampling_strategy="group_by_length",
    learning_rate=1e-3, use_cpu=True, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
)
Timed(model, arguments, DataCollatorForSeq2Seq(tokenizer, model=model), train_dataset=pairs).train()
""",
        "translate": """
import torch
from transformers import AutoTokenizer
from hf_attn_dynamics import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
with open(folder + "/test.json") as file:
    sources = json.load(file)["input_ids"]
model = LstmSeq2SeqForConditionalGeneration(LstmSeq2SeqConfig(**job.model)).eval()
def translate(sources):
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
    translations = [None] * len(sources)
    for start in range(0, len(order), job.batch_size):
        chosen = order[start : start + job.batch_size]
        batch = tokenizer.pad({"input_ids": [sources[index] for index in chosen]}, return_tensors="pt")
        # Without a token that ends a sentence, it goes on to its largest length.
        tokens = model.generate(**batch, num_beams=job.beams, max_new_tokens=job.length, eos_token_id=None)
        for index, line in zip(chosen, tokens.tolist()):
            translations[index] = tokenizer.convert_ids_to_tokens(line)[1:]
    return translations
translate(sources[: job.batch_size])
start = now()
translations = translate(sources)
end = now()
assert {len(line) for line in translations} == {job.length}
report(len(sources), start, end, model)
""",
    },
    "opennmt": {
        "train": """
import yaml
from onmt.bin.train import _get_parser, train
from onmt.trainer import Trainer
take_step = Trainer._gradient_accumulation
def timed(self, batches, *args):
    padding = self.train_loss.padding_idx
    tick(sum(int((batch["tgt"][:, 1:, 0] != padding).sum()) for batch in batches), self.model)
    return take_step(self, batches, *args)
if not job.save:
    Trainer._gradient_accumulation = timed
config = {
    "save_model": folder + "/opennmt", "src_vocab": folder + "/pieces.txt", "tgt_vocab": folder + "/pieces.txt",
    "share_vocab": True, "share_embeddings": True, "skip_empty_level": "silent",
    "data": {"corpus": {"path_src": folder + "/train.source", "path_tgt": folder + "/train.target"}},
    "encoder_type": "brnn", "decoder_type": "rnn", "rnn_type": "LSTM", "input_feed": 0,
    "global_attention": "general", "layers": job.model["num_hidden_layers"],
    "hidden_size": job.model["hidden_size"], "word_vec_size": job.model["embedding_size"],
    "dropout": [job.model["dropout"]], "optim": "adam", "learning_rate": 1e-3, "max_grad_norm": 1,
    "batch_type": "sents", "batch_size": job.batch_size, "bucket_size": job.pairs, "num_workers": 0,
    "world_size": 1, "gpu_ranks": [], "train_steps": 1 if job.save else 10**6, "valid_steps": 10**6,
    "save_checkpoint_steps": 10**6, "report_every": 10**6,
}
with open(folder + "/opennmt.yaml", "w") as file:
    yaml.safe_dump(config, file)
train(_get_parser().parse_known_args(["--config", folder + "/opennmt.yaml"])[0])
""",
        "translate": """
from onmt.bin.translate import _get_parser
from onmt.inference_engine import InferenceEnginePY
from onmt.utils.parse import ArgumentParser
opt = _get_parser().parse_args([
    "--model", folder + "/opennmt_step_1.pt", "--src", folder + "/test.source", "--output", os.devnull,
    "--beam_size", str(job.beams), "--min_length", str(job.length), "--max_length", str(job.length),
    "--batch_size", str(job.batch_size), "--batch_type", "sents", "--gpu", "-1",
])
ArgumentParser.validate_translate_opts(opt)
ArgumentParser._get_all_transform_translate(opt)
ArgumentParser._validate_transforms_opts(opt)
ArgumentParser.validate_translate_opts_dynamic(opt)
engine = InferenceEnginePY(opt)
with open(folder + "/test.source") as file:
    lines = file.read().splitlines()
engine.infer_list(lines[: job.batch_size])
start = now()
_, translations = engine.infer_list(lines)
end = now()
assert len(translations) == len(lines)
assert {len(best[0].split()) for best in translations} == {job.length}, translations[:2]
report(len(lines), start, end, engine.translator.model)
""",
    },
    "joeynmt": {
        "train": """
from joeynmt.training import TrainManager, train
os.makedirs(folder + "/joeynmt", exist_ok=True)
take_step = TrainManager._train_step
def timed(self, batch):
    tick(int(batch.ntokens), self.model)
    return take_step(self, batch)
TrainManager._train_step = timed
recurrent = {
    "type": "recurrent", "rnn_type": "lstm", "embeddings": {"embedding_dim": job.model["embedding_size"]},
    "hidden_size": job.model["hidden_size"], "num_layers": job.model["num_hidden_layers"],
    "dropout": job.model["dropout"],
}
side = {"level": "word", "voc_file": folder + "/pieces.txt"}
testing = {"beam_size": 1, "batch_size": job.batch_size}
train(0, 1, {
    "name": "benchmark", "model_dir": folder + "/joeynmt", "use_cuda": False,
    "data": {"train": folder + "/train", "dev": folder + "/test", "src": {"lang": "source", **side},
             "trg": {"lang": "target", **side}},
    "testing": testing,
    "training": {
        "optimizer": "adam", "learning_rate": 1e-3, "clip_grad_norm": 1.0, "batch_size": job.batch_size,
        "batch_type": "sentence", "normalization": "tokens", "scheduling": "exponential", "epochs": 10**6,
        "validation_freq": 10**6, "logging_freq": 10**6,
    },
    "model": {
        "tied_embeddings": True,
        "encoder": {**recurrent, "bidirectional": job.model["bidirectional"]},
        "decoder": {**recurrent, "attention": "luong", "init_hidden": "bridge", "input_feeding": False},
    },
}, skip_test=True)
""",
    },
}
PEERS = {"opennmt": "OpenNMT-py", "joeynmt": "joeynmt"}
BEAMS = {"greedy": 1, "beam_5": 5}


@dataclass
class Seq2SeqArguments(BenchmarkArguments):
    """Text, model, and how much is measured."""

    source_file: str | None = flag(None, "Text file with one sentence per line, optionally gzipped.")
    target_file: str | None = flag(None, "Translations of source_file, line by line.")
    vocab_size: int = flag(8000, "Size of the SentencePiece vocabulary; 250 for the embedded text, if not given.")
    hidden_size: int = flag(256, "Size of states and embeddings.")
    num_hidden_layers: int = flag(2, "Number of layers of encoder and decoder.")
    dropout: float = flag(0.5, "Dropout of the hidden states.")
    batch_sizes: list[int] = flag([16, 64], "Batch sizes of training, in pairs.")
    steps: int = flag(25, "Number of training steps that are measured.")
    warmup: int = flag(5, "Number of training steps before.")
    sentences: int = flag(200, "Number of sentences that are translated: the last of the text.")
    translated_tokens: int = flag(16, "Number of tokens of each translation.")
    translation_batch_size: int = flag(64, "Batch size of translation, in sentences.")
    rounds: int = flag(3, "Number of measured turns of each system.")
    opennmt_python: str | None = flag(None, "Python interpreter that has OpenNMT-py; this one by default.")
    joeynmt_python: str | None = flag(None, "Python interpreter that has joeynmt; this one by default.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "steps", "sentences", "translated_tokens", "translation_batch_size")
        self.check_at_least(0, "warmup")
        check_names("batch_sizes", self.batch_sizes)
        if (self.source_file is None) != (self.target_file is None):
            raise ValueError("give source_file and target_file, or neither.")
        if self.source_file is None and self.vocab_size == type(self).vocab_size:
            self.vocab_size = 250


def write_texts(args: Seq2SeqArguments, folder: Path) -> dict:
    """Pieces and ids of all sentences, as the systems read them; returns settings of all jobs."""
    files = args.source_file, args.target_file
    texts = load_parallel(*files) if args.source_file else embedded_translation(seed=args.seed)[0]
    if len(texts) <= args.sentences:
        raise ValueError(f"sentences is {args.sentences}, but the text has {len(texts)} in all; lower it.")
    sides = {side: [line.strip() for line in texts[side]] for side in ("source", "target")}
    tokenizer = train_marian_tokenizer(*sides.values(), args.vocab_size, folder / "tokenizer")
    ids = tokenizer(sides["source"], text_target=sides["target"])
    # An empty sentence would be left out by some systems.
    pairs = [pair for pair in zip(ids["input_ids"], ids["labels"]) if min(map(len, pair)) > 1]
    for name, chosen in (("train", pairs[: -args.sentences]), ("test", pairs[-args.sentences :])):
        sources, targets = zip(*chosen)
        (folder / f"{name}.json").write_text(json.dumps({"input_ids": sources, "labels": targets}))
        for side, lines in (("source", sources), ("target", targets)):
            pieces = (" ".join(tokenizer.convert_ids_to_tokens(line[:-1])) for line in lines)  # without </s>
            (folder / f"{name}.{side}").write_text("".join(f"{line}\n" for line in pieces), encoding="utf-8")
    special = set(tokenizer.all_special_ids)
    words = [tokenizer.convert_ids_to_tokens(index) for index in range(len(tokenizer)) if index not in special]
    (folder / "pieces.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    model = {
        "vocab_size": len(tokenizer),
        "embedding_size": args.hidden_size,
        "hidden_size": args.hidden_size,
        "readout_size": args.hidden_size,
        "num_hidden_layers": args.num_hidden_layers,
        "bidirectional": True,
        "directions": "concatenated",
        "dropout": args.dropout,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }
    return {"model": model, "pairs": len(pairs), "steps": args.steps, "warmup": args.warmup, "save": False}


def run_system(name: str, task: str, settings: dict, args: Seq2SeqArguments, folder: Path) -> list[float] | None:
    """Amount of work, wall and CPU seconds and parameters of a job of one system; None if it only saves a model."""
    interpreter = {"opennmt": args.opennmt_python, "joeynmt": args.joeynmt_python}.get(name)
    words = str(folder), json.dumps(settings)
    code = PREAMBLE + SYSTEMS[name][task]
    printed = run_python(interpreter, code, *words, threads=args.cpu_threads)
    return None if settings["save"] else json.loads(printed)


def main(args: Seq2SeqArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    jobs = {f"train_{size}": ("train", {"batch_size": size}) for size in args.batch_sizes}
    search = {"batch_size": args.translation_batch_size, "length": args.translated_tokens}
    jobs |= {name: ("translate", {**search, "beams": beams}) for name, beams in BEAMS.items()}
    turns: dict[str, dict[str, list]] = {job: {name: [] for name in SYSTEMS} for job in jobs}
    systems = list(SYSTEMS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with refuse_bad_input():
            common = write_texts(args, folder)
        try:
            run_system("opennmt", "train", {**common, "batch_size": 4, "save": True}, args, folder)
        except (RuntimeError, OSError) as error:
            print(f"{PEERS['opennmt']} is left out: {error}")
            systems.remove("opennmt")
        for _ in range(args.rounds):
            for job, (task, settings) in jobs.items():
                for name in [name for name in systems if task in SYSTEMS[name]]:
                    try:
                        turns[job][name].append(run_system(name, task, {**common, **settings}, args, folder))
                    except (RuntimeError, OSError) as error:
                        if name not in PEERS:
                            raise
                        print(f"{PEERS[name]} is left out: {error}")
                        systems.remove(name)
    return write_summary(args, {**summarise(turns, systems), "pairs": common["pairs"]})


def summarise(turns: dict[str, dict[str, list]], systems: list[str]) -> dict:
    """Rates of all jobs and their ratios, which are also printed."""
    summary: dict = {}
    rows = []
    for job, of_systems in turns.items():
        rates = {
            name: [(amount / wall, amount / cpu) for amount, wall, cpu, _ in taken]
            for name, taken in of_systems.items()
            if taken and name in systems
        }
        for name, taken in rates.items():
            wall, cpu = (statistics.median(column) for column in zip(*taken))
            ratios = [
                statistics.median(ours[column] / theirs[column] for ours, theirs in zip(rates["package"], taken))
                for column in (0, 1)
            ]
            summary |= {f"rate_{job}_{name}": wall, f"cpu_rate_{job}_{name}": cpu}
            summary[f"parameters_{name}"] = of_systems[name][-1][-1]
            if name in PEERS:
                summary |= {f"package_to_{name}_{job}": ratios[1], f"package_to_{name}_{job}_wall": ratios[0]}
            rows.append([job, name, wall, cpu, *ratios, of_systems[name][-1][-1]])
    header = ["job", "system", "per second", "per CPU second", "package / it", "… of CPU rates", "parameters"]
    print(format_table(header, rows))
    return summary


if __name__ == "__main__":
    run_recipe(main)
