# Licensed under the Apache License, Version 2.0.
"""An LSTM classifier with attention, as in Wiegreffe & Pinter 2019 and Snell et al. 2021."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import ModelOutput, can_return_tuple

from .compat import fixed_cross_entropy
from .configuration_lstm import LstmConfig
from .embedding_words import WordReader, uniform_weights
from .freezing import FreezingModel
from .input_checks import check_labels
from .masked_lstm import run_lstm
from .pytorch_initialization import initialize_as_pytorch
from .resizing import VocabularyMixin


@dataclass
class LstmClassifierOutput(ModelOutput):
    """Output of the classifier.

    Args:
        loss (`torch.FloatTensor`, *optional*): Cross-entropy, if there are labels.
        logits (`torch.FloatTensor` of shape `(batch, num_labels)`): Scores of the classes.
        context (`torch.FloatTensor` of shape `(batch, directions · hidden_size)`): Weighted average of the states.
        scores (`torch.FloatTensor` of shape `(batch, length)`, *optional*): a_l, padding included; `None` for uniform
            attention.
        attention_weights (`torch.FloatTensor` of shape `(batch, length)`): Softmax of the scores; 0 at padding.
        states (`torch.FloatTensor` of shape `(batch, length, directions · hidden_size)`): h_l, 0 at padding.
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    context: torch.FloatTensor | None = None
    scores: torch.FloatTensor | None = None
    attention_weights: torch.FloatTensor | None = None
    states: torch.FloatTensor | None = None


class LstmForSequenceClassification(VocabularyMixin, WordReader, FreezingModel):
    """Classifies a sentence by an attention-weighted average of LSTM states.

    `a_l = vᵀ ReLU(Q h_l)`, `α = softmax(a)`, `c = Σ_l α_l h_l` and `p = σ(wᵀc)`, or a softmax for more than two
    classes (Snell et al. 2021, equations 6–8). Without embeddings it has 1,274,882 parameters, as in the paper.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import LstmConfig, LstmForSequenceClassification
        >>> model = LstmForSequenceClassification(LstmConfig(vocab_size=50, attention="uniform"))
        >>> output = model(torch.tensor([[7, 8, 9, 0]]), labels=torch.tensor([1]))
        >>> output.logits.shape, output.attention_weights
        (torch.Size([1, 2]), tensor([[0.3333, 0.3333, 0.3333, 0.0000]]))
        >>> model = LstmForSequenceClassification(LstmConfig(vocab_size=50))
        >>> model.num_parameters() - model.embeddings.weight.numel()
        1274882
    """

    config_class = LstmConfig
    main_input_name = "input_ids"
    # The trainer divides by the number of labels of an accumulated batch, which forward() takes.
    accepts_loss_kwargs = True

    def __init__(self, config: LstmConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.embedding_size, config.pad_token_id)
        self.lstm = nn.LSTM(
            config.embedding_size,
            config.hidden_size,
            config.num_hidden_layers,
            batch_first=True,
            dropout=config.dropout,
            bidirectional=config.bidirectional,
        )
        features = config.hidden_size * (2 if config.bidirectional else 1)
        self.attention = None
        if config.attention != "uniform":
            self.attention = nn.Sequential(
                nn.Linear(features, config.attention_size), nn.ReLU(), nn.Linear(config.attention_size, 1)
            )
        self.classifier = nn.Linear(features, 1 if config.num_labels == 2 else config.num_labels)
        self.freeze()
        self.post_init()

    def freeze(self) -> None:
        self.requires_grad_(not self.config.train_attention_only)
        if self.attention is not None:
            self.attention.requires_grad_(self.config.attention == "learned")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """PyTorch's default initialisation, since the paper names none."""
        initialize_as_pytorch(module, self.config.embedding_std)

    def readout(self, contexts: torch.Tensor) -> torch.Tensor:
        """Logits of contexts; for two classes 0 and wᵀc + b, whose softmax is the paper's sigmoid (equation 8)."""
        logits = self.classifier(contexts)
        return torch.cat([torch.zeros_like(logits), logits], -1) if logits.shape[-1] == 1 else logits

    def word_contexts(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
    ) -> tuple[torch.Tensor]:
        """Input of the readout for attention to a single word: its state.

        Args:
            input_ids, attention_mask, inputs_embeds, labels: See `forward`; labels are ignored.

        Returns:
            `tuple[torch.Tensor]`: of shape `(batch, length, directions · hidden_size)`.
        """
        states, _ = run_lstm(self.lstm, *self.embedded_words(input_ids, attention_mask, inputs_embeds))
        return (states,)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> LstmClassifierOutput:
        """Logits and attention of a padded batch.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Words.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 for padding, on either side;
                without it, `config.pad_token_id` is padding.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, length, embedding_size)`, *optional*): Replaces
                `input_ids`.
            labels (`torch.LongTensor` of shape `(batch,)`, *optional*): Classes; -100 is ignored.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): Number of labels by which the summed loss is
                divided; defaults to the labels of this batch.

        Returns:
            [`LstmClassifierOutput`]

        Raises:
            ValueError: unless exactly one of ids and embeddings is given; for sentences without words; and, on CPUs,
                for ids and labels out of range.
        """
        embedded, real = self.embedded_words(input_ids, attention_mask, inputs_embeds)
        check_labels(labels, self.config.num_labels, "num_labels", sentences=len(embedded))
        states, _ = run_lstm(self.lstm, embedded, real)
        if self.attention is None:
            scores, weights = None, uniform_weights(real, states.dtype)
        else:
            scores = self.attention(states)[..., 0]
            weights = scores.masked_fill(~real, -torch.inf).softmax(-1)
        context = (weights[:, None] @ states)[:, 0]
        logits = self.readout(context)
        loss = None if labels is None else fixed_cross_entropy(logits, labels, num_items_in_batch)
        return LstmClassifierOutput(loss, logits, context, scores, weights, states)


__all__ = ["LstmForSequenceClassification"]
