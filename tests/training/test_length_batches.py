# Licensed under the Apache License, Version 2.0.
import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import Seq2SeqTrainingArguments

from hf_attn_dynamics import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
from hf_attn_dynamics.training import SimilarLengthSampler, SimilarLengthSeq2SeqTrainer


def collate(rows):
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
        for name in ("input_ids", "labels")
    }


def random_lengths(count):
    return [tuple(row) for row in torch.randint(3, 9, (count, 2), generator=torch.Generator().manual_seed(0)).tolist()]


def batches_of(sampler):
    order = list(sampler)
    return [order[start : start + sampler.batch_size] for start in range(0, len(order), sampler.batch_size)]


def test_each_example_comes_once_and_batches_are_cut_from_the_sorted_examples():
    sampler = SimilarLengthSampler(random_lengths(103), batch_size=8)
    batches = batches_of(sampler)
    assert len(sampler) == 103
    assert sorted(index for batch in batches for index in batch) == list(range(103))
    assert [len(batch) for batch in batches] == [8] * 12 + [7]
    found = sorted(sorted(sampler.lengths[index] for index in batch) for batch in batches)
    ordered = sorted(sampler.lengths)
    assert [length for batch in found for length in batch] == ordered
    assert batches[-1] == sorted(batches[-1], key=sampler.lengths.__getitem__)
    assert {sampler.lengths[index] for index in batches[-1]} <= set(ordered[-7:])


def test_epochs_and_seeds_have_orders_of_their_own_which_are_repeatable():
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (5, 0), (0, 0)):
        sampler = SimilarLengthSampler(random_lengths(50), batch_size=4, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    # Other batches, too, not the same ones in another order.
    cut = [{frozenset(order[start : start + 4]) for start in range(0, 48, 4)} for order in orders]
    assert cut[0] != cut[1]


class OrderSeen(SimilarLengthSeq2SeqTrainer):
    """Remembers the batches that it takes steps on."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), tuple(inputs["input_ids"][:, 0].tolist())]
        return super().training_step(model, inputs, *args, **kwargs)


def test_a_trainer_takes_another_order_in_each_epoch_and_goes_on_in_it(tmp_path):
    # The first word of a source says which pair it is.
    sources = [[number + 3] * source for number, (source, _) in enumerate(random_lengths(16))]
    pairs = Dataset.from_dict({"input_ids": sources, "labels": [[2] * 4] * 16})
    config = LstmSeq2SeqConfig(vocab_size=20, hidden_size=4, embedding_size=4)

    def trainer(folder, **settings):
        args = Seq2SeqTrainingArguments(
            folder, train_sampling_strategy="group_by_length", per_device_train_batch_size=4, use_cpu=True,
            num_train_epochs=2, save_steps=6, report_to="none", disable_tqdm=True, **settings,
        )  # fmt: skip
        model = LstmSeq2SeqForConditionalGeneration(config)
        return OrderSeen(model, args, collate, train_dataset=pairs)

    whole, resumed = trainer(tmp_path), trainer(tmp_path)
    whole.train()
    assert len(whole.seen) == 8
    assert sorted(sum(whole.seen[:4], ())) == sorted(sum(whole.seen[4:], ())) == [row[0] for row in sources]
    assert set(map(frozenset, whole.seen[:4])) != set(map(frozenset, whole.seen[4:]))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.seen == whole.seen[6:]


class Listed(torch.utils.data.Dataset):
    """The same rows as a dataset of PyTorch."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize("kind_of_data", [Dataset.from_list, Listed], ids=["datasets", "torch"])
def test_a_trainer_groups_pairs_only_if_it_is_asked_to(tmp_path, kind_of_data):
    lengths = random_lengths(24)
    pairs = [{"input_ids": [5] * source, "labels": [6] * target} for target, source in lengths]
    model = LstmSeq2SeqForConditionalGeneration(LstmSeq2SeqConfig(vocab_size=9, hidden_size=4, embedding_size=4))
    for strategy, kind in (("group_by_length", SimilarLengthSampler), ("random", torch.utils.data.RandomSampler)):
        args = Seq2SeqTrainingArguments(
            tmp_path, train_sampling_strategy=strategy, per_device_train_batch_size=4, use_cpu=True, seed=3
        )
        sampler = SimilarLengthSeq2SeqTrainer(model, args, train_dataset=kind_of_data(pairs))._get_train_sampler()
        assert type(sampler) is kind
        if strategy == "group_by_length":
            assert (sampler.lengths, sampler.batch_size, sampler.seed) == (lengths, 4, 3)


def test_pairs_of_a_stream_come_as_they_are(tmp_path):
    model = LstmSeq2SeqForConditionalGeneration(LstmSeq2SeqConfig(vocab_size=9, hidden_size=4, embedding_size=4))
    args = Seq2SeqTrainingArguments(tmp_path, train_sampling_strategy="group_by_length", use_cpu=True, max_steps=1)
    stream = Dataset.from_dict({"input_ids": [[5]], "labels": [[6]]}).to_iterable_dataset()
    assert SimilarLengthSeq2SeqTrainer(model, args, train_dataset=stream)._get_train_sampler() is None
