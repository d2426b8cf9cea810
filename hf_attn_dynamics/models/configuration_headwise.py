# Licensed under the Apache License, Version 2.0.
"""What every headwise configuration adds to its stock parent, and how it is checked."""

import difflib
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .head_settings import HeadSettings
from .head_sites import HeadSite
from .saved_code import SavedCodeMixin
from .size_limits import LimitedConfigMixin


@dataclass(kw_only=True, repr=False, eq=False)  # those of the stock class, which know all of its values
class HeadwiseConfigMixin(SavedCodeMixin, LimitedConfigMixin):
    """Adds guided, gated, removed and hard-coded heads to a stock configuration.

    Models with heads at several sites (an encoder–decoder, or a decoder with cross-attention) name the site in each of
    the values below: `{"encoder": …, "decoder": …, "cross": …}`, of which some may be left out.

    Args:
        guidance (`dict`, *optional*): Which heads are guided towards which pattern; `None` for no guidance. Keys:

            - `fraction` (`float`, defaults to 0.5): Share λ of the heads of every layer that is guided, rounded.
            - `patterns` (`list[str]`): Pattern of head 0, head 1, …; the last one also serves the guided heads that
              are left. Of `next`, `prev`, `first`, `delim`, `period`, `self` and those registered with
              `register_pattern`. By default `next`, `prev`, `first` in an encoder, `prev`, `first` in a decoder, and
              `self`, `prev`, `next`, `first` in cross-attention, cut down to the number of guided heads.
            - `heads` (`dict`, *optional*): Explicit assignment in place of the two keys above: `{pattern: [heads]}`
              for every layer, or `{layer: {pattern: [heads]}}` with the guided layers only.
            - `reduction` (`str`, defaults to `"row_mean"`): How squared errors are reduced, summed over layers.
              `row_mean`: mean over a pattern's heads, rows and sentences, summed over patterns; `paper`: summed over
              heads and rows, mean over sentences; `code`: like `row_mean`, but also divided by the number of keys
              that some row sees.
            - `edge_rows` (`str`, defaults to `"uniform"`): Target of rows without the key that `next`, `prev` or
              `self` wants, such as the last row of `next`: `uniform` over the keys that the row sees (the paper), or
              `zero` (its published code).
            - `delimiter_token_ids`, `period_token_ids` (`list[int]`): Tokens that `delim` and `period` attend to;
              delimiters default to the configuration's `bos_token_id` and `eos_token_id`.

            A row of a decoder sees the tokens up to its own, so there is no `next`, and targets are cut down to what
            the row sees: `period` is uniform over the periods so far, and a row before the first adds nothing to the
            loss. In cross-attention, rows are tokens of the target and keys those of the source: `first`, `delim`
            and `period` are the source's, and row p attends to its token p (`self`), p + 1 (`next`) or p − 1
            (`prev`). The rows that count at these sites are the tokens of `decoder_attention_mask` or, without one,
            those whose label is not -100; without labels, all. At every site, the mean over sentences is over those
            with a real token in the model's `attention_mask`.

        gates (`dict`, *optional*): Gives each head a Hard Concrete gate; `{}` for those of the paper, `None` for no
            gates. Keys:

            - `variant` (`str`, defaults to `"paper"`): Defaults of the next three keys; `paper_code` for those of
              its published code.
            - `initial_log_alpha` (`float` or `[low, high]`, defaults to 2.5): φ at the start, or where it is drawn.
            - `evaluation` (`str`, defaults to `"binary"`): Gates outside training: 0 or 1 (`binary`) or in between
              (`fractional`).
            - `penalty` (`str`, defaults to `"sum"`): Whether the penalty sums the expected open gates over gated
              modules, or takes the mean (`module_mean`).
            - `temperature` (`float`, defaults to 0.33), `limits` (`[γ, ζ]`, defaults to [-0.1, 1.1]): Of the Hard
              Concrete distribution.
            - `unit` (`str`, defaults to `"group"`): Where several query heads share a key and a value, whether each
              such group has one gate, or each query head has (`head`). Only whole groups can be removed.

        pruned_heads (`dict`, *optional*): Heads that are gone, `{layer: [heads]}`, in the numbering of a model that
            has all its heads. `num_attention_heads` stays what it was.
        hard_coded (`dict`, *optional*): Fixes attention to normal densities beside each token (You et al. 2020), in
            an encoder or the self-attention of a decoder; `{}` for those of the paper, `None` for learned attention.
            Positions count real tokens only, a density is normalised over the keys that a row sees, and there are no
            projections to queries and keys. Needs the kernels `sdpa` or `eager`, for their masks. Keys:

            - `offsets` (`list[int]`, defaults to `[-1, 1]`, in a decoder to `[-1, 0]`): Where the densities are
              centred, relative to the row's own position; shared out among the heads in equal blocks.
            - `std` (`float`, defaults to 1.0): Their standard deviation, in tokens.

    Raises:
        ValueError: if a value above is not possible; the message names it and the way out.
    """

    # What a trainer is not to collect over an evaluation: all but what the head on top gives.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "cache",
        "encoder_last_hidden_state",
        "guidance_loss",
        "gate_penalty",
        "task_losses",
        "task_loss",
    ]

    guidance: dict | None = None
    gates: dict | None = None
    pruned_heads: dict | None = None
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
        """Reads a configuration file; one of the stock parent becomes one of this class."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        # A list, since a damaged file may have anything as its type.
        known = [parent.model_type for parent in cls.__mro__ if getattr(parent, "model_type", "")]
        if config_dict.get("model_type") in known:
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Builds a configuration; what keywords say of heads replaces that of `config_dict` before it is read."""
        own = {field.name: kwargs[field.name] for field in fields(HeadwiseConfigMixin) if field.name in kwargs}
        return super().from_dict({**config_dict, **own}, **kwargs)

    def code_map(self) -> dict[str, str]:
        # Not above, since that file imports this one. Named here, it is saved beside this one.
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
        """Kinds of sites at which a token attends to no later ones."""
        return ["encoder", "decoder"] if self.architecture.causal_encoder else ["decoder"]

    def _sites_of_two_stacks(self) -> dict[HeadSite, int]:
        layers = {"encoder": _first_of(self, "encoder_layers", "num_layers")}
        layers["decoder"] = layers["cross"] = _first_of(self, "decoder_layers", "num_decoder_layers", "num_layers")
        heads = {"encoder": _first_of(self, "encoder_attention_heads", "num_heads")}
        heads["decoder"] = heads["cross"] = _first_of(self, "decoder_attention_heads", "num_heads")
        return {HeadSite(kind, layer): heads[kind] for kind in layers for layer in range(layers[kind])}

    def head_settings(self) -> HeadSettings:
        """All that the configuration says of heads, typed, completed and checked.

        Raises:
            ValueError: names the offending value and the way out.
        """
        return HeadSettings.of(self)

    def check_heads(self) -> HeadSettings:
        """Completes and checks what is said of heads; runs at construction, and again when a model is built.

        The second time is for values assigned in between, as `from_pretrained(…, guidance=…)` does.

        Returns:
            [`HeadSettings`]: the settings.

        Raises:
            ValueError: names the offending value and the way out.
        """
        settings = self.head_settings()
        for name, value in settings.to_config().items():
            setattr(self, name, value)
        return self.head_settings()

    def kept_heads(self) -> dict[HeadSite, list[int]]:
        """Heads that are left at each site, in the original numbering.

        Example:
            >>> from hf_attn_dynamics import HeadwiseRobertaConfig
            >>> config = HeadwiseRobertaConfig(num_hidden_layers=1, num_attention_heads=4, pruned_heads={0: [1]})
            >>> config.kept_heads()
            {HeadSite(kind='encoder', layer=0): [0, 2, 3]}
        """
        return self.head_settings().kept_heads()

    def guided_heads(self, kind: str | None = None) -> dict[int, dict[str, list[int]]]:
        """Heads of each pattern in each guided layer of one kind of site, as `{layer: {pattern: [heads]}}`.

        Empty without guidance. Heads that are removed are not among them.

        Args:
            kind (`str`, *optional*): `encoder`, `decoder` or `cross`; if not given, the encoder, or the decoder of a
                model without one.

        Raises:
            ValueError: if the assignment does not fit the model; the message names the layer, head or pattern. Also
                if the model has no such site.

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
                f"kind must be one of {', '.join(settings.kinds)}, where this model has heads, got {kind!r}."
            )
        return settings.guided_heads(kind)

    def guidance_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of the guidance, for each kind of site that has guided heads."""
        return {kind: settings.to_dict() for kind, settings in self.head_settings().guidance.items()}

    def gate_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of the gates, for each kind of site that has gates."""
        return {kind: settings.to_dict() for kind, settings in self.head_settings().gates.items()}

    def hard_coded_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of hard-coded attention, for each kind of site that has it."""
        return {kind: settings.to_dict() for kind, settings in self.head_settings().hard_coded.items()}

    def max_positions(self) -> int | None:
        """Largest number of tokens that the position embeddings serve; `None` if any number."""
        # Rotary positions have no table, and DeBERTa may go without: the value says how long the sentences of
        # pretraining were.
        if hasattr(self, "rope_parameters") or not getattr(self, "position_biased_input", True):
            return None
        counts = [getattr(self, name, None) for name in ("max_position_embeddings", "max_target_positions")]
        return min((count for count in counts if count), default=None)


def _first_of(config: Any, *names: str) -> Any:
    """The first of some values that a configuration has."""
    return next(value for name in names if (value := getattr(config, name, None)) is not None)
