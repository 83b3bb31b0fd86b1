"""markov_chain: golden values, vLLM's numbers, options, independence and refusals."""

import math

import pytest
import torch

from torch_dflash import ops
from torch_dflash.reference import draft as reference
from torch_dflash.testing.samples.draft import BF16, F32, Q8_0, float_codebook

VANILLA = ["vanilla_anchor", "vanilla_bonus", "conf_hidden_only", "no_confidence",
           "reduced_vocab", "reduced_vocab_bonus", "logit_scale"]  # fmt: skip


def chain(base, hidden, anchor, w1, w2, *rest, ggml_type=F32, **options):
    """The operator on plain matrices."""
    tables = []
    for w in (w1, w2):
        tables.append(float_codebook(w, ggml_type))
    packed = ops.repack(tables[1], ggml_type, w2.shape[1])
    return ops.markov_chain(
        base, hidden, anchor, tables[0], ggml_type, packed, ggml_type, *rest, **options
    )


class TestGolden:
    # G4 of the design's golden values
    head = torch.tensor([[1, 0], [0, 1], [0.5, 0.5], [-1, 0.2]])
    hidden = torch.tensor([[1, 0.5], [0.2, 0.9], [-0.3, 0.4]])
    w1 = torch.tensor([[1, 0], [0, 1], [0.5, -0.5], [-1, 1]])
    w2 = torch.tensor([[0, 0.5], [0.6, 0], [-0.2, 0.9], [0.3, 0.3]])
    weight, bias = torch.tensor([0.5, -0.25, 1, -1]), torch.tensor([0.1])

    def run(self, **options):
        base = (self.hidden @ self.head.T)[None].contiguous()
        return chain(
            base,
            self.hidden[None].contiguous(),
            torch.tensor([3]),
            self.w1,
            self.w2,
            self.weight,
            self.bias,
            1.0,
            None,
            None,
            None,
            **options,
        )

    def test_g4_block_of_three_gives_three_tokens_from_row_zero(self):  # FORMATS 6, row 27
        tokens, q, confidence = self.run()
        assert tokens.tolist() == [[2, 1, 2]]
        assert q.numel() == 0
        want = torch.tensor([[0.178726, 0.726115, 0.240489]])  # printed to 6 decimals
        torch.testing.assert_close(confidence, want, rtol=0, atol=1e-6)
        survival = torch.tensor([[0.178726, 0.129776, 0.03121]])
        torch.testing.assert_close(confidence.cumprod(1), survival, rtol=0, atol=1e-6)

    def test_the_mask_is_never_proposed(self):
        tokens, _, _ = self.run(mask_id=2)
        assert 2 not in tokens
        base = (self.hidden @ self.head.T)[None].contiguous()
        greedy = (base, self.hidden[None], torch.tensor([3]), self.w1, self.w2)
        want = reference.markov_chain(*greedy, None, None, 1.0, None, None, None, mask_id=2)
        assert torch.equal(tokens, want[0])
        # a mask id outside the vocabulary masks nothing
        assert self.run(mask_id=4)[0].tolist() == [[2, 1, 2]]


@pytest.mark.parametrize("name", VANILLA)
def test_vllm(name, fixtures):
    import json

    from safetensors import safe_open

    folder = fixtures / "dspark" / name
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("dflash_config", {})}
    first = 0 if config.get("sample_from_anchor", True) else 1
    scale = float(config.get("logit_scale", 1.0))
    with safe_open(folder / "model.safetensors", "pt") as f:
        weights = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
    w1, w2 = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    weight = weights.get("confidence_head.proj.weight")
    bias = weights.get("confidence_head.proj.bias")
    d2t = weights.get("d2t")
    if d2t is not None:
        d2t = d2t + torch.arange(len(d2t))  # offsets in the Hugging Face file
    with safe_open(folder / "io.safetensors", "pt") as f:
        head = weights.get("lm_head.weight")
        head = f.get_tensor("lm_head") if head is None else head
        for step in range(int(f.metadata()["steps"])):
            hidden = f.get_tensor(f"step{step}.hidden")[first:].contiguous()
            base = (hidden.double() @ head.double().T).float()
            args = (base[None], hidden[None], f.get_tensor(f"step{step}.anchor"), w1, w2)
            rest = (
                None if weight is None else weight.float().flatten(),
                None if bias is None else bias.float(),
                scale,
                d2t,
            )
            tokens, _, confidence = chain(*args, *rest, None, None, ggml_type=BF16)
            assert tokens[0].tolist() == f.get_tensor(f"step{step}.draft_ids").tolist()
            if weight is None:
                assert confidence.numel() == 0
            else:
                want = f.get_tensor(f"step{step}.confidence")
                torch.testing.assert_close(confidence[0], want, rtol=0, atol=2e-5)
            logits = f.get_tensor(f"step{step}.logits")
            # along the greedy path the logits are known: one slot at a time, its distribution
            before = torch.cat([args[2], tokens[0, :-1]])
            n = len(hidden)
            _, q, _ = chain(
                base[:, None].contiguous(), hidden[:, None].contiguous(), before, w1, w2, *rest,
                torch.ones(n), torch.zeros(n, 1), ggml_type=BF16,
            )  # fmt: skip
            # logits to 2e-4 absolute: probabilities to 4e-4 of themselves
            torch.testing.assert_close(q[:, 0], logits.softmax(-1), rtol=4e-4, atol=1e-9)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_vllm_draft_topk(k, fixtures):
    from safetensors import safe_open

    with safe_open(fixtures / "dspark/draft_topk.safetensors", "pt") as f:
        t = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
    hidden = t["hidden"][:6].contiguous()
    base = (hidden.double() @ t["lm_head"].double().T).float()
    w1, w2 = (t[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    weight, bias = t["confidence_head.proj.weight"].flatten(), t["confidence_head.proj.bias"]
    args = base[None], hidden[None], t["anchor"], w1, w2, weight, bias, 1.0, None
    tokens, q, confidence = chain(*args, torch.zeros(1), torch.zeros(1, 6), draft_topk=k)
    assert tokens[0].tolist() == t[f"top{k}.draft_ids"].tolist()
    torch.testing.assert_close(confidence[0], t[f"top{k}.confidence"], rtol=0, atol=2e-5)
    _, q, _ = chain(*args, torch.full((1,), 1e6), torch.zeros(1, 6), draft_topk=k)
    assert ((q[0] > 0).sum(1) == k).all()
    assert torch.equal(q[0, 0] > 0, t[f"top{k}.logits"][0] > -math.inf)


def batch():
    g = torch.Generator().manual_seed(31)
    w1, w2 = torch.randn(60, 32, generator=g), torch.randn(40, 32, generator=g)
    tables = []
    import gguf

    for w in (w1, w2):
        q = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType.Q8_0)
        tables.append(torch.from_numpy(q.copy()))
    return [
        torch.randn(4, 3, 40, generator=g),
        torch.randn(4, 3, 20, generator=g),
        torch.randint(0, 60, (4,), generator=g),
        tables[0],
        Q8_0,
        ops.repack(tables[1], Q8_0, 32),
        Q8_0,
        torch.randn(52, generator=g) / 8,
        torch.randn(1, generator=g),
        0.5,
        torch.randperm(60, generator=g)[:40].sort().values,
        torch.tensor([0.0, 1.0, 0.0, 0.5]),
        torch.rand(4, 3, generator=g),
    ]


PER_SEQUENCE = (0, 1, 2, 11, 12)


def joint(head, kind=0, bias=True):
    """Matrix and bias of a gated or recurrent head in front of :func:`batch`'s w2."""
    if head == 0:
        return {}
    g = torch.Generator().manual_seed(head)
    shape = (32, 52) if head == 1 else (96, 84)
    weight = torch.randn(shape, generator=g).view(torch.uint8)
    return {
        "head_type": head,
        "joint": ops.repack(weight, kind, shape[1]),
        "joint_bias": torch.randn(shape[0], generator=g) if bias else None,
    }


@pytest.mark.parametrize("head", [0, 1, 2])
def test_row_independence_in_a_mixed_batch(head):
    args = batch()
    together = ops.markov_chain(*args, **joint(head))
    for s in range(4):
        one = [a[s : s + 1] if n in PER_SEQUENCE else a for n, a in enumerate(args)]
        for alone, whole in zip(ops.markov_chain(*one, **joint(head)), together, strict=True):
            assert torch.equal(alone, whole[s : s + 1])


def test_other_sequences_values_do_not_matter():
    args = batch()
    together = ops.markov_chain(*args)
    args[1] = args[1].clone()
    args[1][1:] = math.nan  # only the confidence reads it
    again = ops.markov_chain(*args)
    assert torch.equal(again[0], together[0])
    assert torch.equal(again[2][0], together[2][0])
    assert again[2][1:].isnan().all()


def test_greedy_without_temperature_is_temperature_zero():
    args = batch()
    args[11] = torch.zeros(4)
    tokens, q, confidence = ops.markov_chain(*args)
    assert torch.equal(args[10][q.argmax(-1)], tokens)
    assert torch.equal(q.sum(-1), torch.ones(4, 3))
    args[11] = args[12] = None
    greedy = ops.markov_chain(*args)
    assert torch.equal(greedy[0], tokens)
    assert greedy[1].numel() == 0
    assert torch.equal(greedy[2], confidence)


def test_the_masks_draft_ids_are_excluded_by_target_id():
    args = batch()
    args[11] = torch.full((4,), 50.0)  # nearly uniform: everything has probability
    mask = int(args[10][5])
    _, q, _ = ops.markov_chain(*args, mask)
    assert (q[..., 5] == 0).all()
    assert (q > 0).sum() == 4 * 3 * 39


def test_sampling_follows_the_distribution():
    """Slot 0 over a grid of uniforms: counts within one of 1000 q, slot 1 depends on slot 0."""
    args = batch()
    steps = 1000
    one = [
        a[1:2].expand(steps, *a.shape[1:]).contiguous() if n in PER_SEQUENCE else a
        for n, a in enumerate(args)
    ]
    one[12] = ((torch.arange(steps) + 0.5) / steps)[:, None].expand(steps, 3).contiguous()
    tokens, q, _ = ops.markov_chain(*one)
    counts = torch.zeros(60).index_add(0, tokens[:, 0], torch.ones(steps))[args[10]]
    assert ((counts - steps * q[0, 0]).abs() <= 1).all()
    assert len({tuple(row) for row in q[:, 1].tolist()}) == len(set(tokens[:, 0].tolist()))


@pytest.mark.parametrize(
    "index, change, message",
    [
        (0, lambda t: t.double(), "base must have dtype Float"),
        (0, lambda t: t[0], r"base must be \[sequences, slots, draft vocab\]"),
        (0, lambda t: t[..., :0].contiguous(), "base must have at least one column"),
        (0, lambda t: t[..., 1:].contiguous(), "w2 must have .* bytes|d2t must have 39 entries"),
        (0, lambda t: t * math.nan, r"scores must be finite or -inf, got NaN or \+inf in sequ"),
        (1, lambda t: t.half(), "hidden must have dtype Float"),
        (1, lambda t: t[:, 1:].contiguous(), "hidden must have 3 slots"),
        (1, lambda t: t[1:], "hidden must have 4 sequences"),
        (1, lambda t: t[..., 1:].contiguous(), "confidence_weight must have 51 or 19 entries"),
        (2, lambda t: t.int(), "anchor must have dtype Long"),
        (2, lambda t: t[1:], "anchor must have 4 entries"),
        (2, lambda t: t * 0 + 60, r"anchor must be rows of w1, \[0, 60\), got 60 in sequence 0"),
        (2, lambda t: t * 0 - 1, "got -1 in sequence 0"),
        (3, lambda t: t.float(), "w1 must have dtype Byte"),
        (3, lambda t: t[:, 1:].contiguous(), "w1 must have rows of a multiple of 34 bytes"),
        (3, lambda t: t[:39], r"d2t must hold absolute target ids, \[0, 39\)"),
        (4, lambda t: 999, "w1_type must be one of"),
        (5, lambda t: t[64:], "w2 must have .* bytes, what repack"),
        (5, lambda t: t.view(-1, 64), r"w2 must be \[bytes\]"),
        (6, lambda t: 999, "w2_type must be one of"),
        (6, lambda t: 12, "a quant of its type holds 256"),
        (7, lambda t: t[1:], "confidence_weight must have 52 or 20 entries, got 51"),
        (7, lambda t: t[None], r"confidence_weight must be \[hidden \+ rank\] or \[hidden\]"),
        (7, lambda t: None, "confidence_weight must be given when confidence_bias is"),
        (8, lambda t: t.double(), "confidence_bias must have dtype Float"),
        (8, lambda t: t.repeat(2), "confidence_bias must have 1 entry"),
        (10, lambda t: t.int(), "d2t must have dtype Long"),
        (10, lambda t: t[1:], "d2t must have 40 entries"),
        (10, lambda t: t + 60, "d2t must hold absolute target ids"),
        (11, lambda t: t - 1, "temperature must be finite and >= 0"),
        (11, lambda t: None, "temperature must be given when uniform is"),
        (11, lambda t: t[1:], "temperature must have 4 entries"),
        (12, lambda t: None, "uniform must be given when temperature is"),
        (12, lambda t: t + 1, r"uniform must be in \[0, 1\)"),
        (12, lambda t: t[:, 1:].contiguous(), "uniform must have 3 columns"),
    ],
)
def test_refuses(index, change, message):
    args = batch()
    args[index] = change(args[index])
    with pytest.raises(RuntimeError, match=message):
        ops.markov_chain(*args)


def test_refuses_options():
    args = batch()
    with pytest.raises(RuntimeError, match="draft_topk must be >= 0"):
        ops.markov_chain(*args, -1, -1)
    args[10] = None
    args[3] = args[3][:39]
    with pytest.raises(RuntimeError, match="w1 must have a row for each of the 40 columns"):
        ops.markov_chain(*args)


def test_a_shorter_chain_is_the_beginning_of_a_longer_one():
    """The recurrent state goes from slot to slot and nowhere else; the bias may be absent."""
    for head in (1, 2):
        args, options = batch(), joint(head, bias=False)
        whole = ops.markov_chain(*args, **options)
        args[0], args[1] = args[0][:, :2].contiguous(), args[1][:, :2].contiguous()
        args[12] = args[12][:, :2].contiguous()
        for short, long in zip(ops.markov_chain(*args, **options), whole, strict=True):
            assert torch.equal(short, long[:, :2])


def test_the_head_decides_the_token():
    args = batch()
    vanilla, gated, rnn = (ops.markov_chain(*args, **joint(head))[1] for head in (0, 1, 2))
    assert not torch.equal(vanilla, gated)
    assert not torch.equal(gated, rnn)
    # gates that are all open, exp(-88) = 0 beside 1: the vanilla head, bit for bit
    open_gates = joint(1)
    open_gates["joint"] = torch.zeros_like(open_gates["joint"])
    open_gates["joint_bias"] = torch.full((32,), 88.0)
    for a, b in zip(ops.markov_chain(*args, **open_gates), ops.markov_chain(*args), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_type": 3}, r"head_type must be 0 \(vanilla\), 1 \(gated\) or 2 \(rnn\), got 3"),
        ({"head_type": 0}, "joint must be None with head_type 0, got a tensor"),
        ({"joint": None}, "joint must be given with head_type 1 and 2, got None"),
        ({"head_type": 0, "joint": None}, "joint_bias must be None without joint"),
        ({"head_type": 2}, "joint must have .* bytes, what repack"),
        ({"joint_type": 999}, "joint_type must be one of"),
        ({"joint_type": 8}, "joint must have rows of 52 values, but a quant of its type holds 32"),
        ({"joint_bias": torch.zeros(31)}, "joint_bias must have 32 entries, one per row of joint"),
        ({"joint_bias": torch.zeros(32).half()}, "joint_bias must have dtype Float"),
    ],
)
def test_refuses_joint(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.markov_chain(*batch(), **(joint(1) | change))
