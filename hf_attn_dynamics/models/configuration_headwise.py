# Licensed under the Apache License, Version 2.0.
"""Settings that headwise configurations add to their stock parents."""

import difflib
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .head_settings import HeadSettings
from .head_sites import HeadSite
from .saved_code import SavedCodeMixin
from .size_limits import LimitedConfigMixin


@dataclass(kw_only=True, repr=False, eq=False)  # the stock class has `__repr__` and `__eq__` over all values
class HeadwiseConfigMixin(SavedCodeMixin, LimitedConfigMixin):
    """Adds guided, gated, removed and hard-coded heads to a stock configuration.

    For models with heads at several sites (an encoder–decoder, or a decoder with cross-attention), each value below is
    a dictionary by site, `{"encoder": …, "decoder": …, "cross": …}`, from which sites may be omitted.

    Args:
        guidance (`dict`, *optional*): Attention patterns of the guided heads; `None` for no guidance. Keys:

            - `fraction` (`float`, defaults to 0.5): Fraction λ of guided heads in every layer; the number is rounded.
            - `patterns` (`list[str]`): Pattern of head 0, head 1, …; all further guided heads get the last one. One of
              `next`, `prev`, `first`, `delim`, `period`, `self` or a name registered with `register_pattern`. Defaults
              to `next`, `prev`, `first` in an encoder, `prev`, `first` in a decoder, and `self`, `prev`, `next`,
              `first` in cross-attention, truncated to the number of guided heads.
            - `heads` (`dict`, *optional*): Explicit assignment that replaces the two keys above: `{pattern: [heads]}`
              for every layer, or `{layer: {pattern: [heads]}}` with the guided layers only.
            - `reduction` (`str`, defaults to `"row_mean"`): Reduction of squared errors, summed over layers.
              `row_mean`: mean over a pattern's heads, rows and sentences, summed over patterns; `paper`: summed over
              heads and rows, mean over sentences; `code`: like `row_mean`, but also divided by the number of keys
              that some row attends to.
            - `edge_rows` (`str`, defaults to `"uniform"`): Target of rows without the key that `next`, `prev` or
              `self` attends to, such as the last row of `next`: `uniform` over the visible keys (the paper), or `zero`
              (its published code).
            - `delimiter_token_ids`, `period_token_ids` (`list[int]`): Tokens that `delim` and `period` attend to;
              delimiters default to the configuration's `bos_token_id` and `eos_token_id`.
            - `targets` (`dict[str, str]`, *optional*): `{name: form}`, targets that each batch brings; `heads` or
              `patterns` assign heads to these names as to patterns. Padding positions count in the indices of keys and
              rows, and rows on padding do not count. Forms, see [`rows_of_target`]: `keys`, `guidance_NAME` of shape
              `(batch, rows)` with the index of one key for each row, -100 for rows that do not count; `weights`,
              `guidance_NAME` of shape `(batch, keys)` with one distribution for all rows; `sparse`, `guidance_NAME`
              and `guidance_NAME_weights` of shape `(batch, rows, k)` with keys and their weights. Distributions are
              normalised to the sum 1. With `row_mean` and `code`, the loss is the mean over all rows of the batch that
              count and have a target, instead of the mean over sentences of their means.
            - `loss` (`str` or `dict[str, str]`, defaults to `"squared"`): Loss between attention H and the target
              distribution P of a row, for all heads or by pattern or target. `squared`: ‖H − P‖²; `cross_entropy`:
              −Σ P log H; `mass`: −log of the attention that falls on the keys of P, whatever their weights; `avoid`:
              that attention itself, so that heads are pushed away. Rows to which `edge_rows` applies contribute to
              `squared` and, with `uniform`, to `cross_entropy` only.

            - `teacher` (`dict`, *optional*): What heads learn from another model, whose attention comes with each
              batch, see [`Teacher`]. Unless `fraction`, `patterns` or `heads` are given beside it, no other heads are
              guided. The loss is called `teacher` where patterns and targets are named. Keys: `layers`, `{layer of the
              student: layer of the teacher}`; `heads`, `same` (the default, for equal numbers of heads), `{head: head
              of the teacher}` for all these layers, or that by layer; `loss`, `kl` for KL(teacher‖student) (the
              default) or `squared`; `relations`, a list of `query`, `key`, `value` (the attention of these vectors to
              themselves) and `query_key` (Wang et al. 2021), whose vectors are split into `relation_heads` heads, by
              default as many as the teacher has, so that the numbers of heads may differ. With `relations`, heads
              learn only if `heads` is given. Keys that one of the two does not see are left out of the teacher's
              attention.

            In a decoder, attention is causal: `next` is not available, and targets are restricted to the visible keys.
            `period` is uniform over the preceding periods, and rows before the first one do not contribute to the
            loss. In cross-attention, rows are target tokens and keys are source tokens: `first`, `delim` and `period`
            refer to the source, and row p attends to source token p (`self`), p + 1 (`next`) or p − 1 (`prev`). At
            these two sites, the loss is over the rows of `decoder_attention_mask` or, without it, those whose label is
            not -100, or all rows without labels. At every site, the mean over sentences is over those with a
            non-padding token in `attention_mask`.

        gates (`dict`, *optional*): Settings of the Hard Concrete gates of heads, feed-forward units and blocks; `{}`
            for the paper's gates of heads, `None` for no gates. Keys:

            - `variant` (`str`, defaults to `"paper"`): Defaults of the next three keys: `paper`, or `paper_code` for
              its published code.
            - `initial_log_alpha` (`float` or `[low, high]`, defaults to 2.5): Initial φ, or the interval from which it
              is drawn uniformly.
            - `evaluation` (`str`, defaults to `"binary"`): Gates outside training: 0 or 1 (`binary`), or any value in
              [0, 1] (`fractional`).
            - `penalty` (`str`, defaults to `"sum"`): Reduction of the expected number of open gates over gated
              modules: `sum` or `module_mean`.
            - `temperature` (`float`, defaults to 0.33), `limits` (`[γ, ζ]`, defaults to [-0.1, 1.1]): Parameters of
              the Hard Concrete distribution.
            - `unit` (`str`, defaults to `"group"`): Whether query heads that share a key/value head share one gate
              (`group`), or each have their own (`head`). Only whole groups can be removed.
            - `parts` (`list[str]`, defaults to `["heads"]`): What has gates, some of `heads`, `units` (of feed-forward
              blocks, in `encoder` and `decoder`) and `blocks` (each attention block and each feed-forward block). A
              gate of a block multiplies those of its heads or units; a block with a closed gate adds the bias of its
              output projection. A layer is gone when its blocks are.

        pruned_heads (`dict`, *optional*): Removed heads, `{layer: [heads]}`, in the original numbering.
            `num_attention_heads` keeps the original number.
        pruned_units (`dict`, *optional*): Removed feed-forward units, `{layer: "0-3,17"}` as ranges or `{layer:
            [units]}`, in the original numbering; the sites of an encoder–decoder are `encoder` and `decoder`.
            `intermediate_size` keeps the original number.
        added_biases (`bool`, defaults to `False`): Whether output projections without a bias in the stock class have
            one, for what removed heads and units gave on average.
        hard_coded (`dict`, *optional*): Replaces attention by normal densities around each token (You et al. 2020), in
            an encoder or the self-attention of a decoder; `{}` for the paper's densities, `None` for learned
            attention. Positions count non-padding tokens only, a density is normalised over the visible keys, and
            there are no query and key projections. Needs the kernel `sdpa` or `eager`. Keys:

            - `offsets` (`list[int]`, defaults to `[-1, 1]`, in a decoder to `[-1, 0]`): Centres of the densities,
              relative to the row's own position, assigned to the heads in equal blocks.
            - `std` (`float`, defaults to 1.0): Standard deviation of the densities, in tokens.

    Raises:
        ValueError: if a value above is invalid; the message names it and the way out.
    """

    # Outputs that trainers do not collect during evaluation: all but those of the task head.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "cache",
        "encoder_last_hidden_state",
        "guidance_loss",
        "guidance_losses",
        "gate_penalty",
        "task_losses",
        "task_loss",
        "guided_hits",
    ]

    guidance: dict | None = None
    gates: dict | None = None
    pruned_heads: dict | None = None
    pruned_units: dict | None = None
    added_biases: bool = False
    hard_coded: dict | None = None

    def __post_init__(self, **kwargs):
        own = [field.name for field in fields(HeadwiseConfigMixin)]
        for name in kwargs:
            if meant := difflib.get_close_matches(name, own, n=1, cutoff=0.7):
                raise ValueError(f"{type(self).__name__} has no {name!r}; did you mean {meant[0]!r}?")
        super().__post_init__(**kwargs)
        self.check_heads()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Reads a configuration file; converts a stock configuration into one of this class."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        # A list, since `model_type` may be unhashable in a damaged file.
        known = [parent.model_type for parent in cls.__mro__ if getattr(parent, "model_type", "")]
        if config_dict.get("model_type") in known:
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Builds a configuration; keywords for heads override `config_dict` before it is checked."""
        own = {field.name: kwargs[field.name] for field in fields(HeadwiseConfigMixin) if field.name in kwargs}
        return super().from_dict({**config_dict, **own}, **kwargs)

    def code_map(self) -> dict[str, str]:
        # A circular import otherwise; Transformers saves the files that this one imports.
        from .headwise_classes import code_map

        return code_map(self.architecture)

    def saved_code(self) -> Any:
        from .headwise_classes import code_map

        return code_map

    def attention_sites(self) -> dict[HeadSite, int]:
        """Number of heads, removed ones included, at each site of the model."""
        if self.is_encoder_decoder:
            return self._sites_of_two_stacks()
        is_causal = getattr(self, "is_decoder", False) or self.architecture.is_decoder
        kinds = ["decoder" if is_causal else "encoder"]
        if getattr(self, "add_cross_attention", False):
            kinds.append("cross")
        heads, layers = self.num_attention_heads, range(self.num_hidden_layers)
        return {HeadSite(kind, layer): heads for kind in kinds for layer in layers}

    def causal_kinds(self) -> list[str]:
        """Kinds of sites with causal attention."""
        return ["encoder", "decoder"] if self.architecture.causal_encoder else ["decoder"]

    def _sites_of_two_stacks(self) -> dict[HeadSite, int]:
        layers = {"encoder": _first_of(self, "encoder_layers", "num_layers")}
        layers["decoder"] = layers["cross"] = _first_of(self, "decoder_layers", "num_decoder_layers", "num_layers")
        heads = {"encoder": _first_of(self, "encoder_attention_heads", "num_heads")}
        heads["decoder"] = heads["cross"] = _first_of(self, "decoder_attention_heads", "num_heads")
        return {HeadSite(kind, layer): heads[kind] for kind in layers for layer in range(layers[kind])}

    def head_settings(self) -> HeadSettings:
        """Returns all settings of heads, typed, with defaults filled in, and checked.

        Raises:
            ValueError: if a value is invalid; the message names it and the way out.
        """
        return HeadSettings.of(self)

    def check_heads(self) -> HeadSettings:
        """Fills in and checks the settings of heads; runs at construction, and again when a model is built.

        The second run covers values assigned in between, as by `from_pretrained(…, guidance=…)`.

        Returns:
            [`HeadSettings`]: the settings.

        Raises:
            ValueError: if a value is invalid; the message names it and the way out.
        """
        settings = self.head_settings()
        for name, value in settings.to_config().items():
            setattr(self, name, value)
        if "decoder" in (settings.guidance or ()) and getattr(self, "is_causal", None) is False:
            raise ValueError(
                "guidance of a decoder is that of causal attention, but is_causal=False makes its attention "
                "bidirectional; leave one of them out."
            )
        return self.head_settings()

    def kept_heads(self) -> dict[HeadSite, list[int]]:
        """Remaining heads at each site, in the original numbering.

        Example:
            >>> from hf_attn_dynamics import HeadwiseRobertaConfig
            >>> config = HeadwiseRobertaConfig(num_hidden_layers=1, num_attention_heads=4, pruned_heads={0: [1]})
            >>> config.kept_heads()
            {HeadSite(kind='encoder', layer=0): [0, 2, 3]}
        """
        return self.head_settings().kept_heads()

    def guided_heads(self, kind: str | None = None) -> dict[int, dict[str, list[int]]]:
        """Heads of each pattern in each guided layer of one kind of site, as `{layer: {pattern: [heads]}}`.

        Empty without guidance. Removed heads are left out.

        Args:
            kind (`str`, *optional*): `encoder`, `decoder` or `cross`; defaults to the encoder, or to the decoder in a
                model without an encoder.

        Raises:
            ValueError: if the assignment does not fit the model, or the model has no such site.

        Example:
            >>> from hf_attn_dynamics import HeadwiseRobertaConfig
            >>> config = HeadwiseRobertaConfig(num_hidden_layers=1, guidance={"fraction": 0.5})
            >>> config.guided_heads()
            {0: {'next': [0], 'prev': [1], 'first': [2, 3, 4, 5]}}
        """
        settings = self.head_settings()
        kind = settings.kinds[0] if kind is None else kind
        if kind not in settings.kinds:
            raise ValueError(
                f"kind must be one of {', '.join(settings.kinds)}, the sites of this model, got {kind!r}."
            )
        return settings.guided_heads(kind)

    def guidance_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of the guidance by kind of site, where heads are guided."""
        return {kind: settings.to_dict() for kind, settings in self.head_settings().guidance.items()}

    def gate_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of the gates by kind of site, where there are gates."""
        return {kind: settings.to_dict() for kind, settings in self.head_settings().gates.items()}

    def hard_coded_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of hard-coded attention by kind of site, where attention is hard-coded."""
        return {kind: settings.to_dict() for kind, settings in self.head_settings().hard_coded.items()}

    def max_positions(self) -> int | None:
        """Largest number of tokens for which there are position embeddings; `None` for no limit."""
        # Models with rotary positions, and some DeBERTa models, have no table of positions: `max_position_embeddings`
        # is then the length of the pretraining sentences.
        if hasattr(self, "rope_parameters") or not getattr(self, "position_biased_input", True):
            return None
        counts = [getattr(self, name, None) for name in ("max_position_embeddings", "max_target_positions")]
        return min((count for count in counts if count), default=None)


def _first_of(config: Any, *names: str) -> Any:
    """Returns the first of these attributes that a configuration has."""
    return next(value for name in names if (value := getattr(config, name, None)) is not None)
