import pytest
import torch
from torch import nn

from hf_attn_dynamics import word_saliency


class Tagger(nn.Module):
    """Logits of three classes for two output words from padded embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.score, self.out = nn.Linear(5, 2), nn.Linear(5, 3)
        self.double()

    def forward(self, embeddings, mask):
        attention = self.score(embeddings).masked_fill(~mask[..., None], -torch.inf).softmax(1)
        return self.out(torch.einsum("blt,bld->btd", attention, embeddings).tanh())


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([[4], [2], [1]])
    return embeddings, mask, torch.tensor([[0, 1], [2, 2], [1, 0]])


def losses_of(model, embeddings, mask, labels):
    return nn.functional.cross_entropy(model(embeddings, mask).transpose(1, 2), labels, reduction="none")


def test_saliency_is_how_losses_fall_as_a_word_is_multiplied(batch):
    model, (embeddings, mask, labels) = Tagger(), batch
    leaf = embeddings.clone().requires_grad_()
    found = word_saliency(losses_of(model, leaf, mask, labels), leaf)
    step = 1e-6
    for word in range(4):
        sides = []
        for sign in (1, -1):
            scaled = embeddings.clone()
            scaled[:, word] *= 1 + sign * step
            sides.append(losses_of(model, scaled, mask, labels))
        torch.testing.assert_close(found[..., word], -(sides[0] - sides[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    assert not found.transpose(1, 2)[~mask].any()
    assert not found.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_loss_a_sentence_gives_one_row(batch):
    model, (embeddings, mask, labels) = Tagger(), batch
    embeddings.requires_grad_()
    losses = losses_of(model, embeddings, mask, labels)
    torch.testing.assert_close(word_saliency(losses.sum(1), embeddings), word_saliency(losses, embeddings).sum(1))


E = torch.ones(2, 3, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("losses", "embeddings", "message"),
    [
        (E.sum(), E, r"losses must have shape \(batch,\) .* for 2 sentences, got \(\)"),
        (E[:1].sum((1, 2)), E, "for 2 sentences, got"),
        (E.sum((1, 2)), E[0], r"embeddings must have shape \(batch, length, dim\), got \(3, 4\)"),
        (torch.ones(2), E, "must be computed from embeddings"),
        (E.sum((1, 2)), torch.ones(2, 3, 4, requires_grad=True), "losses do not depend on embeddings"),
    ],
    ids=["reduced", "batch", "embeddings", "constant", "others"],
)
def test_losses_that_cannot_be_differentiated_are_refused(losses, embeddings, message):
    with pytest.raises(ValueError, match=message):
        word_saliency(losses, embeddings)
