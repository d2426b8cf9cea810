# Licensed under the Apache License, Version 2.0.
"""Typical uses of the public names, which mypy checks and nothing runs.

`assert_type` fixes what editors show. A line with `# type: ignore[…]` must be an error (`warn_unused_ignores`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.utils.data import Dataset
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import assert_type

import hf_attn_dynamics
from hf_attn_dynamics import (
    CostTable,
    HeadConfidence,
    HeadDynamicsCallback,
    HeadReading,
    HeadReport,
    HeadScores,
    HeadTimeline,
    HeadwiseBertForMaskedLM,
    HeadwiseSeq2SeqTrainer,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    LstmConfig,
    LstmForSequenceClassification,
    MaskedLanguageModelCollator,
    Observer,
    PatternRows,
    RelativePositions,
    Selection,
    SyntacticRoles,
    UnitScores,
    attention_maps,
    compensate,
    count_flops_table,
    expected_open_heads,
    fisher_pruning,
    global_contribution,
    head_importance,
    head_outputs,
    head_relevance,
    head_report,
    headwise_architectures,
    headwise_model,
    load_pruned,
    local_contribution,
    masked_heads,
    mean_unit_outputs,
    measure_latency_table,
    observe,
    pattern_names,
    plot_head_dynamics,
    prune_heads,
    read_heads,
    refit_outputs,
    register_pattern,
    retain_heads,
    select_parts,
    token_set,
    unit_importance,
)
from hf_attn_dynamics.analysis import RoleScores, agreement, plots
from hf_attn_dynamics.analysis.lexical import IbmModel1
from hf_attn_dynamics.analysis.observers.base import AttentionCall
from hf_attn_dynamics.data import (
    Tree,
    align_sparse_targets,
    align_targets,
    cluster_targets,
    load_conllu,
    pair_targets,
    pharaoh_targets,
    tree_targets,
)
from hf_attn_dynamics.hub import push_model
from hf_attn_dynamics.models import HeadRoles
from hf_attn_dynamics.models.head_sites import HeadSite
from hf_attn_dynamics.training import GateHistory, GuidanceCollator, Teacher, attention_distillation_loss


def read(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: dict[str, torch.Tensor]) -> None:
    trees = load_conllu("en_ewt-ud-dev.conllu")
    assert_type(trees, list[Tree])
    reading = read_heads(model, trees, tokenizer=tokenizer)
    assert_type(reading, HeadReading)
    reading.save_page("report.html")
    reading.save("reading.json")
    assert_type(HeadReading.load("reading.json"), HeadReading)
    roles = SyntacticRoles(trees, tokenizer)
    with torch.no_grad(), observe(model, HeadConfidence(), RelativePositions(), roles, tokenizer=tokenizer) as seen:
        model(**batch)
    seen.confidence["encoder"]
    maps = attention_maps(model, batch)
    assert_type(maps["encoder"], torch.Tensor)
    assert_type(reading.plot(), Figure)
    for function, heads in reading.functions().items():
        print(function, "not measured" if heads is None else len(heads))


def attribute(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    assert_type(local_contribution(model, batch), torch.Tensor)
    assert_type(global_contribution(model, batch), torch.Tensor)
    _, error = global_contribution(model, batch, "probes", return_standard_error=True)
    assert_type(error, torch.Tensor)
    relevance = head_relevance(model, [batch], rule="alpha_beta")
    assert_type(relevance, HeadScores)
    with masked_heads(model, {0: [1, 2]}):
        head_outputs(model, batch)["encoder"]
    local_contribution(model)  # type: ignore[call-arg]


def prune(batches: list[dict[str, torch.Tensor]]) -> None:
    model = AutoModel.from_pretrained("bert-base-uncased")
    importance = head_importance(model, batches)
    assert_type(importance, HeadScores)
    retain_heads(model, 36, importance)
    prune_heads(model, {0: [1, 5, 7], 5: range(12)}).save_pretrained("pruned")
    prune_heads(model, importance.ranked()[-6:])
    prune_heads(model, {"encoder": {0: [1]}, "cross": {1: [0]}})
    assert_type(head_report(load_pruned("pruned"), latency=False), HeadReport)
    table = measure_latency_table(model, batch=8, length=128, cache_dir=False)
    assert_type(table, CostTable)
    assert_type(table.speedup_of(load_pruned("pruned")), float)
    assert_type(count_flops_table(model).largest_speedup(), dict[str, float])
    prune_heads(model, 3)  # type: ignore[arg-type]


def prune_for_speed(batches: list[dict[str, torch.Tensor]]) -> None:
    dense = AutoModel.from_pretrained("bert-base-uncased")
    model = AutoModel.from_pretrained("bert-base-uncased")
    table = measure_latency_table(model)
    scores = unit_importance(model, batches, "fisher", keep_gradients=True)
    assert_type(scores.per_cost(table), UnitScores)
    selection = select_parts(model, scores, table, speedup=2, rearrange=True)
    assert_type(selection, Selection)
    assert_type(Selection.load("selection.json"), Selection)
    refit_outputs(selection.apply(model), dense, batches).to_pandas()
    compensate(model, dense, batches).save_pretrained("pruned")
    assert_type(mean_unit_outputs(model, batches), dict[str, torch.Tensor])
    print(fisher_pruning(model, batches, table, 3.0, parts="units").selection.speedup)
    unit_importance(model, batches, method=3)  # type: ignore[arg-type]


def guide_and_gate(dataset: Dataset[Mapping[str, torch.Tensor]]) -> None:
    model = headwise_model("bert-base-uncased", "AutoModelForSequenceClassification", gates={}, guidance={})
    assert_type(model, PreTrainedModel)
    arguments = HeadwiseTrainingArguments("out", target_heads=36, guidance_weight=0.1)
    HeadwiseTrainingArguments("out", guidance_schedule={"prev": "hold"}, guidance_hold_steps={"prev": 100})
    callback = HeadDynamicsCallback([HeadConfidence()], [{"input_ids": torch.tensor([[1, 2]])}], every=100)
    trainer = HeadwiseTrainer(model, arguments, train_dataset=dataset, callbacks=[callback])
    trainer.train(resume_from_checkpoint=True)
    trainer.prune()
    HeadwiseSeq2SeqTrainer(model, arguments)  # type: ignore[arg-type]
    timeline = HeadTimeline.load("timeline.json")
    assert_type(timeline, HeadTimeline)
    assert_type(expected_open_heads(torch.zeros(4)), torch.Tensor)
    HeadwiseBertForMaskedLM.from_pretrained("bert-base-uncased", guidance={"fraction": 0.5})


def guide_to_trees(tokenizer: PreTrainedTokenizerBase) -> None:
    trees = load_conllu("en_ewt-ud-dev.conllu")
    targets = [tree_targets(tree, relations=["nsubj"]) for tree in trees]
    assert_type(targets, list[list[int | None]])
    encoding = tokenizer([tree.words for tree in trees], is_split_into_words=True)
    encoding["guidance_syntax"] = align_targets(encoding, targets, spans=[tree.spans for tree in trees])
    dependents = [tree_targets(tree, direction="dependent", several="all") for tree in trees]
    assert_type(dependents, list[list[list[int]]])
    assert_type(pharaoh_targets([(0, 1)], 2), list[int | None])
    assert_type(pharaoh_targets([(0, 1)], 2, several="all"), list[list[int]])
    assert_type(cluster_targets([], 2, several="all"), list[list[int]])
    encoding["guidance_a"], encoding["guidance_a_weights"] = align_sparse_targets(encoding, dependents)
    align_targets(encoding, [pair_targets(targets[0], targets[1])])
    align_sparse_targets(encoding, [pair_targets(dependents[0], dependents[1])])
    collator = GuidanceCollator(MaskedLanguageModelCollator(tokenizer))
    assert_type(collator([{"input_ids": [1, 2], "guidance_syntax": [1, -100]}]), dict[str, Any])
    GuidanceCollator()  # type: ignore[call-arg]


def extend() -> None:
    def stops(ids: torch.Tensor | None, mask: torch.Tensor) -> PatternRows:
        return token_set([1010, 1012])(ids, mask)

    register_pattern("stops", stops)
    register_pattern("commas", token_set([1010]))
    register_pattern("all", len)  # type: ignore[arg-type]
    assert_type(pattern_names(), list[str])
    assert_type([one.model_type for one in headwise_architectures().values()], list[str])
    assert_type(hf_attn_dynamics.__version__, str)
    LstmForSequenceClassification(LstmConfig(vocab_size=100, hidden_size=16))


def import_from_subpackages(scores: RoleScores, timeline: HeadTimeline, a: torch.Tensor) -> None:
    assert_type(plots.plot_roles(scores), Figure)
    assert_type(hf_attn_dynamics.plot_roles(scores), Figure)
    assert_type(plot_head_dynamics(timeline), Figure)
    assert_type(agreement(a, a), torch.Tensor)
    assert_type(hf_attn_dynamics.agreement(a, a), torch.Tensor)
    assert_type(IbmModel1(), hf_attn_dynamics.IbmModel1)
    assert_type(GateHistory(), hf_attn_dynamics.GateHistory)
    assert_type(push_model("folder", "me/model"), str)
    assert_type(HeadRoles(("query",), ("key", "value"), "output"), hf_attn_dynamics.HeadRoles)
    GateHistory("often")  # type: ignore[arg-type]
    plots.plot_roles(3)  # type: ignore[arg-type]


def learn_from_a_teacher(student: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor) -> None:
    batch = {"input_ids": ids}
    assert_type(attention_distillation_loss(student, teacher, batch, {0: 1}), torch.Tensor)
    loss, _ = attention_distillation_loss(student, teacher, batch, {0: 1}, return_outputs=True)
    assert_type(loss, torch.Tensor)
    assert_type(Teacher(teacher, student)(batch).attention[HeadSite("encoder", 0)].query, torch.Tensor)
    attention_distillation_loss(student, teacher, batch, [0, 1])  # type: ignore[call-overload]


class Calls(Observer):
    """Number of attention calls."""

    name = "calls"

    def __init__(self) -> None:
        self.number = 0

    def update(self, call: AttentionCall) -> None:
        assert_type(call.weights, torch.Tensor)
        self.number += 1

    def compute(self) -> int:
        return self.number
