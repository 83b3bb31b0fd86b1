"""Random checkpoints against z-lab's `dflash` and speculators' DSpark heads, in float32.

hidden: NMSE <= 1e-10. A proposal must be equal wherever the oracle's margin exceeds 1e-4, far above
what that error can move a logit of magnitude 10.
"""

import importlib.metadata
import importlib.util
import itertools

import pytest
import torch
from torch import nn

from torch_dflash.convert import convert_drafter
from torch_dflash.decoding.sampling import GREEDY, SamplingParams
from torch_dflash.drafters import drafter_for
from torch_dflash.drafters.checkpoint import load_checkpoint
from torch_dflash.drafters.resolve import Overrides
from torch_dflash.gguf import QuantTensor
from torch_dflash.nn import Vocabulary
from torch_dflash.testing.compare import nmse
from torch_dflash.testing.tiny import tiny_drafter

zlab = pytest.importorskip("dflash.model", reason="z-lab's dflash 0.1.0 is not installed")
HIDDEN, VOCAB = 128, 512
MARGIN, NMSE = 1e-4, 1e-10

LAYERS = [
    ["full_attention"] * 2,
    ["sliding_attention"] * 2,
    ["sliding_attention", "full_attention"],
]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e7},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}


class Target(nn.Module):
    """Embedding and head of a target, for both sides."""

    def __init__(self, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=g)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight.data = torch.randn(VOCAB, HIDDEN, generator=g) * HIDDEN**-0.5 * 4

    def vocabulary(self):
        return Vocabulary(
            QuantTensor.from_tensor(self.embedding),
            QuantTensor.from_tensor(self.lm_head.weight.detach()),
        )


def build(tmp_path, kind, seed, **changes):
    """The same random checkpoint as our drafter and as z-lab's model, and their target."""
    folder = tiny_drafter(tmp_path / kind, kind, seed=seed, hidden=HIDDEN, vocab=VOCAB, **changes)
    checkpoint = load_checkpoint(folder)
    target = Target(seed)
    ours = drafter_for(checkpoint.config, checkpoint.tensors, target.vocabulary())
    cls = zlab.DFlash2DraftModel if kind == "dflash2" else zlab.DFlashDraftModel
    theirs = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    return ours, theirs, target


def their_hidden(model, target, context, start, anchor, rows, cache):
    """One block on z-lab's side; only the context stays in its cache."""
    ids = torch.tensor([[anchor] + [int(model.mask_token_id)] * (rows - 1)])
    scale = float(zlab._draft_value(model.config, "input_embedding_scale", 1.0))
    end = start + context.shape[0]
    out = model(
        target_hidden=context[None],
        noise_embedding=target.embedding[ids] * scale,
        position_ids=torch.arange(start, end + rows)[None],
        past_key_values=cache,
        use_cache=True,
    )[0]
    zlab._crop_to(cache, end)
    return out


def blocks(seed, columns):
    """Contexts, anchors and block lengths of five steps."""
    g = torch.Generator().manual_seed(seed)
    for context, rows in ((20, 8), (1, 8), (7, 5), (3, 2), (40, 8)):
        anchor = int(torch.randint(VOCAB, (1,), generator=g))
        yield torch.randn(context, columns, generator=g), anchor, rows


CASES = list(itertools.product(["dflash", "dflash2"], range(3), [None, True, False], ROPES))


@pytest.mark.parametrize("kind, layers, causal, rope", CASES)
@torch.inference_mode()
def test_zlab(kind, layers, causal, rope, tmp_path):
    seed = 100 * layers + 10 * (causal is None) + 5 * bool(causal) + len(rope)
    changes = {"layer_types": LAYERS[layers], "rope_parameters": ROPES[rope]}
    changes |= {"sliding_window": 11, "use_sliding_window": True, "is_causal": causal}
    ours, theirs, target = build(tmp_path, kind, seed, **changes)
    cache, start, compared = zlab._make_cache(theirs.config), 0, 0
    for context, anchor, rows in blocks(seed, ours.config.target_hidden_columns):
        expected = their_hidden(theirs, target, context, start, anchor, rows, cache)
        start += context.shape[0]
        ours.commit(context)
        hidden = ours.forward(torch.tensor([anchor]), rows)
        assert nmse(hidden, expected) <= NMSE
        tokens = ours.propose(torch.tensor([anchor]), rows - 1, GREEDY, rows).tokens[0].tolist()
        if kind == "dflash":
            logits = theirs.compute_logits(expected[1:], target.lm_head)
            best = logits.topk(2).values
            sure = (best[:, 0] - best[:, 1] > MARGIN).tolist()
            theirs_tokens = logits.argmax(-1).tolist()
            assert [t for t, s in zip(tokens, sure, strict=True) if s] == [
                t for t, s in zip(theirs_tokens, sure, strict=True) if s
            ]
            compared += sum(sure)
        else:
            path, _, _ = theirs.propose(
                expected[None, 1:], torch.tensor([anchor]), target.lm_head, 0.0
            )
            assert tokens == path[0].tolist()
            compared += rows - 1
    assert compared >= 20


def test_row_31_multiplier_and_cap_come_before_the_candidates(tmp_path):
    scaled = {"output_multiplier": 0.196, "final_logit_softcapping": 20.0}
    ours, theirs, target = build(tmp_path, "dflash2", 5, **scaled)
    plain = drafter_for(
        ours.config.__class__(**{**vars(ours.config), "output_multiplier": 1.0,
                                 "final_logit_softcapping": 0.0}),
        load_checkpoint(tmp_path / "dflash2").tensors,
        target.vocabulary(),
    )  # fmt: skip
    different = 0
    with torch.inference_mode():
        cache, start = zlab._make_cache(theirs.config), 0
        for context, anchor, rows in blocks(5, ours.config.target_hidden_columns):
            expected = their_hidden(theirs, target, context, start, anchor, rows, cache)
            start += context.shape[0]
            token = torch.tensor([anchor])
            for drafter in (ours, plain):
                drafter.commit(context)
            path = theirs.propose(expected[None, 1:], token, target.lm_head, 0.0)[0][0].tolist()
            assert ours.propose(token, rows - 1, GREEDY, rows).tokens[0].tolist() == path
            different += plain.propose(token, rows - 1, GREEDY, rows).tokens[0].tolist() != path
    assert different > 0


def speculators_heads():
    """speculators' head definitions, without importing the training package around them."""
    try:
        files = importlib.metadata.files("speculators") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("speculators 0.9.0 is not installed")
    path = next(f for f in files if str(f).endswith("models/dspark/model_definitions.py"))
    spec = importlib.util.spec_from_file_location("dspark_heads", path.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("anchor_first", [True, False])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@torch.inference_mode()
def test_speculators_dspark(head, anchor_first, rope, tmp_path):
    heads = speculators_heads()
    folder = tiny_drafter(
        tmp_path / "dspark", "dspark", seed=3, hidden=HIDDEN, vocab=VOCAB,
        sample_from_anchor=anchor_first, rope_parameters=ROPES[rope], block_size=7,
        markov_head=head,
    )  # fmt: skip
    checkpoint = load_checkpoint(folder)
    target = Target(3)
    ours = drafter_for(checkpoint.config, checkpoint.tensors, target.vocabulary())
    dense = {n: t.to_dense().float() for n, t in checkpoint.tensors.items()}
    rank = dense["markov_head.markov_w1.weight"].shape[1]
    markov = heads.MarkovHead(
        verifier_vocab_size=VOCAB, draft_vocab_size=VOCAB, markov_rank=rank, hidden_size=HIDDEN,
        head_type=head,
    )  # fmt: skip
    prefix = "markov_head."
    markov.load_state_dict(
        {n.removeprefix(prefix): t for n, t in dense.items() if n.startswith(prefix)}
    )
    through_gguf = tmp_path / "x.gguf"
    convert_drafter(folder, through_gguf)
    again = load_checkpoint(through_gguf, overrides=Overrides(num_target_layers=6))
    again = drafter_for(again.config, again.tensors, target.vocabulary())
    confidence = heads.ConfidenceHead(HIDDEN + rank)
    confidence.proj.weight.data = dense["confidence_head.proj.weight"]
    confidence.proj.bias.data = dense["confidence_head.proj.bias"]
    g = torch.Generator().manual_seed(9)
    for context, drafts in ((12, 6), (1, 6), (4, 3)):
        anchor = torch.randint(VOCAB, (1,), generator=g)
        committed = torch.randn(context, ours.config.target_hidden_columns, generator=g)
        ours.commit(committed)
        again.commit(committed)
        rows = drafts + (not anchor_first)
        hidden = ours.forward(anchor, rows)[0 if anchor_first else 1 :]
        proposal = ours.propose(anchor, drafts, GREEDY, rows)
        tokens = proposal.tokens[0]
        previous = torch.cat([anchor, tokens[:-1]])
        bias = markov.block_bias(prev_token_ids=previous[None], hidden_states=hidden[None])[0]
        logits = target.lm_head(hidden) + bias
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > MARGIN
        assert tokens.tolist() == logits.argmax(-1).tolist()
        features = torch.cat([hidden, markov.prev_embeddings(previous)], -1)
        expected = confidence(features).sigmoid()
        assert nmse(proposal.confidence[0], expected) <= NMSE
        stored = again.propose(anchor, drafts, GREEDY, rows)
        assert torch.equal(stored.tokens, proposal.tokens)
        assert torch.equal(stored.confidence, proposal.confidence)
        # sampled: along the path that was drawn, q is the oracle's softmax
        drawn = ours.propose(anchor, drafts, SamplingParams(temperature=0.7, seed=context), rows)
        previous = torch.cat([anchor, drawn.tokens[0, :-1]])
        bias = markov.block_bias(prev_token_ids=previous[None], hidden_states=hidden[None])[0]
        expected = ((target.lm_head(hidden) + bias) / 0.7).softmax(-1)
        assert nmse(drawn.q[0], expected) <= NMSE
        assert (drawn.q[0].gather(1, drawn.tokens[0, :, None]) > 0).all()
