# Licensed under the Apache License, Version 2.0.
"""LSTM encoder, LSTM decoder and dot attention (Luong et al. 2015), as in Snell et al. 2021."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils import ModelOutput, can_return_tuple

from .compat import fixed_cross_entropy, shift_tokens_right
from .configuration_lstm_seq2seq import LstmSeq2SeqConfig
from .embedding_words import WordReader, check_words, uniform_weights
from .freezing import FreezingModel
from .ignored_labels import is_labelled
from .input_checks import can_check, check_labels
from .masked_lstm import call_lstm, run_lstm
from .output_layer import OutputLayer
from .pytorch_initialization import initialize_as_pytorch
from .resizing import TranslationVocabularyMixin


@dataclass
class LstmEncoderOutput(ModelOutput):
    """Output of the encoder. The batch is the first dimension of all tensors, as `generate()` requires.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch, source length, hidden_size)`): State h_l of each
            word, 0 at padding.
        final_hidden (`torch.FloatTensor` of shape `(batch, layers, hidden_size)`): Last h of each layer.
        final_cell (`torch.FloatTensor` of shape `(batch, layers, hidden_size)`): Last c of each layer.
        attention_mask (`torch.BoolTensor` of shape `(batch, source length)`): False at padding.
        hidden_states (`tuple[torch.FloatTensor]`, *optional*): `(last_hidden_state,)`.
    """

    last_hidden_state: torch.FloatTensor | None = None
    final_hidden: torch.FloatTensor | None = None
    final_cell: torch.FloatTensor | None = None
    attention_mask: torch.BoolTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None


class LstmState:
    """State of the decoder, which `generate()` passes from step to step as `cache`.

    Args:
        hidden (`torch.Tensor` of shape `(layers, batch, hidden_size)`)
        cell (`torch.Tensor` of shape `(layers, batch, hidden_size)`)
        length (`int`): Number of words that have been read.
    """

    # Read by `generate()`: earlier states are not kept, so words cannot be removed; each step returns a new object,
    # which compiled code does not support; and words that have been read are not passed again.
    is_croppable = False
    is_compileable = False
    is_linear = (False,)

    def __init__(self, hidden: torch.Tensor, cell: torch.Tensor, length: int = 0):
        self.hidden = hidden
        self.cell = cell
        self.length = length

    @property
    def batch_size(self) -> int:
        """Number of target sentences."""
        return self.hidden.shape[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of words that have been read."""
        return self.length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Selects the state of the parent of each beam."""
        self.hidden = self.hidden.index_select(1, beam_idx)
        self.cell = self.cell.index_select(1, beam_idx)


class LstmEncoder(WordReader, nn.Module):
    """Embeddings and LSTM of the encoder; bidirectional states are added or concatenated."""

    main_input_name = "input_ids"

    def __init__(self, config: LstmSeq2SeqConfig):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.embedding_size, config.pad_token_id)
        self.lstm = nn.LSTM(
            config.embedding_size,
            config.hidden_size // (2 if config.directions == "concatenated" else 1),
            config.num_hidden_layers,
            batch_first=True,
            dropout=config.dropout,
            bidirectional=config.bidirectional,
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> LstmEncoderOutput:
        """States of source sentences; `output_attentions`, which `generate()` passes, is ignored."""
        embedded, real = self.embedded_words(input_ids, attention_mask, inputs_embeds)
        states, final = run_lstm(self.lstm, embedded, real)
        if self.config.bidirectional:
            # Last states are ordered by layer, then by direction.
            final = [state.unflatten(0, (-1, 2)) for state in final]
            if self.config.directions == "added":
                states = states.unflatten(-1, (2, -1)).sum(-2)
                final = [state.sum(1) for state in final]
            else:
                final = [state.transpose(1, 2).flatten(2) for state in final]
        hidden, cell = (state.transpose(0, 1) for state in final)
        return LstmEncoderOutput(states, hidden, cell, real, (states,) if output_hidden_states else None)


class DotAttention(nn.Module):
    """Softmax over the source of a_tl = s_tᵀ W h_l, with a matrix W for each head."""

    def __init__(self, config: LstmSeq2SeqConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, self.num_heads * config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor, sources: torch.Tensor, real: torch.BoolTensor) -> torch.Tensor:
        """Weights of shape `(batch, heads, target length, source length)`."""
        queries = self.query(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        scores = queries @ sources.mT[:, None]
        return scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)


class UniformAttention(nn.Module):
    """Uniform attention over the words of the source."""

    def forward(self, states: torch.Tensor, sources: torch.Tensor, real: torch.BoolTensor) -> torch.Tensor:
        """Weights of shape `(batch, 1, target length, source length)`."""
        return uniform_weights(real, states.dtype)[:, None, None].expand(-1, 1, states.shape[1], -1)


class MlpReadout(nn.Module):
    """Readout N([c, s]): one hidden layer with a ReLU (equation 2). Contexts and states are broadcast."""

    def __init__(self, config: LstmSeq2SeqConfig):
        super().__init__()
        self.context = nn.Linear(config.hidden_size, config.readout_size)
        self.state = nn.Linear(config.hidden_size, config.readout_size, bias=False)
        self.output = OutputLayer(config.readout_size, config.num_target_words)

    def forward(self, contexts: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self.output((self.context(contexts) + self.state(states)).relu())


class AdditiveReadout(nn.Module):
    """Readout W(c + s) (equation 33). Contexts and states are broadcast."""

    def __init__(self, config: LstmSeq2SeqConfig):
        super().__init__()
        self.output = OutputLayer(config.hidden_size, config.num_target_words)

    def forward(self, contexts: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self.output(contexts + states)


class LstmSeq2SeqForConditionalGeneration(TranslationVocabularyMixin, FreezingModel, GenerationMixin):
    """LSTM encoder–decoder with attention for translation.

    `s_t = LSTM(y_<t)` starts from the encoder's last state, `α_t = softmax(s_tᵀ W h)`, `c_t = Σ_l α_tl h_l` and
    `p_t = softmax(N([c_t, s_t]))`. Contexts are not inputs of the decoder, so that all target words are trained in
    parallel.

    By these equations, the translation model of the paper (see [`LstmSeq2SeqConfig`]) has 5,935,168 parameters without
    its embeddings. The paper counts 6,132,544; it does not explain the other 197,376, the size of three layers of
    256 × 256.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
        >>> model = LstmSeq2SeqForConditionalGeneration(LstmSeq2SeqConfig(vocab_size=20, hidden_size=16))
        >>> output = model(torch.tensor([[5, 6, 7, 2]]), labels=torch.tensor([[7, 6, 2]]), output_attentions=True)
        >>> output.logits.shape, output.cross_attentions[0].shape
        (torch.Size([1, 3, 20]), torch.Size([1, 1, 3, 4]))
        >>> model.generate(torch.tensor([[5, 6, 7, 2]]), max_new_tokens=4, min_new_tokens=4, num_beams=2).shape
        torch.Size([1, 5])
    """

    config_class = LstmSeq2SeqConfig
    main_input_name = "input_ids"
    # The trainer divides by the number of labels of an accumulated batch, which forward() takes.
    accepts_loss_kwargs = True

    def __init__(self, config: LstmSeq2SeqConfig):
        super().__init__(config)
        self.encoder = LstmEncoder(config)
        if not config.share_encoder_decoder_embeddings:
            self.decoder_embeddings = nn.Embedding(config.num_target_words, config.embedding_size, config.pad_token_id)
        self.decoder = nn.LSTM(
            config.embedding_size,
            config.hidden_size,
            config.num_hidden_layers,
            batch_first=True,
            dropout=config.dropout,
        )
        self.attention = UniformAttention() if config.attention == "uniform" else DotAttention(config)
        self.readout = (MlpReadout if config.readout == "mlp" else AdditiveReadout)(config)
        self.freeze()
        self.post_init()

    def freeze(self) -> None:
        self.requires_grad_(not self.config.train_attention_only)
        self.attention.requires_grad_(self.config.attention == "learned")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """PyTorch's default initialisation, since the paper names none."""
        initialize_as_pytorch(module, self.config.embedding_std)

    def get_encoder(self) -> LstmEncoder:
        return self.encoder

    def get_output_embeddings(self) -> nn.Linear:
        return self.readout.output

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.readout.output = value

    def _word_tables(self) -> list[tuple[nn.Module, str]]:
        return [(self.encoder, "embeddings")]

    def _target_tables(self) -> list[tuple[nn.Module, str]]:
        own = [] if self.config.share_encoder_decoder_embeddings else [(self, "decoder_embeddings")]
        return [*own, (self.readout, "output")]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # forward() creates the state, whose size does not depend on the length.
        return False

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generates without changing its inputs."""
        if kwargs.get("encoder_outputs") is not None:
            # A copy, since beam search expands it in place.
            kwargs["encoder_outputs"] = copy.copy(kwargs["encoder_outputs"])
        return super().generate(inputs, *args, **kwargs)

    def _expand_inputs_for_generation(self, expand_size=1, *args, input_ids=None, **kwargs):
        """Repeats the state of each sentence for its beams, unless it has one for each beam."""
        cache = kwargs.get("cache")
        if cache is not None and cache.batch_size == input_ids.shape[0]:
            hidden, cell = (one.repeat_interleave(expand_size, 1) for one in (cache.hidden, cache.cell))
            kwargs["cache"] = LstmState(hidden, cell, cache.length)
        return super()._expand_inputs_for_generation(expand_size, *args, input_ids=input_ids, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, cache=None, **kwargs):
        """Inputs of the next step of `generate()`: the target words that the state has not read.

        Raises:
            ValueError: if there are none, or the state has another batch size.
        """
        if cache is not None:
            if cache.batch_size != input_ids.shape[0]:
                raise ValueError(
                    f"cache has the state of {cache.batch_size} sentences, but {input_ids.shape[0]} are generated, "
                    "beams included: pass a state for each sentence or for each beam."
                )
            next_sequence_length = input_ids.shape[1] - cache.length
            if next_sequence_length < 1:
                raise ValueError(
                    f"decoder_input_ids have {input_ids.shape[1]} words, but cache has read {cache.length}: pass all "
                    "words, including those that it has read, and at least one more."
                )
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, cache=cache, **kwargs
        )

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Shifts labels to the right for the decoder, with padding for -100; of shape `(batch, target length)`.

        Raises:
            ValueError: if there is a label -100, but no padding token.
        """
        pad_token_id = self.config.pad_token_id
        if pad_token_id is None:
            if not is_labelled(labels).all():
                raise ValueError(
                    "labels contain -100, which the decoder reads as padding, but pad_token_id is None; set it in the "
                    "configuration, or pass decoder_input_ids."
                )
            pad_token_id = 0  # required, but not used
        return shift_tokens_right(labels, pad_token_id, self.config.decoder_start_token_id)

    def decode(self, decoder_input_ids: torch.LongTensor, cache: LstmState) -> tuple[torch.Tensor, LstmState]:
        """Runs the decoder over target words.

        Args:
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target length)`): Words, padded on the right.
            cache (`LstmState`): Initial state.

        Returns:
            `tuple[torch.Tensor, LstmState]`: states s_t of shape `(batch, target length, hidden_size)`, and the final
            state.
        """
        shared = self.config.share_encoder_decoder_embeddings
        embeddings = self.encoder.embeddings if shared else self.decoder_embeddings
        if can_check():
            check_words("decoder_input_ids", decoder_input_ids, embeddings, "the number of target words")
            if len(decoder_input_ids) != cache.batch_size:
                raise ValueError(
                    f"the target has {len(decoder_input_ids)} sentences, but the source has {cache.batch_size}; pass "
                    "one target for each source."
                )
        states, (hidden, cell) = call_lstm(self.decoder, embeddings(decoder_input_ids), (cache.hidden, cache.cell))
        return states, LstmState(hidden, cell, cache.length + decoder_input_ids.shape[1])

    def word_contexts(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of the readout if all heads attend to a single source word.

        Args:
            input_ids, attention_mask, inputs_embeds, labels, decoder_input_ids: See `forward`.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: the context for each word, of shape `(batch, 1, source length,
            hidden_size)`, and states s_t, of shape `(batch, target length, 1, hidden_size)`.
        """
        if decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        encoded = self.encoder(input_ids, attention_mask, inputs_embeds, return_dict=True)
        states, _ = self.decode(decoder_input_ids, self.first_state(encoded))
        return encoded.last_hidden_state[:, None] * self.config.num_attention_heads, states[:, :, None]

    def first_state(self, encoded: LstmEncoderOutput) -> LstmState:
        """Initial state of the decoder: the final state of the encoder."""
        return LstmState(*(one.transpose(0, 1).contiguous() for one in (encoded.final_hidden, encoded.final_cell)))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        encoder_outputs: LstmEncoderOutput | tuple[torch.Tensor, ...] | None = None,
        cache: LstmState | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> Seq2SeqLMOutput:
        """Logits of the next target words.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source length)`, *optional*): Source words.
            attention_mask (`torch.Tensor` of shape `(batch, source length)`, *optional*): 0 for padding, on either
                side; without it, `config.pad_token_id` is padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target length)`, *optional*): Target words, shifted
                to the right and padded on the right; by default the shifted labels.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, source length, embedding_size)`, *optional*): Replaces
                `input_ids`.
            encoder_outputs ([`LstmEncoderOutput`], *optional*): Replaces the source and its mask.
            cache ([`LstmState`], *optional*): State of the decoder; defaults to the final state of the encoder.
            labels (`torch.LongTensor` of shape `(batch, target length)`, *optional*): Target words; -100 is ignored.
            use_cache (`bool`, *optional*): Whether to return the decoder's state; defaults to False with labels.
            output_attentions (`bool`, *optional*): Whether to return weights, as `cross_attentions`: one tensor of
                shape `(batch, heads, target length, source length)`.
            output_hidden_states (`bool`, *optional*): Whether to return s_t, as `decoder_hidden_states`: one tensor of
                shape `(batch, target length, hidden_size)`.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): Number of labels by which the summed loss is
                divided; defaults to the labels of this batch.

        Returns:
            `Seq2SeqLMOutput`

        Raises:
            ValueError: if source or target is missing, a source sentence has no words, or `encoder_outputs` do not
                come from this encoder; on CPUs also for ids and labels out of range.
        """
        target = labels if decoder_input_ids is None else decoder_input_ids
        if target is None:
            raise ValueError("give decoder_input_ids or labels.")
        if not target.shape[1]:
            raise ValueError("the target is empty; pass at least one word.")
        check_labels(labels, self.config.num_target_words, "the number of target words")
        if decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, return_dict=True)
        elif isinstance(encoder_outputs, tuple):
            encoder_outputs = LstmEncoderOutput(*encoder_outputs)
        for name in ("last_hidden_state", "final_hidden", "final_cell", "attention_mask"):
            if getattr(encoder_outputs, name, None) is None:
                raise ValueError(
                    f"encoder_outputs must be the LstmEncoderOutput that get_encoder() returns, got "
                    f"{type(encoder_outputs).__name__} without {name}."
                )
        sources = encoder_outputs.last_hidden_state
        states, cache = self.decode(decoder_input_ids, self.first_state(encoder_outputs) if cache is None else cache)
        weights = self.attention(states, sources, encoder_outputs.attention_mask)
        # Summing the weights of the heads sums their contexts.
        logits = self.readout(weights.sum(1) @ sources, states)
        loss = None
        if labels is not None:
            loss = fixed_cross_entropy(logits.flatten(0, 1), labels.flatten(), num_items_in_batch)
        wants = {
            name: getattr(self.config, name) if value is None else value
            for name, value in (
                ("use_cache", False if use_cache is None and labels is not None else use_cache),
                ("output_attentions", output_attentions),
                ("output_hidden_states", output_hidden_states),
            )
        }
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            cache=cache if wants["use_cache"] else None,
            decoder_hidden_states=(states,) if wants["output_hidden_states"] else None,
            cross_attentions=(weights,) if wants["output_attentions"] else None,
            encoder_last_hidden_state=sources,
        )


__all__ = ["LstmSeq2SeqForConditionalGeneration"]
