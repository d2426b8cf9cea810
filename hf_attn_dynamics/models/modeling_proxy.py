# Licensed under the Apache License, Version 2.0.
"""The bag-of-words proxy of Snell et al. 2021 for a model with uniform attention early in training."""

import torch
from torch import nn
from transformers import PreTrainedModel, initialization
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from .compat import fixed_cross_entropy
from .configuration_checks import CheckedModelMixin, check_classes
from .configuration_proxy import ProxyConfig
from .embedding_words import WordReader
from .input_checks import can_check, check_labels
from .pytorch_initialization import initialize_as_pytorch
from .resizing import TranslationVocabularyMixin, VocabularyMixin


class ProxyModel(VocabularyMixin, WordReader, CheckedModelMixin, PreTrainedModel):
    """A linear layer without bias over the mean of the embeddings of a sentence."""

    config_class = ProxyConfig
    main_input_name = "input_ids"
    # The trainer divides by the number of labels of an accumulated batch, which forward() takes.
    accepts_loss_kwargs = True

    def __init__(self, config: ProxyConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.embedding_size, config.pad_token_id)
        self.classifier = nn.Linear(config.embedding_size, self.num_outputs(config), bias=False)
        self.post_init()

    @staticmethod
    def num_outputs(config: ProxyConfig) -> int:
        """Number of output words, or of classes."""
        raise NotImplementedError

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.embedding_size**-0.5 if self.config.embedding_std is None else self.config.embedding_std
        if module is self.classifier:
            initialization.normal_(module.weight, std=std)
        else:
            initialize_as_pytorch(module, std)

    def readout(self, contexts: torch.Tensor) -> torch.Tensor:
        """Logits of mean embeddings."""
        return self.classifier(contexts)

    def sentence_logits(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.FloatTensor | None,
    ) -> torch.Tensor:
        """Logits of each sentence, of shape `(batch, outputs)`."""
        embedded, real = self.embedded_words(input_ids, attention_mask, inputs_embeds)
        return self.readout(embedded.masked_fill(~real[..., None], 0).sum(1) / real.sum(1, keepdim=True))

    def word_contexts(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
    ) -> tuple[torch.Tensor]:
        """Input of the readout for attention to a single word: its embedding.

        Args:
            input_ids, attention_mask, inputs_embeds: See `forward`; labels are ignored.

        Returns:
            `tuple[torch.Tensor]`: of shape `(batch, length, embedding_size)`.
        """
        embedded, _ = self.embedded_words(input_ids, attention_mask, inputs_embeds)
        return (embedded,)


class ProxyForSeq2Seq(TranslationVocabularyMixin, ProxyModel):
    """Predicts every target word from the source as a bag of words.

    `p = softmax(W · mean_l e_l)` for every target word, independent of the preceding words (Snell et al. 2021,
    equation 5). `generate()` is not supported.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import ProxyConfig, ProxyForSeq2Seq
        >>> model = ProxyForSeq2Seq(ProxyConfig(vocab_size=50, target_vocab_size=40))
        >>> model(torch.tensor([[7, 8, 9, 0]]), labels=torch.tensor([[3, 4, -100]])).logits.shape
        torch.Size([1, 3, 40])
    """

    @staticmethod
    def num_outputs(config: ProxyConfig) -> int:
        return config.vocab_size if config.target_vocab_size is None else config.target_vocab_size

    def _target_tables(self) -> list[tuple[nn.Module, str]]:
        return [(self, "classifier")]

    def word_contexts(self, *args, decoder_input_ids: torch.LongTensor | None = None, **kwargs) -> tuple[torch.Tensor]:
        """Embeddings of shape `(batch, 1, source length, embedding_size)`; `decoder_input_ids` are ignored."""
        (contexts,) = super().word_contexts(*args, **kwargs)
        return (contexts[:, None],)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Logits of a padded batch.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source length)`, *optional*): Source words.
            attention_mask (`torch.Tensor` of shape `(batch, source length)`, *optional*): 0 for padding; without it,
                `config.pad_token_id` is padding.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, source length, embedding_size)`, *optional*): Replaces
                `input_ids`.
            labels (`torch.LongTensor` of shape `(batch, target length)`, *optional*): Target words; -100 is ignored.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): Number of labels by which the summed loss is
                divided; defaults to the labels of this batch.

        Returns:
            `SequenceClassifierOutput`: logits of shape `(batch, target length, target_vocab_size)` with labels, and
            `(batch, 1, target_vocab_size)` without.

        Raises:
            ValueError: unless exactly one of ids and embeddings is given; for sentences without words; and, on CPUs,
                for ids and labels out of range.
        """
        check_labels(labels, self.num_outputs(self.config), "the number of target words")
        logits = self.sentence_logits(input_ids, attention_mask, inputs_embeds)[:, None]
        if labels is not None and can_check() and (labels.dim() != 2 or len(labels) != len(logits)):
            raise ValueError(f"labels must have shape ({len(logits)}, target length), got {tuple(labels.shape)}.")
        if labels is None:
            return SequenceClassifierOutput(logits=logits)
        logits = logits.expand(-1, labels.shape[1], -1)
        return SequenceClassifierOutput(
            loss=fixed_cross_entropy(logits.flatten(0, 1), labels.flatten(), num_items_in_batch), logits=logits
        )


class ProxyForSequenceClassification(ProxyModel):
    """Classifies sentences by their mean embedding: `p = softmax(W · mean_l e_l)` (Snell et al. 2021).

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import ProxyConfig, ProxyForSequenceClassification
        >>> model = ProxyForSequenceClassification(ProxyConfig(vocab_size=50, num_labels=4))
        >>> model(torch.tensor([[7, 8, 9, 0]])).logits.shape
        torch.Size([1, 4])
    """

    @staticmethod
    def num_outputs(config: ProxyConfig) -> int:
        check_classes(config)
        return config.num_labels

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Logits of a padded batch: arguments as in [`LstmForSequenceClassification`].

        Returns:
            `SequenceClassifierOutput`: logits of shape `(batch, num_labels)`.

        Raises:
            ValueError: see [`LstmForSequenceClassification`].
        """
        logits = self.sentence_logits(input_ids, attention_mask, inputs_embeds)
        check_labels(labels, self.config.num_labels, "num_labels", sentences=len(logits))
        loss = None if labels is None else fixed_cross_entropy(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits)


__all__ = ["ProxyForSeq2Seq", "ProxyForSequenceClassification"]
