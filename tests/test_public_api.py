import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_processes import python

import hf_attn_dynamics
from hf_attn_dynamics._stub import public_names
from hf_attn_dynamics.hub.card import TEMPLATE
from hf_attn_dynamics.models.headwise_classes import headwise_names


ROOT = Path(hf_attn_dynamics.__file__).parent
PACKAGES = sorted(".".join(stub.parent.relative_to(ROOT.parent).parts) for stub in ROOT.rglob("__init__.pyi"))
ROOMS = ["attribution", "heads", "lexical", "observers", "plots", "relevance"]


def run(code):
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_dir_lists_the_names_that_users_reach_for_first_and_the_subpackages():
    assert dir(hf_attn_dynamics) == [
        "CheckpointCallback",
        "HeadConfidence",
        "HeadDynamicsCallback",
        "HeadReading",
        "HeadScores",
        "HeadTimeline",
        "HeadwiseSeq2SeqTrainer",
        "HeadwiseSeq2SeqTrainingArguments",
        "HeadwiseTrainer",
        "HeadwiseTrainingArguments",
        "IbmModel1",
        "LstmConfig",
        "LstmForSequenceClassification",
        "LstmSeq2SeqConfig",
        "LstmSeq2SeqForConditionalGeneration",
        "MaskedLanguageModelCollator",
        "Observer",
        "RelativePositions",
        "ReplacedTokenCollator",
        "SyntacticRoles",
        "__version__",
        "agreement",
        "analysis",
        "attention_maps",
        "catalog",
        "data",
        "global_contribution",
        "head_importance",
        "head_relevance",
        "head_report",
        "headwise_architectures",
        "headwise_class",
        "headwise_model",
        "hub",
        "lexical_probe",
        "load_pruned",
        "local_contribution",
        "masked_heads",
        "measure_latency_table",
        "models",
        "observe",
        "prune_closed_gates",
        "prune_heads",
        "prune_units",
        "read_heads",
        "recipes",
        "register_attention",
        "register_pattern",
        "retain_heads",
        "score_norm_curve",
        "show_contributions",
        "show_heads",
        "training",
    ]


def test_dir_imports_nothing_and_does_not_depend_on_what_was_used():
    code = """
import sys, hf_attn_dynamics
before, listed = {*sys.modules}, dir(hf_attn_dynamics)
assert {*sys.modules} == before
hf_attn_dynamics.plot_roles, hf_attn_dynamics.HeadwiseBertConfig, hf_attn_dynamics.__all__
assert dir(hf_attn_dynamics) == listed
print("done")
"""
    (result,) = python(["-c", code], bare=True)
    assert result.stdout == "done\n", result.stderr


def test_subpackages_list_the_other_names():
    listed = {name for package in ("analysis", "catalog", "models", "training") for name in dir_of(package)}
    assert {*hf_attn_dynamics.__all__} <= listed
    assert {*ROOMS, "plot_head_dynamics", "RareWords", "HeadReading"} <= dir_of("analysis")
    assert {"plot_head_dynamics", "plot_roles"} <= dir_of("analysis.plots")
    assert {"AgreementTracker", "agreement"} <= dir_of("analysis.lexical")
    assert {"HeadRoles", "HeadwiseBertForMaskedLM", "HeadwiseLlamaConfig", "prune_heads"} <= dir_of("models")
    assert {"GateHistory", "GuidanceCollator", "HeadwiseTrainer", "layer_factors"} <= dir_of("training")
    assert dir_of("hub") == {"Metric", "PushError", "card", "push", "push_model", "write_model_card"}


def dir_of(package):
    return {*dir(importlib.import_module(f"hf_attn_dynamics.{package}"))}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_listed_name_is_the_same_wherever_it_is_imported_from(package):
    found = importlib.import_module(package)
    names = public_names(package).module_of
    assert {*names} - headwise_names().keys() == {*found.__all__} - headwise_names().keys()
    for name, module in names.items():
        assert getattr(found, name) is getattr(importlib.import_module(module), name)
    for name in {*dir(found)} - headwise_names().keys():
        assert hasattr(found, name)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'everything'"):
        found.everything  # noqa: B018


def test_headwise_classes_are_attributes_of_their_subpackage():
    assert hf_attn_dynamics.models.HeadwiseBertConfig is hf_attn_dynamics.HeadwiseBertConfig
    assert not hasattr(hf_attn_dynamics.models, "HeadwiseGPT")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_that_of_a_module(package):
    """Importing a module makes it an attribute of its package, in place of what has its name."""
    folder = Path(importlib.import_module(package).__file__).parent
    assert not {path.stem for path in folder.iterdir()} & {*public_names(package).module_of}


def test_a_module_that_has_moved_does_not_replace_the_function_of_its_name():
    with pytest.warns(FutureWarning, match="analysis.agreement is hf_attn_dynamics.analysis.lexical.agreements now"):
        module = importlib.import_module("hf_attn_dynamics.analysis.agreement")
    assert hf_attn_dynamics.analysis.agreement is module.agreement is hf_attn_dynamics.agreement


def test_earlier_names_of_packages_that_were_modules_are_found():
    for package, name in (
        ("analysis.observers", "AttentionCall"),
        ("analysis.plots", "COLOURS"),
        ("hub", "model_files"),
    ):
        found = importlib.import_module(f"hf_attn_dynamics.{package}")
        assert hasattr(found, name)
        assert name not in dir(found)


@pytest.mark.parametrize(
    ("earlier", "names"),
    [("plots_lexical", ("SourceMap", "plot_source_maps")), ("plots_score_norm", ("Curves", "plot_score_norm_curves"))],
)
def test_plots_that_have_become_public_are_found_by_their_earlier_paths(earlier, names):
    with pytest.warns(FutureWarning, match=f"analysis.{earlier} is"):
        module = importlib.import_module(f"hf_attn_dynamics.analysis.{earlier}")
    assert [getattr(module, name) for name in names] == [getattr(hf_attn_dynamics, name) for name in names]


def test_public_names_are_pinned():
    # Classes that are made on demand are as many as the catalogue has.
    assert sorted(set(hf_attn_dynamics.__all__) - headwise_names().keys()) == [
        "AgreementTracker",
        "AttentionSink",
        "BowAttentionConfig",
        "BowAttentionForSequenceClassification",
        "CheckpointCallback",
        "ContextualizedAgreement",
        "CoreferenceScores",
        "CostTable",
        "Curves",
        "DelimiterAttention",
        "DiagonalPrior",
        "DuplicateTokens",
        "EncoderDecoderContribution",
        "Faithfulness",
        "FisherPruning",
        "GateHistory",
        "HardConcreteGate",
        "HeadConfidence",
        "HeadDistance",
        "HeadDistances",
        "HeadDynamicsCallback",
        "HeadEntropy",
        "HeadMatching",
        "HeadNames",
        "HeadReading",
        "HeadReport",
        "HeadRoles",
        "HeadScores",
        "HeadTimeline",
        "HeadView",
        "HeadwiseArchitecture",
        "HeadwiseArguments",
        "HeadwiseSeq2SeqTrainer",
        "HeadwiseSeq2SeqTrainingArguments",
        "HeadwiseTrainer",
        "HeadwiseTrainerMixin",
        "HeadwiseTrainingArguments",
        "IbmModel1",
        "InductionScore",
        "IntegratedGradientsAgreement",
        "LexicalProbe",
        "LocalAttention",
        "LstmConfig",
        "LstmForSequenceClassification",
        "LstmSeq2SeqConfig",
        "LstmSeq2SeqForConditionalGeneration",
        "MapCorrelation",
        "MapExample",
        "MaskedLanguageModelCollator",
        "Observer",
        "OptimalAttention",
        "PatternRows",
        "PreviousToken",
        "ProxyConfig",
        "ProxyForSeq2Seq",
        "ProxyForSequenceClassification",
        "RareWords",
        "RefitErrors",
        "RelativeAttention",
        "RelativePositions",
        "RelevanceConservation",
        "ReplacedTokenCollator",
        "RetrievalScore",
        "RoleScores",
        "ScoreNormHistory",
        "Selection",
        "SinkAttention",
        "SourceMap",
        "SyntacticRoles",
        "TargetAttention",
        "TokenDecomposition",
        "UnitRoles",
        "UnitScores",
        "agreement",
        "align_both_directions",
        "alignment_error_rate",
        "attended_words",
        "attention_alignment",
        "attention_flow",
        "attention_maps",
        "attention_rollout",
        "chance_agreement",
        "checkpoint_steps",
        "checkpoint_timeline",
        "compare_heads",
        "compensate",
        "contextualized_agreement",
        "copying_scores",
        "coreference_accuracy",
        "correlate",
        "count_flops_table",
        "embedding_alignment",
        "encoder_decoder_contribution",
        "expected_open_heads",
        "faithfulness",
        "fisher_pruning",
        "gate_importance",
        "global_contribution",
        "head_importance",
        "head_outputs",
        "head_relevance",
        "head_report",
        "headwise_architectures",
        "headwise_class",
        "headwise_model",
        "ibm_rows",
        "integrated_gradients_agreement",
        "kendall_tau",
        "layer_contribution",
        "lexical_probe",
        "load_pruned",
        "local_contribution",
        "map_types",
        "masked_heads",
        "mean_head_outputs",
        "mean_unit_outputs",
        "measure_latency_table",
        "name_heads",
        "observe",
        "optimal_attention",
        "pattern_names",
        "plot_centers_of_mass",
        "plot_faithfulness",
        "plot_functions_kept",
        "plot_gate_history",
        "plot_gates",
        "plot_head_distances",
        "plot_head_dynamics",
        "plot_head_functions",
        "plot_head_maps",
        "plot_heads_per_layer",
        "plot_map_correlation",
        "plot_map_examples",
        "plot_map_types",
        "plot_parts_per_layer",
        "plot_pretraining",
        "plot_pruning_curve",
        "plot_relative_attention",
        "plot_relative_maps",
        "plot_roles",
        "plot_score_norm_curves",
        "plot_sinks",
        "plot_source_maps",
        "plot_speedup_curve",
        "prune_closed_gates",
        "prune_heads",
        "prune_layers",
        "prune_units",
        "random_importance",
        "read_heads",
        "read_pharaoh",
        "refit_outputs",
        "register_attention",
        "register_feed_forward",
        "register_pattern",
        "relevance_conservation",
        "retain_heads",
        "retain_units",
        "role_overlap",
        "row_mask",
        "score_norm_curve",
        "score_norm_terms",
        "select_parts",
        "show_contributions",
        "show_heads",
        "show_maps",
        "source_rows",
        "symmetrize",
        "to_bertviz",
        "token_decomposition",
        "token_relevance",
        "token_set",
        "top_heads",
        "topic_purity",
        "unit_importance",
        "value_weighted_attention",
        "word_saliency",
        "write_pharaoh",
    ]


def test_classes_of_the_first_architectures_stay_public():
    assert {
        "HeadwiseBertConfig",
        "HeadwiseBertForMaskedLM",
        "HeadwiseBertForPreTraining",
        "HeadwiseBertForQuestionAnswering",
        "HeadwiseBertForSequenceClassification",
        "HeadwiseBertForTokenClassification",
        "HeadwiseBertLMHeadModel",
        "HeadwiseBertModel",
        "HeadwiseElectraConfig",
        "HeadwiseElectraForCausalLM",
        "HeadwiseElectraForJointPreTraining",
        "HeadwiseElectraForMaskedLM",
        "HeadwiseElectraForPreTraining",
        "HeadwiseElectraForQuestionAnswering",
        "HeadwiseElectraForSequenceClassification",
        "HeadwiseElectraForTokenClassification",
        "HeadwiseElectraModel",
        "HeadwiseMarianConfig",
        "HeadwiseMarianMTModel",
        "HeadwiseMarianModel",
        "HeadwiseRobertaConfig",
        "HeadwiseRobertaForCausalLM",
        "HeadwiseRobertaForMaskedLM",
        "HeadwiseRobertaForQuestionAnswering",
        "HeadwiseRobertaForSequenceClassification",
        "HeadwiseRobertaForTokenClassification",
        "HeadwiseRobertaModel",
    } <= {*hf_attn_dynamics.__all__}


def test_every_public_name_resolves():
    for name in hf_attn_dynamics.__all__:
        assert getattr(hf_attn_dynamics, name).__module__.startswith("hf_attn_dynamics.")


def test_importing_warns_of_nothing_and_leaves_torch_alone():
    assert run("import sys, transformers, hf_attn_dynamics; print('torch' in sys.modules)") == "False"


def test_models_are_known_whatever_is_imported_first():
    names = ["bag-of-words-proxy", "bow-attention", "lstm-attention", "lstm-attention-seq2seq"]
    names += ["headwise-bert", "headwise-electra", "headwise-marian", "headwise-roberta"]
    ask = f"from transformers import AutoConfig; print(*(AutoConfig.for_model(n).model_type for n in {names}))"
    for first in (
        "import hf_attn_dynamics; from transformers import RobertaConfig",
        "from transformers import AutoModel; import hf_attn_dynamics",
        "from transformers.models.auto import configuration_auto; import hf_attn_dynamics",
    ):
        (result,) = python(["-c", f"{first}; {ask}"], bare=True)
        assert result.stdout.split() == names, result.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_are_told_of_all_names_where_the_package_reads_them(package):
    """They know nothing of names that a module looks up when it is asked for them."""
    stub = ast.parse(ROOT.parent.joinpath(*package.split("."), "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.level]
    aliases = [alias for node in imports for alias in node.names if alias.name != "*"]
    # Written `as` the same name, what a stub imports is public; a star imports what is public there.
    assert all(alias.asname == alias.name for alias in aliases)
    starred = [f"{package}.{node.module}" for node in imports if node.names[0].name == "*"]
    told = {alias.name for node in imports if node.module for alias in node.names} - {"*"}
    told |= {name for one in starred for name in public_names(one).module_of}
    assert {*starred} <= {*PACKAGES}
    assert told == {*importlib.import_module(package).__all__} - {*headwise_names()}
    assert {alias.name for node in imports if not node.module for alias in node.names} <= {*dir(hf_attn_dynamics)}


@pytest.mark.parametrize("package", ["hf_attn_dynamics", "hf_attn_dynamics.models"])
def test_type_checkers_are_told_of_headwise_classes(package):
    stub = ast.parse(ROOT.parent.joinpath(*package.split("."), "__init__.pyi").read_text(encoding="utf-8"))
    (dynamic,) = (node for node in stub.body if isinstance(node, ast.FunctionDef))
    assert dynamic.name == "__getattr__"


def test_the_template_of_model_cards_and_the_mark_of_typed_code_are_installed(tmp_path):
    pytest.importorskip("setuptools")
    root = Path(__file__).parents[1]
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build",
        "-b",
        str(tmp_path / "build"),
        "egg_info",
        "-e",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    built = tmp_path / "build" / "lib" / "hf_attn_dynamics"
    assert (built / "hub" / TEMPLATE.name).read_text() == TEMPLATE.read_text()
    assert (built / "models" / "guidance_loss.py").is_file()
    assert (built / "py.typed").is_file()
    stubs = {path.relative_to(ROOT) for path in ROOT.rglob("*.pyi")}
    assert stubs == {path.relative_to(built) for path in built.rglob("*.pyi")}
    assert len(stubs) == len(PACKAGES)


def test_unknown_names_are_attribute_errors():
    assert not hasattr(hf_attn_dynamics, "HeadwiseGPT")
