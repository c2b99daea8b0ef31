"""A choice by vectors of a real sentence-transformers model, made on the spot: two layers, random weights."""

import string
from importlib.util import find_spec

import numpy as np
import pytest

from klear_core.config.curate import CurateConfig, SelectConfig, SentenceEmbedding
from klear_core.config.data import FileSource
from klear_core.config.data_jobs import CurateJob
from klear_core.data.curation.selection import Pool, check_embedding, embed, select_problems

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs the extra `embed`"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    bert, out = tmp_path_factory.mktemp("bert"), tmp_path_factory.mktemp("model")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    vocabulary = [*tokens, *(f"##{letter}" for letter in string.ascii_lowercase)]
    (bert / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab={token: i for i, token in enumerate(vocabulary)}).save_pretrained(bert)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(bert)
    transformer = models.Transformer(str(bert))
    SentenceTransformer(modules=[transformer, models.Pooling(32)], device="cpu").save(str(out))
    return str(out)


def test_a_models_vectors_choose_the_problems(folder):
    questions = ["add two primes", "a train leaves at noon", "add two primes", "how many dogs are there"]
    embedding = SentenceEmbedding(model=folder)
    check_embedding(embedding)
    vectors = embed(embedding, lambda: questions, np.array([3, 1, 0, 2]))
    assert vectors.shape == (4, 32)
    assert vectors.dtype == np.int8
    assert vectors[3].tolist() == vectors[0].tolist()  # places of the two equal questions
    assert vectors[3].tolist() != vectors[1].tolist()
    pool = Pool(problem_ids=["a", "b", "c", "d"], sources=["s"] * 4, questions=lambda: questions)
    for seed in range(3):
        selection = select_problems(SelectConfig(num_problems=3, embedding=embedding), pool, seed=seed)
        (drop,) = [drop for drop in map(selection.drop_of, range(4)) if drop]
        assert {drop.problem_id, drop.matched_id} == {"a", "c"}
        assert "1.000 like it" in drop.detail


def test_a_model_folder_enters_the_fingerprint(folder):
    select = SelectConfig(num_problems=3, embedding=SentenceEmbedding(model=folder))
    cfg = CurateConfig(sources=(FileSource(path="a.jsonl"),), select=select)
    assert CurateJob(seed=0, curate=cfg).files() == ("a.jsonl", folder)
