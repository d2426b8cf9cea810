# Licensed under the Apache License, Version 2.0.
"""Wrappers for every private name of Transformers, Accelerate and PyTorch that this package uses.

The file is in `models/` because checkpoints are saved with the code that they import, which must be in the same
folder. The libraries are imported only when a function needs them.

A name is private if it begins with an underscore, if it is an operator of `torch.ops`, or if its module is not
documented. [`PRIVATE_NAMES`] lists all of them: the functions below use [`USED_NAMES`], the package imports
[`UNDOCUMENTED_NAMES`] from here, and classes of this package override [`OVERRIDDEN_NAMES`]. [`check_private_names`]
lists the names that the installed versions lack.
"""

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple


class PrivateName(NamedTuple):
    """A private name of another library.

    Attributes:
        owner (`str`): The object that has it, as `module:object` or `module`.
        name (`str`): Name of an attribute of the owner, or of its instances.
        purpose (`str`): Why this package needs it, completing "needed to …".
        until (`str`): Public replacement that would make it unnecessary.
        otherwise (`str`): Behaviour in versions without it, completing "this package …".
        overridden_by (`str`): Classes of this package that override it; empty if functions of this file use it.
    """

    owner: str
    name: str
    purpose: str
    until: str
    otherwise: str = "raises an AttributeError with the name"
    overridden_by: str = ""


_MODEL = "transformers:PreTrainedModel"
_CONFIGURATION = "transformers:PreTrainedConfig"
_TRAINER = "transformers:Trainer"
_MODULE = "torch.nn:Module"
_MAPPING = "transformers.models.auto.auto_factory:_LazyAutoMapping"
_IGNORED = "silently loses the effect of its override, which is never called"

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
        "distinguish models that call `AttentionInterface` from those that compute attention themselves",
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
        "initialise a module that replaces another one like those of a new model",
        "models have a public method that initialises one module",
    ),
    PrivateName(
        "transformers.initialization",
        "_is_hf_initialized",
        "keep weights from being initialised again, or have them initialised again",
        "`post_init` and `from_pretrained` take the modules to skip as an argument",
        "initialises modules again and overwrites their weights",
    ),
    PrivateName(
        _MODEL,
        "_keys_to_ignore_on_load_unexpected",
        "load checkpoints whose queries and keys the configuration has replaced by hard-coded attention",
        "`from_pretrained` takes the names of weights that may be unexpected",
        "reports unexpected weights when it loads such a checkpoint",
    ),
    PrivateName(
        _MODEL,
        "_keep_in_fp32_modules_strict",
        "keep gates in single precision when a model is loaded in half precision",
        "modules can set the dtype that they are loaded in",
        "loads gates in half precision, where small steps are lost",
    ),
    PrivateName(
        _MODEL,
        "_keys_to_ignore_on_save",
        "count the tensors that `save_pretrained` writes",
        "models have a public method that lists the tensors that they save",
    ),
    PrivateName(
        _MAPPING,
        "_model_mapping",
        "register models with Auto classes by name, without importing them",
        "`AutoModel.register` takes the names of classes",
    ),
    PrivateName(
        _MAPPING,
        "_reverse_config_mapping",
        "find the models and tokenizers of a configuration that is registered with Auto classes by name",
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
        "restore the random number generators of a checkpoint before an epoch begins",
        "the trainer restores them before it shuffles the examples",
    ),
    PrivateName(
        _TRAINER,
        "_prepare_inputs",
        "move a batch to the trainer's device outside of a step, in the dtype that DeepSpeed requires",
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
        _TRAINER,
        "_signature_columns",
        "keep the dataset columns of guidance targets",
        "the trainer asks the model for the columns that it reads",
        "loses these columns, and the model raises an error, unless `remove_unused_columns=False`",
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
        "refuse to remove heads from a module that `torch.compile` has returned",
        "torch.compiler tells whether a module is compiled",
    ),
    PrivateName(
        "torch.autograd:Variable",
        "_execution_engine",
        "discard the gradient of the guidance loss at the end of its backward pass",
        "torch.autograd.graph has a hook for the end of a backward pass",
    ),
    PrivateName(
        _MODULE,
        "_modules",
        "make a view of a module with other children, without changing the module",
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

# Imported from here as `from .compat import NAME`; `__getattr__` below imports their modules.
UNDOCUMENTED_NAMES = (
    PrivateName(
        "transformers.conversion_mapping",
        "get_checkpoint_conversion_mapping",
        "load checkpoints whose weights stock classes rename or merge",
        "it is documented, or classes inherit the conversions of their parents",
    ),
    PrivateName(
        "transformers.conversion_mapping",
        "register_checkpoint_conversion_mapping",
        "load checkpoints whose weights stock classes rename or merge",
        "it is documented, or classes inherit the conversions of their parents",
    ),
    PrivateName(
        "transformers.dynamic_module_utils",
        "custom_object_save",
        "save a configuration without a model together with its code",
        "`save_pretrained` of configurations also saves the code of the models",
    ),
    PrivateName(
        "transformers.models.auto.configuration_auto",
        "CONFIG_MAPPING_NAMES",
        "look up the name of a stock configuration without importing its file",
        "`CONFIG_MAPPING` tells the names of classes, or `AutoConfig.register` takes one",
    ),
    PrivateName(
        "transformers.loss.loss_utils",
        "fixed_cross_entropy",
        "compute the cross-entropy over the labels of an accumulated batch, as stock models do",
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
        "count the positions of Marian's position embeddings",
        "it is documented",
    ),
    PrivateName(
        "transformers.integrations.neftune",
        "activate_neftune",
        "add noise to the embeddings of a model that a trainer has rebuilt with the heads of a checkpoint",
        "it is documented, or a trainer has a public method for it",
    ),
    PrivateName(
        "transformers.trainer",
        "TRAINER_STATE_NAME",
        "recognise complete checkpoints by this file",
        "it is documented, or trainers can read the state of a checkpoint",
    ),
    PrivateName(
        "transformers.activations",
        "ACT2CLS",
        "recognise the activation functions in relevance propagation",
        "it is documented",
    ),
    PrivateName(
        "transformers.integrations.flash_attention",
        "flash_attention_forward",
        "recognise flash attention kernels by their function, including those from the Hub",
        "kernels declare the keywords that they read",
    ),
    PrivateName(
        "transformers.modeling_flash_attention_utils",
        "FlashAttentionKwargs",
        "list the keywords that flash attention reads",
        "kernels declare the keywords that they read",
    ),
)

OVERRIDDEN_NAMES = (
    PrivateName(
        _TRAINER,
        "_hp_search_setup",
        "freeze the decoder and remove the heads that a checkpoint lacks, after `model_init` has run and a trial has "
        "set its hyperparameters, before the weights are loaded and the optimizer is created",
        "a callback is called at this point; at `on_train_begin` the optimizer already exists",
        _IGNORED,
        "TrainingHooksMixin",
    ),
    PrivateName(
        _TRAINER,
        "_init_training_state",
        "resume a stream where its checkpoint stopped, and start no epoch where a run is complete",
        "the trainer counts the epochs of a stream when it resumes a run, and ends a complete one",
        _IGNORED,
        "ResumedTrainingMixin",
    ),
    PrivateName(
        _TRAINER,
        "_set_signature_columns_if_needed",
        "keep the dataset columns of guidance targets, whose names depend on the configuration and are not in the "
        "signature of the forward pass",
        "the trainer asks the model for the columns that it reads",
        "loses these columns, and the model raises an error, unless `remove_unused_columns=False`",
        "HeadLossMixin",
    ),
    PrivateName(
        _TRAINER,
        "_load_best_model",
        "rebuild the heads of the best checkpoint before its weights are loaded",
        "a callback is called before the best checkpoint is loaded",
        _IGNORED,
        "PrunableMixin, WeightAverageMixin",
    ),
    PrivateName(
        _TRAINER,
        "_get_train_sampler",
        "batch pairs of sentences by the lengths of both",
        "the trainer takes a sampler, or a sampler class",
        _IGNORED,
        "SimilarLengthSeq2SeqTrainer",
    ),
    PrivateName(
        _TRAINER,
        "_internal_call",
        "distinguish checkpoints, which also store trained weights and random states, from models that the user "
        "saves; an argument of `save_model`",
        "a callback is called before the trainer state is written; `on_save` comes after it",
        "raises a TypeError with the name",
        "PrunableMixin, WeightAverageMixin, ResumedTrainingMixin",
    ),
    PrivateName(
        _MODEL,
        "_move_missing_keys_from_meta_to_device",
        "refuse checkpoints that lack more weights than they hold, before memory is allocated for them",
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
        "initialise models without a stock parent, as the guide to custom models requires",
        "it gets a public name",
        _IGNORED,
        "ProxyModel, BowAttentionForSequenceClassification, LstmForSequenceClassification, "
        "LstmSeq2SeqForConditionalGeneration",
    ),
    PrivateName(
        "transformers:GenerationMixin",
        "_supports_default_dynamic_cache",
        "generate with the LSTM state that `forward` returns instead of a cache of keys and values",
        "models have a public flag for a cache of their own",
        _IGNORED,
        "LstmSeq2SeqForConditionalGeneration",
    ),
    PrivateName(
        "transformers:GenerationMixin",
        "_expand_inputs_for_generation",
        "start all beams of a sentence from an LSTM state that is passed to `generate`",
        "`generate` calls a method of the cache to repeat it for each beam",
        _IGNORED,
        "LstmSeq2SeqForConditionalGeneration",
    ),
    PrivateName(
        _MODEL,
        "_tied_weights_keys",
        "tie the embeddings of a generator to those of its discriminator",
        "it gets a public name",
        "trains both parts with separate embeddings",
        "ElectraForJointPreTraining",
    ),
    PrivateName(
        _CONFIGURATION,
        "_attn_implementation",
        "give attention modules the name of headwise attention, and the model the name of its kernel",
        "attention modules take the attention function as an argument",
        "computes attention without guidance and gates",
        "AttentionConfigView",
    ),
    PrivateName(
        _MODULE,
        "_apply",
        "keep gates in single precision when a model is cast to half precision",
        "modules can restrict the dtypes that they are cast to",
        "casts gates to half precision, where small steps are lost",
        "HardConcreteGate",
    ),
)

PRIVATE_NAMES = USED_NAMES + UNDOCUMENTED_NAMES + OVERRIDDEN_NAMES

# Dictionaries of `torch.nn.Module`: its hooks, their kinds, and its tensors.
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
    """Lists the names of [`PRIVATE_NAMES`] that the installed versions lack; imports the libraries.

    Returns:
        `list[str]`: one sentence per missing name: its owner, its purpose, and the behaviour without it.

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
    # Instance attributes are not on the class.
    return hasattr(owner, entry.name) or entry.name in inspect.getsource(owner)


def __getattr__(name: str) -> Any:
    entry = next((entry for entry in UNDOCUMENTED_NAMES if entry.name == name), None)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(entry.owner), name)


# ---- Configurations and classes of models ----


def attention_kernel(config: Any) -> str | None:
    """Name of the attention function in a configuration; `None` before a model is built from it."""
    return config._attn_implementation


def kernel_name(config: Any) -> str:
    """Name of the kernel in a configuration, without a prefix: `eager` for `paged|eager`."""
    return (attention_kernel(config) or "eager").rpartition("|")[2]


def set_attention_kernel(config: Any, name: str | None) -> None:
    """Sets the name of the attention function in a configuration and its sub-configurations, unchecked."""
    config._attn_implementation = name


def supports_sdpa(model: Any) -> bool:
    """Whether a model or model class supports `scaled_dot_product_attention`."""
    return model._supports_sdpa


@cache
def passes_attention_interface(model_class: type) -> bool:
    """Whether a model class calls `AttentionInterface`, which Transformers infers from its source."""
    return model_class._can_set_attn_implementation()


def build_from_config(model_class: type, config: Any, dtype: Any) -> Any:
    """Builds a model with random weights of this dtype; checks its attention function as `from_pretrained` does."""
    return model_class._from_config(config, dtype=dtype)


@cache
def auto_class_names(model_type: str) -> dict[str, str]:
    """Names of the model classes of a `model_type`, by the names of their Auto classes."""
    found = {name: table[model_type] for name, table in _auto_tables().items() if model_type in table}
    # Auto classes load the first of several classes, unless the configuration names another one.
    return {name: classes if isinstance(classes, str) else classes[0] for name, classes in found.items()}


@cache
def _auto_tables() -> dict[str, dict[str, Any]]:
    """Tables of class names by `model_type`, by the names of the Auto classes."""
    import transformers

    names = (name for name in dir(transformers) if name.startswith("AutoModel"))
    mappings = {name: getattr(getattr(transformers, name), "_model_mapping", None) for name in names}
    return {name: mapping._model_mapping for name, mapping in mappings.items() if mapping is not None}


def name_in_auto_class(auto_class: type, config_name: str, model_type: str, class_name: str) -> None:
    """Registers a model with an Auto class by the names of its class and configuration, without importing them."""
    mapping = auto_class._model_mapping
    mapping._model_mapping[model_type] = class_name
    name_configuration(mapping, config_name, model_type)


def name_configuration(mapping: Any, config_name: str, model_type: str) -> None:
    """Registers the class name of a configuration for its `model_type` in a lazy mapping of models or tokenizers."""
    mapping._reverse_config_mapping[config_name] = model_type


# ---- Weights of models ----


def initialise(model: Any, module: Any) -> None:
    """Initialises the weights of a module and its submodules like those of a new model."""
    for parameter in module.parameters():
        if hasattr(parameter, "_is_hf_initialized"):
            parameter._is_hf_initialized = False
    module.apply(model._init_weights)


def mark_initialised(module_or_weight: Any) -> None:
    """Keeps `post_init` and `from_pretrained` from initialising a weight or a module."""
    module_or_weight._is_hf_initialized = True


def ignore_left_over(model: Any, patterns: Iterable[str]) -> None:
    """Lets a model load checkpoints with unexpected weights whose names match these regular expressions."""
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *patterns}


def keep_in_single_precision(model: Any, names: Iterable[str]) -> None:
    """Loads modules and parameters of these names in float32, whatever dtype is requested."""
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *names}


def unsaved_names(model: Any) -> Iterable[str]:
    """Names of the tensors that `save_pretrained` leaves out."""
    return model._keys_to_ignore_on_save or ()


class MissingWeightsMixin:
    """Reports which weights a checkpoint lacks, before they are initialised; precedes the model class."""

    def missing_weights_found(self, names: set[str]) -> None:
        """Called with the weights that a checkpoint lacks, without tied ones, once it has been loaded.

        Args:
            names (`set[str]`): Parameters and buffers that are still on the meta device.
        """

    def _move_missing_keys_from_meta_to_device(self, missing_keys: set[str], *args: Any, **kwargs: Any) -> None:
        self.missing_weights_found(missing_keys - self.all_tied_weights_keys.keys())
        super()._move_missing_keys_from_meta_to_device(missing_keys, *args, **kwargs)


class StockExpertsMixin:
    """A model that computes experts as its stock class does; precedes the model class."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # Transformers infers it from the source file of the class.
        stock = next((base for base in cls.__mro__ if base.__module__.startswith("transformers.models.")), None)
        return super()._can_set_experts_implementation() if stock is None else stock._can_set_experts_implementation()


# ---- Modules of PyTorch ----


def is_compiled_model(model: Any) -> bool:
    """Whether an object is a module that `torch.compile` returned."""
    return hasattr(model, "_orig_mod")


def is_compiled_in_place(module: Any) -> bool:
    """Whether `module.compile()` has been called."""
    return getattr(module, MODULE_COMPILED_CALL, None) is not None


def compiled_model(model: Any) -> Any:
    """Unwraps a module that `torch.compile` returned; returns any other module unchanged."""
    return vars(model).get(MODULE_CHILDREN, {}).get("_orig_mod", model)


def call_after_backward(function: Callable[[], Any]) -> None:
    """Calls a function at the end of the running backward pass; must be called within that pass."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(function)


# ---- Trainers ----


def load_random_state(trainer: Any, checkpoint: str) -> None:
    """Restores all random number generators from a checkpoint of the trainer."""
    trainer._load_rng_state(checkpoint)


def prepared_batch(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Moves a batch to the device of the trainer, as a training step does."""
    return trainer._prepare_inputs(batch)


def generation_arguments(trainer: Any) -> dict[str, Any]:
    """Arguments of `generate` from the last call of `evaluate` or `predict` of a `Seq2SeqTrainer`."""
    return getattr(trainer, "_gen_kwargs", {})


def is_fused_by_trl(forward: Callable) -> bool:
    """Whether trl has replaced the forward method of a model by one that may fuse the output layer with the loss.

    Copies of the model have this method too, but it then runs the original model.
    """
    # It has the signature of the class, but its own defaults.
    return "fused_lm_head" in (getattr(forward, "__kwdefaults__", None) or {}) and not hasattr(forward, "has_heads")


def keep_dataset_columns(trainer: Any, names: Iterable[str]) -> None:
    """Adds to the columns that a trainer keeps in its datasets, once it has collected them."""
    kept = trainer._signature_columns
    kept += [name for name in names if name not in kept]
