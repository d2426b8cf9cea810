# Licensed under the Apache License, Version 2.0.
"""Every private name of Transformers, Accelerate and PyTorch that this package uses, behind functions of its own.

The file lies among the models, since checkpoints are saved together with the code that they import, which can only be
beside them. The rest of the package imports it from here. It imports none of these libraries before it needs them.

A name is private if it begins with an underscore, if it is an operator of `torch.ops`, or if the module that it is
imported from is not in the documentation of its library. [`PRIVATE_NAMES`] lists all of them: the functions below use
the first ones, and classes of this package override the others, where they are. [`check_private_names`] tells which of
them an installed version lacks.
"""

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple


class PrivateName(NamedTuple):
    """A private name of another library.

    Attributes:
        owner (`str`): Where it is, as `module:object`, or the module alone.
        name (`str`): The name: an attribute, or what the source of the owner sets on its instances.
        purpose (`str`): What this package needs it for.
        until (`str`): When it can go.
        otherwise (`str`): What the package does in a version without it, as a predicate.
        overridden_by (`str`): Class or classes of this package that define it; empty if functions of this file use it.
    """

    owner: str
    name: str
    purpose: str
    until: str
    otherwise: str = "fails with an AttributeError that tells the name"
    overridden_by: str = ""


_MODEL = "transformers:PreTrainedModel"
_CONFIGURATION = "transformers:PreTrainedConfig"
_TRAINER = "transformers:Trainer"
_MODULE = "torch.nn:Module"
_MAPPING = "transformers.models.auto.auto_factory:_LazyAutoMapping"
_IGNORED = "never calls the method of its own, whose effect is lost without an error"

USED_NAMES = (
    PrivateName(
        _CONFIGURATION,
        "_attn_implementation",
        "read and set the name of the attention function, also where no model sets it",
        "configurations have a public property for what `set_attn_implementation` sets",
    ),
    PrivateName(
        _MODEL,
        "_supports_sdpa",
        "observe a model by scaled dot-product attention where it can compute it",
        "the classes of models have a public flag",
    ),
    PrivateName(
        _MODEL,
        "_can_set_attn_implementation",
        "tell models whose attention passes through `AttentionInterface` from those that compute it by themselves",
        "the classes of models have a public flag",
    ),
    PrivateName(
        _MODEL,
        "_from_config",
        "build a model of a known class with random weights in the dtype of another one",
        "classes of models have `from_config`, as Auto classes have",
    ),
    PrivateName(
        _MODEL,
        "_init_weights",
        "draw the weights of a module that replaces another one as those of a new model",
        "models have a public method that initialises one module",
    ),
    PrivateName(
        "transformers.initialization",
        "_is_hf_initialized",
        "keep weights that have been set, or have them drawn again",
        "`post_init` and loading take the modules that they are to leave alone as an argument",
        "initialises modules once more, over the weights that they have",
    ),
    PrivateName(
        _MODEL,
        "_keys_to_ignore_on_load_unexpected",
        "load checkpoints whose queries and keys the configuration has replaced by hard-coded attention",
        "`from_pretrained` takes the names of weights that may be left over",
        "reports the weights that are left over when it loads such a checkpoint",
    ),
    PrivateName(
        _MODEL,
        "_keep_in_fp32_modules_strict",
        "keep gates in single precision when a model is loaded in half precision",
        "modules can say which dtype they are loaded in",
        "loads gates in half precision, where small steps are lost",
    ),
    PrivateName(
        _MODEL,
        "_keys_to_ignore_on_save",
        "count the tensors that `save_pretrained` writes",
        "models tell by a public method which tensors they save",
    ),
    PrivateName(
        _MAPPING,
        "_model_mapping",
        "make models known to Auto classes by name, without importing them",
        "`AutoModel.register` takes the names of classes",
    ),
    PrivateName(
        _MAPPING,
        "_reverse_config_mapping",
        "find the models and tokenizers of a configuration that is known to Auto classes by name",
        "`AutoConfig.register` takes the name of a class",
    ),
    PrivateName(
        "transformers.models.auto.modeling_auto:AutoModel",
        "_model_mapping",
        "find the table of an Auto class",
        "`AutoModel.register` takes the names of classes",
    ),
    PrivateName(
        _TRAINER,
        "_load_rng_state",
        "begin a pass over the data with the random numbers that its checkpoint has",
        "the trainer loads them before the order of the examples is drawn",
    ),
    PrivateName(
        _TRAINER,
        "_prepare_inputs",
        "move a batch to the device of the trainer outside of a step, in the dtype that DeepSpeed wants",
        "the trainer has a public method for it",
    ),
    PrivateName(
        "transformers:Seq2SeqTrainer",
        "_gen_kwargs",
        "know how many sequences are generated for each sentence of an evaluation",
        "`evaluation_loop` takes the arguments of `generate`",
        "evaluates too few sequences when there are several for each sentence",
    ),
    PrivateName(
        _MODULE,
        "_compiled_call_impl",
        "refuse to remove heads from modules that `module.compile()` has compiled",
        "torch.compiler tells whether a module is compiled",
    ),
    PrivateName(
        "torch._dynamo.eval_frame:OptimizedModule",
        "_orig_mod",
        "refuse to remove heads from what `torch.compile` has returned",
        "torch.compiler tells whether a module is compiled",
    ),
    PrivateName(
        "torch.autograd:Variable",
        "_execution_engine",
        "forget the gradient of the guidance loss when the backward pass that it belongs to has ended",
        "torch.autograd.graph has a hook for the end of a backward pass",
    ),
    PrivateName(
        _MODULE,
        "_modules",
        "view a module with other children than it has, without changing it",
        "PyTorch can copy a module without its tensors",
    ),
    PrivateName(_MODULE, "_parameters", "share the parameters of a module with its view", "as for `_modules`"),
    PrivateName(_MODULE, "_buffers", "share the buffers of a module with its view", "as for `_modules`"),
    *(
        PrivateName(_MODULE, name, "call the hooks of a module from its view", "as for `_modules`")
        for name in (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_backward_pre_hooks",
            "_backward_hooks",
            "_forward_pre_hooks_with_kwargs",
            "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called",
        )
    ),
)

# Imported from here as `from .compat import NAME`, and from their modules when they are first asked for.
UNDOCUMENTED_NAMES = (
    PrivateName(
        "transformers.conversion_mapping",
        "get_checkpoint_conversion_mapping",
        "load checkpoints whose weights stock classes rename or merge",
        "it is documented, or classes inherit what their parents convert",
    ),
    PrivateName(
        "transformers.conversion_mapping",
        "register_checkpoint_conversion_mapping",
        "load checkpoints whose weights stock classes rename or merge",
        "it is documented, or classes inherit what their parents convert",
    ),
    PrivateName(
        "transformers.dynamic_module_utils",
        "custom_object_save",
        "save a configuration that has no model yet together with its code",
        "`save_pretrained` of configurations saves the code of the models as well",
    ),
    PrivateName(
        "transformers.models.auto.configuration_auto",
        "CONFIG_MAPPING_NAMES",
        "know the name of a stock configuration without importing its file",
        "`CONFIG_MAPPING` tells the names of classes, or `AutoConfig.register` takes one",
    ),
    PrivateName(
        "transformers.loss.loss_utils",
        "fixed_cross_entropy",
        "compute the cross-entropy as stock models do, over the labels of an accumulated batch",
        "it is documented, or `torch.nn.functional.cross_entropy` takes the number of labels",
    ),
    PrivateName(
        "transformers.models.bart.modeling_bart",
        "shift_tokens_right",
        "make the inputs of a decoder from labels as stock models do",
        "it is documented",
    ),
    PrivateName(
        "transformers.models.electra.modeling_electra",
        "ElectraDiscriminatorPredictions",
        "build the discriminator of joint pretraining with the names of weights that stock checkpoints have",
        "it is documented",
    ),
    PrivateName(
        "transformers.models.marian.modeling_marian",
        "MarianSinusoidalPositionalEmbedding",
        "find how many positions a table of Marian has",
        "it is documented",
    ),
    PrivateName(
        "transformers.trainer",
        "TRAINER_STATE_NAME",
        "know the file whose presence makes a checkpoint whole",
        "it is documented, or trainers can read the state of a checkpoint",
    ),
    PrivateName(
        "transformers.activations",
        "ACT2CLS",
        "know the activation functions that relevance passes through",
        "it is documented",
    ),
    PrivateName(
        "transformers.integrations.flash_attention",
        "flash_attention_forward",
        "know the kernels that are flash attention by their function, also those from the Hub",
        "kernels tell which keywords they read",
    ),
    PrivateName(
        "transformers.modeling_flash_attention_utils",
        "FlashAttentionKwargs",
        "know the keywords that flash attention reads",
        "kernels tell which keywords they read",
    ),
)

OVERRIDDEN_NAMES = (
    PrivateName(
        _TRAINER,
        "_hp_search_setup",
        "read arguments and model as a trial and `model_init` have left them, freeze the decoder and give the model "
        "the heads of a checkpoint, before its weights are loaded and the optimizer is made",
        "a callback is called there; `on_train_begin` is too late, since the optimizer exists by then",
        _IGNORED,
        "TrainingHooksMixin",
    ),
    PrivateName(
        _TRAINER,
        "_init_training_state",
        "go on with a stream where its checkpoint left off, and begin no pass where a run is complete",
        "the trainer counts the passes over a stream when a run is resumed, and ends one that is complete",
        _IGNORED,
        "ResumedTrainingMixin",
    ),
    PrivateName(
        _TRAINER,
        "_load_best_model",
        "give the model the heads of the best checkpoint before its weights are loaded",
        "a callback is called before the best checkpoint is loaded",
        _IGNORED,
        "PrunableMixin, WeightAverageMixin",
    ),
    PrivateName(
        _TRAINER,
        "_get_train_sampler",
        "batch pairs of sentences by the lengths of both",
        "the trainer takes a sampler, or the class of one",
        _IGNORED,
        "SimilarLengthSeq2SeqTrainer",
    ),
    PrivateName(
        _TRAINER,
        "_internal_call",
        "tell a checkpoint, beside which trained weights and random numbers are saved, from a model that the user "
        "saves; an argument of `save_model`",
        "callbacks are called before the state that makes a checkpoint whole is written; `on_save` comes after it",
        "fails with a TypeError that tells the name",
        "PrunableMixin, WeightAverageMixin, ResumedTrainingMixin",
    ),
    PrivateName(
        _MODEL,
        "_move_missing_keys_from_meta_to_device",
        "refuse to draw more weights than a checkpoint holds, before memory is taken for them",
        "`from_pretrained` has a limit, or calls a public method with the missing names",
        _IGNORED,
        "MissingWeightsMixin",
    ),
    PrivateName(
        _MODEL,
        "_can_set_experts_implementation",
        "compute the experts of a mixture as the stock class does",
        "the classes of models have a public flag",
        "computes them one by one",
        "StockExpertsMixin",
    ),
    PrivateName(
        _MODEL,
        "_init_weights",
        "initialise the weights of the models that extend no stock one, as the guide to custom models asks for",
        "it gets a public name",
        _IGNORED,
        "ProxyModel, BowAttentionForSequenceClassification, LstmForSequenceClassification, "
        "LstmSeq2SeqForConditionalGeneration",
    ),
    PrivateName(
        "transformers:GenerationMixin",
        "_supports_default_dynamic_cache",
        "generate with the state of an LSTM, which `forward` makes, instead of a cache of keys and values",
        "models can say by a public flag that they make their own cache",
        _IGNORED,
        "LstmSeq2SeqForConditionalGeneration",
    ),
    PrivateName(
        "transformers:GenerationMixin",
        "_expand_inputs_for_generation",
        "start all beams of a sentence from the state of an LSTM that `generate` is given",
        "`generate` asks the cache to repeat itself for each beam",
        _IGNORED,
        "LstmSeq2SeqForConditionalGeneration",
    ),
    PrivateName(
        _MODEL,
        "_tied_weights_keys",
        "tie the embeddings of a generator to those of its discriminator",
        "it gets a public name",
        "trains both parts with embeddings of their own",
        "ElectraForJointPreTraining",
    ),
    PrivateName(
        _CONFIGURATION,
        "_attn_implementation",
        "name headwise attention to attention modules, and the kernel that it calls to the model",
        "attention modules take the attention function as an argument",
        "computes attention without guidance and gates",
        "AttentionConfigView",
    ),
    PrivateName(
        _MODULE,
        "_apply",
        "keep gates in single precision when a model is cast to half precision",
        "modules can say which dtypes they may be cast to",
        "casts gates to half precision, where small steps are lost",
        "HardConcreteGate",
    ),
)

PRIVATE_NAMES = USED_NAMES + UNDOCUMENTED_NAMES + OVERRIDDEN_NAMES

# Dictionaries of `torch.nn.Module`: its hooks, those that say how these are called, and its tensors.
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MODULE_HOOK_KINDS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
MODULE_PARAMETERS = "_parameters"
MODULE_TENSORS = (MODULE_PARAMETERS, "_buffers")
MODULE_CHILDREN = "_modules"
MODULE_COMPILED_CALL = "_compiled_call_impl"


def check_private_names() -> list[str]:
    """Names of [`PRIVATE_NAMES`] that the installed versions lack; imports the libraries.

    Returns:
        `list[str]`: a sentence for each name: where it was, what it was needed for, and what happens without it.

    Example:
        >>> from hf_attn_dynamics.models.compat import check_private_names
        >>> check_private_names()
        []
    """
    return [
        f"{entry.owner} has no {entry.name}, which is needed to {entry.purpose}; without it, this package "
        f"{entry.otherwise}."
        for entry in PRIVATE_NAMES
        if not _is_there(entry)
    ]


def _is_there(entry: PrivateName) -> bool:
    import inspect

    module_name, _, path = entry.owner.partition(":")
    try:
        owner = importlib.import_module(module_name)
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return False
    # What instances get while they are built or used is not on their class.
    return hasattr(owner, entry.name) or entry.name in inspect.getsource(owner)


def __getattr__(name: str) -> Any:
    entry = next((entry for entry in UNDOCUMENTED_NAMES if entry.name == name), None)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(entry.owner), name)


# ---- Configurations and classes of models ----


def attention_kernel(config: Any) -> str | None:
    """Name of the attention function that a configuration chooses; `None` before a model is built from it."""
    return config._attn_implementation


def kernel_name(config: Any) -> str:
    """Name of the kernel that a configuration chooses: what a function such as `paged|eager` stands for."""
    return (attention_kernel(config) or "eager").rpartition("|")[2]


def set_attention_kernel(config: Any, name: str | None) -> None:
    """Chooses an attention function by name, in a configuration and those in it; the name is not checked."""
    config._attn_implementation = name


def supports_sdpa(model: Any) -> bool:
    """Whether a model, or all models of a class, can compute attention by `scaled_dot_product_attention`."""
    return model._supports_sdpa


@cache
def passes_attention_interface(model_class: type) -> bool:
    """Whether models of a class compute attention by registered functions; Transformers reads that off the source."""
    return model_class._can_set_attn_implementation()


def build_from_config(model_class: type, config: Any, dtype: Any) -> Any:
    """A model of a class with random weights of this dtype, its attention function checked as by `from_pretrained`."""
    return model_class._from_config(config, dtype=dtype)


@cache
def auto_class_names(model_type: str) -> dict[str, str]:
    """Names of the classes of models that Auto classes open for a `model_type`, by the names of the Auto classes."""
    found = {name: table[model_type] for name, table in _auto_tables().items() if model_type in table}
    # Of several classes the first is opened, unless the configuration names another one.
    return {name: classes if isinstance(classes, str) else classes[0] for name, classes in found.items()}


@cache
def _auto_tables() -> dict[str, dict[str, Any]]:
    """Tables of class names by `model_type`, by the names of the Auto classes."""
    import transformers

    names = (name for name in dir(transformers) if name.startswith("AutoModel"))
    mappings = {name: getattr(getattr(transformers, name), "_model_mapping", None) for name in names}
    return {name: mapping._model_mapping for name, mapping in mappings.items() if mapping is not None}


def name_in_auto_class(auto_class: type, config_name: str, model_type: str, class_name: str) -> None:
    """Makes a model known to an Auto class by the names of its class, its configuration and its `model_type`."""
    mapping = auto_class._model_mapping
    mapping._model_mapping[model_type] = class_name
    name_configuration(mapping, config_name, model_type)


def name_configuration(mapping: Any, config_name: str, model_type: str) -> None:
    """Lets a lazy table of models, or of tokenizers, find the `model_type` of a configuration by its class name."""
    mapping._reverse_config_mapping[config_name] = model_type


# ---- Weights of models ----


def initialise(model: Any, module: Any) -> None:
    """Draws the weights of a module, and of those in it, as those of a new model are drawn."""
    for parameter in module.parameters():
        if hasattr(parameter, "_is_hf_initialized"):
            parameter._is_hf_initialized = False
    module.apply(model._init_weights)


def mark_initialised(module_or_weight: Any) -> None:
    """Keeps `post_init` and loading from drawing a weight, or those of a module."""
    module_or_weight._is_hf_initialized = True


def ignore_left_over(model: Any, patterns: Iterable[str]) -> None:
    """Lets a model load checkpoints that have weights of these names, given as regular expressions, beside its own."""
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *patterns}


def keep_in_single_precision(model: Any, names: Iterable[str]) -> None:
    """Has modules and parameters of these names loaded in float32, whatever dtype is asked for."""
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *names}


def unsaved_names(model: Any) -> Iterable[str]:
    """Names of the tensors that `save_pretrained` leaves out."""
    return model._keys_to_ignore_on_save or ()


class MissingWeightsMixin:
    """A model that sees which weights a checkpoint lacks before they are drawn; it goes before the model's class."""

    def missing_weights_found(self, names: set[str]) -> None:
        """Called when a checkpoint has been loaded, with what it lacks; weights that are tied to others are not in it.

        Args:
            names (`set[str]`): Parameters and buffers that are on the meta device still.
        """

    def _move_missing_keys_from_meta_to_device(self, missing_keys: set[str], *args: Any, **kwargs: Any) -> None:
        self.missing_weights_found(missing_keys - self.all_tied_weights_keys.keys())
        super()._move_missing_keys_from_meta_to_device(missing_keys, *args, **kwargs)


class StockExpertsMixin:
    """A model that chooses how experts are computed as its stock class does; it goes before the model's class."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # Transformers reads it off the file that a class is in.
        stock = next((base for base in cls.__mro__ if base.__module__.startswith("transformers.models.")), None)
        return super()._can_set_experts_implementation() if stock is None else stock._can_set_experts_implementation()


# ---- Modules of PyTorch ----


def is_compiled_model(model: Any) -> bool:
    """Whether an object is what `torch.compile` returns for a module."""
    return hasattr(model, "_orig_mod")


def is_compiled_in_place(module: Any) -> bool:
    """Whether `module.compile()` has been called."""
    return getattr(module, MODULE_COMPILED_CALL, None) is not None


def compiled_model(model: Any) -> Any:
    """The module that `torch.compile` was called with; of any other module the module itself."""
    return vars(model).get(MODULE_CHILDREN, {}).get("_orig_mod", model)


def call_after_backward(function: Callable[[], Any]) -> None:
    """Calls a function when the backward pass that is running has ended; only from within that pass."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(function)


# ---- Trainers ----


def load_random_state(trainer: Any, checkpoint: str) -> None:
    """Sets all random number generators as a checkpoint of the trainer has them."""
    trainer._load_rng_state(checkpoint)


def prepared_batch(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch on the device of the trainer, as a step gets it."""
    return trainer._prepare_inputs(batch)


def generation_arguments(trainer: Any) -> dict[str, Any]:
    """Arguments of `generate` that `evaluate` or `predict` of a `Seq2SeqTrainer` was last given."""
    return getattr(trainer, "_gen_kwargs", {})
