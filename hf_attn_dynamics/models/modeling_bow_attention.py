# Licensed under the Apache License, Version 2.0.
"""Bag-of-words attention: one query, a key and an embedding for each word, and a classifier (Lu et al. 2021)."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import normalize
from transformers import initialization
from transformers.utils import ModelOutput, can_return_tuple

from .compat import fixed_cross_entropy
from .configuration_bow_attention import BowAttentionConfig
from .embedding_words import check_sentences, check_words, real_positions
from .freezing import FreezingModel
from .input_checks import can_check, check_labels
from .resizing import VocabularyMixin


@dataclass
class BowAttentionOutput(ModelOutput):
    """Output of bag-of-words attention. A unit is a word or, with a convolution, a pair of neighbouring words.

    Args:
        loss (`torch.FloatTensor`, *optional*): Cross-entropy, if there are labels.
        logits (`torch.FloatTensor` of shape `(batch, num_labels)`): Scores of the classes.
        context (`torch.FloatTensor` of shape `(batch, hidden_size)`): Weighted average of features.
        scores (`torch.FloatTensor` of shape `(batch, units)`): Inner products of query and keys, padding included.
        attention_weights (`torch.FloatTensor` of shape `(batch, units)`): Softmax of the scores; 0 at padding.
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    context: torch.FloatTensor | None = None
    scores: torch.FloatTensor | None = None
    attention_weights: torch.FloatTensor | None = None


class BowAttentionForSequenceClassification(VocabularyMixin, FreezingModel):
    """Classifies sentences by a bag of words that one query attends to, without word order unless with a convolution.

    The context is Σ_w softmax(qᵀκ)_w ν_w over the words of the sentence, repeated ones included, where ν are
    embeddings, κ keys and q is the query. With a convolution, the context of a sentence of one word is 0.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import BowAttentionConfig, BowAttentionForSequenceClassification
        >>> model = BowAttentionForSequenceClassification(BowAttentionConfig(vocab_size=50, num_labels=4))
        >>> output = model(torch.tensor([[7, 8, 9, 0]]), labels=torch.tensor([2]))
        >>> output.logits.shape, output.attention_weights
        (torch.Size([1, 4]), tensor([[0.3333, 0.3333, 0.3333, 0.0000]], grad_fn=...))
    """

    config_class = BowAttentionConfig
    main_input_name = "input_ids"
    # The trainer divides by the number of labels of an accumulated batch, which forward() takes.
    accepts_loss_kwargs = True

    def __init__(self, config: BowAttentionConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.keys = nn.Embedding(config.vocab_size, config.key_size)
        self.query = nn.Parameter(torch.empty(config.key_size))
        if config.convolution:
            self.embedding_convolution = nn.Conv1d(config.hidden_size, config.hidden_size, 2)
            self.key_convolution = nn.Conv1d(config.key_size, config.key_size, 2)
        if config.classifier == "mlp":
            self.classifier = nn.Sequential(
                nn.Linear(config.hidden_size, config.classifier_hidden_size),
                nn.ReLU(),
                nn.Linear(config.classifier_hidden_size, config.num_labels),
            )
        else:
            self.classifier = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.freeze()
        self.post_init()

    def freeze(self) -> None:
        self.embeddings.requires_grad_(not self.config.freeze_embeddings)
        self.keys.requires_grad_(not self.config.freeze_keys)
        self.query.requires_grad_(not self.config.freeze_query)
        self.classifier.requires_grad_(self.config.classifier != "fixed")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if module is self:
            initialization.normal_(self.query, std=config.query_std or 1.0)
            if config.query_std is None:
                initialization.copy_(self.query, normalize(self.query, dim=0))
        elif isinstance(module, nn.Embedding):
            std = config.embedding_std if module is self.embeddings else config.key_std
            initialization.normal_(module.weight, std=std)
        elif module is self.classifier and config.classifier == "fixed":
            initialization.orthogonal_(module.weight)
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            # PyTorch's default initialisation, as in the paper.
            bound = module.weight[0].numel() ** -0.5
            for parameter in module.parameters():
                initialization.uniform_(parameter, -bound, bound)

    def _word_tables(self) -> list[tuple[nn.Module, str]]:
        return [(self, "embeddings"), (self, "keys")]

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> BowAttentionOutput:
        """Logits and attention of a padded batch.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): Words.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 for padding, on either side;
                without it, `config.pad_token_id` is padding.
            labels (`torch.LongTensor` of shape `(batch,)`, *optional*): Classes; -100 is ignored.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): Number of labels by which the summed loss is
                divided; defaults to the labels of this batch.

        Returns:
            [`BowAttentionOutput`]

        Raises:
            ValueError: if the model has a convolution and the batch has fewer than two words; on CPUs also for
                sentences without words, and for ids and labels out of range.
        """
        if can_check():
            check_words("input_ids", input_ids, self.embeddings)
        check_labels(labels, self.config.num_labels, "num_labels", sentences=len(input_ids))
        real = real_positions(input_ids, attention_mask, self.config.pad_token_id)
        # An accelerator would synchronise.
        if real.device.type == "cpu" and can_check():
            check_sentences(real)
        features, keys = self.embeddings(input_ids), self.keys(input_ids)
        if self.config.convolution:
            if input_ids.shape[1] < 2:
                raise ValueError(f"input_ids have {input_ids.shape[1]} words; a convolution of width 2 needs two.")
            features = self.embedding_convolution(features.mT).mT
            keys = self.key_convolution(keys.mT).mT
            real = real[:, 1:] & real[:, :-1]
        scores = keys @ self.query
        # A finite mask, applied again after the softmax, so that a sentence of padding is not NaN.
        masked = scores.masked_fill(~real, torch.finfo(scores.dtype).min)
        weights = masked.softmax(-1) * real
        context = (weights[:, None] @ features)[:, 0]
        logits = self.classifier(context)
        loss = None if labels is None else fixed_cross_entropy(logits, labels, num_items_in_batch)
        return BowAttentionOutput(loss, logits, context, scores, weights)


__all__ = ["BowAttentionForSequenceClassification"]
