import ast
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_processes import python

import hf_attn_dynamics
from hf_attn_dynamics.hub.card import TEMPLATE
from hf_attn_dynamics.models.headwise_classes import headwise_names


def run(code):
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_public_names_are_pinned():
    # Classes that are made on demand are as many as the catalogue has.
    assert sorted(set(hf_attn_dynamics.__all__) - headwise_names().keys()) == [
        "AgreementTracker",
        "BowAttentionConfig",
        "BowAttentionForSequenceClassification",
        "CheckpointCallback",
        "ContextualizedAgreement",
        "CoreferenceScores",
        "DelimiterAttention",
        "DuplicateTokens",
        "GateHistory",
        "HardConcreteGate",
        "HeadConfidence",
        "HeadDistance",
        "HeadDistances",
        "HeadDynamicsCallback",
        "HeadEntropy",
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
        "IntegratedGradientsAgreement",
        "LexicalProbe",
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
        "ProxyConfig",
        "ProxyForSeq2Seq",
        "ProxyForSequenceClassification",
        "RareWords",
        "RelativeAttention",
        "RelativePositions",
        "RelevanceConservation",
        "ReplacedTokenCollator",
        "RoleScores",
        "ScoreNormHistory",
        "SyntacticRoles",
        "agreement",
        "alignment_error_rate",
        "attended_words",
        "attention_alignment",
        "attention_flow",
        "attention_maps",
        "attention_rollout",
        "chance_agreement",
        "checkpoint_steps",
        "contextualized_agreement",
        "coreference_accuracy",
        "correlate",
        "expected_open_heads",
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
        "lexical_probe",
        "load_pruned",
        "local_contribution",
        "map_types",
        "masked_heads",
        "mean_head_outputs",
        "observe",
        "optimal_attention",
        "pattern_names",
        "plot_centers_of_mass",
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
        "plot_pretraining",
        "plot_pruning_curve",
        "plot_relative_attention",
        "plot_relative_maps",
        "plot_roles",
        "prune_closed_gates",
        "prune_heads",
        "random_importance",
        "read_heads",
        "read_pharaoh",
        "register_attention",
        "register_pattern",
        "relevance_conservation",
        "retain_heads",
        "role_overlap",
        "row_mask",
        "score_norm_curve",
        "score_norm_terms",
        "show_contributions",
        "show_heads",
        "show_maps",
        "source_rows",
        "to_bertviz",
        "token_set",
        "top_heads",
        "topic_purity",
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


def test_type_checkers_are_told_of_all_names_where_the_package_reads_them():
    """They know nothing of names that a module looks up when it is asked for them."""
    stub = ast.parse(Path(hf_attn_dynamics.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.level]
    # Written `as` the same name, what a stub imports is public.
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    told = {alias.name for node in imports if node.module for alias in node.names}
    assert told == {*hf_attn_dynamics.__all__} - {*headwise_names()}
    (dynamic,) = (node for node in stub.body if isinstance(node, ast.FunctionDef))
    assert dynamic.name == "__getattr__"
    assert {alias.name for node in imports if not node.module for alias in node.names} <= {*dir(hf_attn_dynamics)}


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
    assert (built / "__init__.pyi").is_file()


def test_unknown_names_are_attribute_errors():
    assert not hasattr(hf_attn_dynamics, "HeadwiseGPT")
