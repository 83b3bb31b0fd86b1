"""The loop: stops inside an accepted prefix, limits, streaming, statistics, sessions, bursts."""

import random

import pytest
import torch

from torch_dflash.decoding.loop import Generation, Session
from torch_dflash.decoding.proposal import Proposal
from torch_dflash.decoding.sampling import SamplingParams
from torch_dflash.decoding.stop import StopChecker
from torch_dflash.gguf import GGUFFile
from torch_dflash.gguf.tokenizer import tokenizer_from_gguf
from torch_dflash.load import load_drafter, load_target
from torch_dflash.policies import ConfidencePolicy, CostPolicy, FixedPolicy
from torch_dflash.testing.tiny import BYTES, tiny_drafter, tiny_hybrid

PROMPT = [5, 17, 300, 2, 44, 9, 81]
KINDS = ("dflash", "dflash2", "dspark")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_hybrid(tmp_path_factory.mktemp("loop") / "target.gguf", seed=1, layers=3)


@pytest.fixture(scope="module")
def target(path):
    return load_target(path)


@pytest.fixture(scope="module")
def tokenizer(path):
    with GGUFFile.open(path) as file:
        return tokenizer_from_gguf(file)


def drafter_folder(folder, kind, **changes):
    return tiny_drafter(
        folder, kind, **{"seed": 3, "num_target_layers": 3, "target_layer_ids": (0, 1)} | changes
    )


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    return {k: load_drafter(drafter_folder(folder / k, k), target) for k in KINDS}


@pytest.fixture(scope="module")
def plain(target):
    """What the model says, greedily."""
    return Session(target).generate(PROMPT, 64).tokens


class Scripted(torch.nn.Module):
    """Proposes the known text; ``right`` says how many tokens of each draft are right."""

    def __init__(self, config, text, right=lambda: 99):
        super().__init__()
        self.config, self.text, self.right = config, text, right
        self.length, self.commits, self.asked = 0, [], []

    def reset(self):
        self.length, self.commits = 0, []

    def commit(self, target_hidden):
        self.commits.append(target_hidden.clone())
        self.length += target_hidden.shape[0]

    def propose(self, anchor, draft_tokens, sampling):
        assert int(anchor) == self.text[self.length]
        self.asked.append(draft_tokens)
        tokens = (self.text[self.length + 1 :] + [0] * draft_tokens)[:draft_tokens]
        for i in range(self.right(), draft_tokens):
            tokens[i] = (tokens[i] + 1) % 512
        return Proposal(torch.tensor([tokens]), torch.tensor([draft_tokens], dtype=torch.int32))


@pytest.fixture
def scripted(target, drafters, plain):
    return Scripted(drafters["dflash"].config, PROMPT + plain)


class Lengths:
    """A policy that follows a list."""

    limit = None

    def __init__(self, lengths):
        self.lengths, self.seen = list(lengths), []

    def draft_tokens(self, most):
        return min(most, self.lengths.pop(0))

    def select(self, proposal, wanted):
        return wanted

    def observe(self, offered, accepted, seconds):
        self.seen.append((offered, accepted))
        assert seconds > 0


class TestStops:
    @pytest.mark.parametrize("at", [0, 1, 3, 7, 8, 9, 15])
    def test_a_stop_token_inside_an_accepted_prefix(self, target, scripted, plain, at):
        at = plain.index(plain[at])  # where this token comes first
        stop = StopChecker([plain[at]])
        out = Session(target, scripted).generate(PROMPT, 40, stop=stop)
        assert out.tokens == plain[: at + 1]
        assert out.finish_reason == "stop_token"
        assert out.stats.new_tokens == at + 1
        # the state holds the prompt and all but the stop token
        assert target.length == len(PROMPT) + at

    def test_a_session_goes_on_after_a_stop_in_the_middle(self, target, scripted, plain):
        session = Session(target, scripted)
        cut = session.generate(PROMPT, 40, stop=StopChecker([plain[4]])).tokens
        more = session.generate(PROMPT + cut, 20).tokens
        assert more == plain[len(cut) : len(cut) + 20]

    def test_a_stop_string_is_cut_out_of_the_text(self, target, scripted, plain, tokenizer):
        text = tokenizer.decode(plain[:30])
        string = tokenizer.decode(plain[10:12])
        assert len(string) > 3
        stream = tokenizer.stream()
        stop = StopChecker((), [string], stream.push, stream.finish)
        out = Session(target, scripted).generate(PROMPT, 30, stop=stop)
        assert out.text == text[: text.index(string)]
        assert out.finish_reason == "stop_string"
        assert out.tokens == plain[: len(out.tokens)]
        assert string in tokenizer.decode(out.tokens)
        assert string not in tokenizer.decode(out.tokens[:-1])

    def test_a_used_checker_is_refused(self, target, plain):
        stop = StopChecker([plain[2]])
        session = Session(target)
        session.generate(PROMPT, 10, stop=stop)
        with pytest.raises(ValueError, match="stop must be new, got one that ended with stop_tok"):
            session.generate(PROMPT, 10, stop=stop)


class TestLimit:
    @pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 10, 17])
    def test_max_new_tokens_is_exact(self, target, scripted, plain, most):
        out = Session(target, scripted).generate(PROMPT, most)
        assert out.tokens == plain[:most]
        assert out.finish_reason == "length"
        assert out.stats.new_tokens == most
        assert target.length == len(PROMPT) + most - 1

    def test_row_17_no_more_rows_than_can_be_used(self, target, scripted):
        """7 draft tokens, 9 wanted behind the first: 8 come with the first step, one is left."""
        seen = []
        verify = target.verify
        target.verify = lambda tokens: seen.append(len(tokens)) or verify(tokens)
        try:
            out = Session(target, scripted).generate(PROMPT, 10)
            assert seen == [8, 2]
            assert scripted.asked == [7, 1]
            seen.clear()
            short = Session(target, scripted, FixedPolicy(2)).generate(PROMPT, 10)
            assert seen == [3, 3, 3]
        finally:
            del target.verify
        assert out.stats.emitted_lengths == [8, 1]
        assert short.stats.emitted_lengths == [3, 3, 3]


class TestText:
    def test_streamed_text_is_the_text_of_the_tokens(self, target, scripted, plain, tokenizer):
        result = Generation()
        stream = tokenizer.stream()
        stop = StopChecker((), ["never said"], stream.push, stream.finish)
        steps = list(Session(target, scripted).stream(PROMPT, 40, stop=stop, result=result))
        assert [t for s in steps for t in s.tokens] == plain[:40]
        assert "".join(s.text for s in steps) == tokenizer.decode(plain[:40])
        assert [len(s.tokens) for s in steps] == [1, *result.stats.emitted_lengths]
        assert [(s.offered, s.accepted) for s in steps[1:3]] == [(7, 7), (7, 7)]

    def test_a_character_cut_by_the_limit_shows(self, target, tokenizer):
        """The first of the two bytes of a letter: without the second it is U+FFFD."""
        lead = BYTES.index("Ã")  # byte 0xC3
        piece = tokenizer.piece(lead)
        assert piece == b"\xc3"
        target.vocabulary.head.bias = torch.where(torch.arange(512) == lead, 1e4, 0.0)
        try:
            for most in (1, 2):
                stream = tokenizer.stream()
                stop = StopChecker((), (), stream.push, stream.finish)
                out = Session(target).generate(PROMPT, most, stop=stop)
                assert out.tokens == [lead] * most
                assert out.text == "�" * most == tokenizer.decode(out.tokens)
        finally:
            target.vocabulary.head.bias = None

    def test_flush_ends_the_decoder_also_at_a_stop_token(self):
        stop = StopChecker([9], ["xyz"], lambda token: "x", lambda: "�")
        assert stop.push(0) == ""
        assert stop.push(9) == "x�"


class TestStats:
    def test_row_14_offered_is_what_was_verified(self, target, scripted):
        """Two of seven drafted tokens verified, both right: 100 %, not 2 / 7."""
        out = Session(target, scripted, FixedPolicy(2)).generate(PROMPT, 31)
        s = out.stats
        assert (s.steps, s.drafted_steps, s.offered, s.accepted) == (10, 10, 20, 20)
        assert s.acceptance_rate == 1
        assert s.acceptance_length == 3
        assert s.to_dict()["acceptance_at"] == [1, 1]

    def test_counts_by_position_and_plain_steps(self, target, scripted):
        rights = iter([3, 0, 7])
        scripted.right = lambda: next(rights)
        policy = Lengths([7, 0, 5, 0, 7])
        s = Session(target, scripted, policy).generate(PROMPT, 1 + 4 + 1 + 1 + 1 + 8).stats
        assert s.emitted_lengths == [4, 1, 1, 1, 8]
        assert policy.seen == [(7, 3), (0, 0), (5, 0), (0, 0), (7, 7)]
        assert (s.steps, s.drafted_steps, s.offered, s.accepted) == (5, 3, 19, 10)
        assert s.acceptance_length == 3
        assert [s.offered_at[i] for i in range(7)] == [3, 3, 3, 3, 3, 2, 2]
        assert [s.accepted_at[i] for i in range(7)] == [2, 2, 2, 1, 1, 1, 1]
        assert {rows: len(times) for rows, times in s.step_seconds.items()} == {8: 2, 1: 2, 6: 1}

    def test_nothing_offered(self, target):
        s = Session(target).generate(PROMPT, 5).stats
        assert (s.acceptance_rate, s.acceptance_length, s.offered) == (0, 1, 0)
        one = Session(target).generate(PROMPT, 1).stats
        assert (one.steps, one.acceptance_length, one.tokens_per_second) == (0, 0, 0)


class TestContext:
    """Which rows of target_hidden a drafter gets, and when."""

    @pytest.mark.parametrize(
        "lengths", [[7] * 30, [0] * 30, [7, 0, 0, 0, 7, 1, 0, 2] * 5, [0, 0, 7] * 12]
    )
    def test_rows_29_33_48_every_row_once_and_in_order(self, target, scripted, plain, lengths):
        rng = random.Random(5)
        scripted.right = lambda: rng.randrange(8)
        out = Session(target, scripted, Lengths(lengths)).generate(PROMPT, 30)
        assert out.tokens == plain[:30]
        rows = torch.cat(scripted.commits)
        target.reset()
        target.capture(scripted.config.target_layer_ids)
        whole = []
        target.prefill(torch.tensor(PROMPT + plain[:29]), whole.append)
        # the last steps may wait for a draft that never came; everything before is there, exactly
        assert torch.equal(rows, torch.cat(whole)[: len(rows)])
        # the prompt, then all that waits, in one piece, before each draft but one right behind it
        assert len(scripted.commits) == 1 + len(scripted.asked) - (lengths[0] > 0)

    def test_a_long_burst_is_handed_over_in_time(self, target, scripted, plain, monkeypatch):
        Session(target, scripted, Lengths([0] * 64)).generate(PROMPT, 64)
        assert len(scripted.commits) == 1  # the prompt: 63 steps wait
        assert scripted.length == len(PROMPT)
        row = 4 * scripted.config.target_hidden_columns
        monkeypatch.setattr("torch_dflash.decoding.loop._PENDING_BYTES", 40 * row)
        session = Session(target, scripted, Lengths([0] * 80))
        session.generate(PROMPT, 70)
        assert scripted.length == len(PROMPT) + 40

    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_33_48_a_real_drafter_drafts_alike_after_a_burst(self, target, drafters, kind):
        """Its context comes in other pieces, and is the same to the last bit."""
        drafter, asked = drafters[kind], []

        def run(lengths):
            session = Session(target, drafter, Lengths(lengths))
            text = session.generate(PROMPT, 25).tokens
            session._flush()
            assert drafter.length == len(PROMPT) + 24
            asked.append(text)
            return drafter.propose(torch.tensor(text[-1:]), 5, SamplingParams()).tokens

        drafts = [run(lengths) for lengths in ([0] * 24, [3] * 24, [0, 5, 0, 0, 7] * 6)]
        assert torch.equal(drafts[0], drafts[1])
        assert torch.equal(drafts[0], drafts[2])
        assert asked[0] == asked[1] == asked[2]
        caches = [c[:, : drafter.length].clone() for c in drafter.cache.k + drafter.cache.v]
        run([1] * 24)
        for a, b in zip(caches, drafter.cache.k + drafter.cache.v, strict=True):
            assert torch.equal(a, b[:, : drafter.length])


class TestSessions:
    def test_row_34_a_session_that_is_reset_starts_afresh(self, target, drafters, plain):
        for kind in KINDS:
            session = Session(target, drafters[kind])
            for other in ([1], [400, 3], PROMPT[::-1]):
                session.generate(other, 9)
                session.reset()
                assert session.generate(PROMPT, 20).tokens == plain[:20]

    def test_row_44_only_an_exact_extension_is_reused(self, target, plain, monkeypatch):
        ran = []
        prefill = target.prefill
        monkeypatch.setattr(
            target, "prefill", lambda tokens, sink=None: ran.append(len(tokens)) or prefill(tokens)
        )
        session = Session(target)

        assert session.generate(PROMPT, 4).tokens == plain[:4]
        assert session.generate(PROMPT + plain[:4], 4).tokens == plain[4:8]
        assert session.generate(PROMPT + plain[:8] + [3], 4).tokens
        assert ran == [7, 1, 2]
        ran.clear()
        same = session.generate(PROMPT + plain[:8] + [3], 4).tokens  # known and not longer
        cut = session.generate(PROMPT + plain[:5], 4).tokens  # shorter than what is held
        diverged = session.generate([*PROMPT, 1, *plain[:30]], 4).tokens
        assert ran == [16, 12, 38]
        assert cut == plain[5:9]
        assert same == Session(target).generate(PROMPT + plain[:8] + [3], 4).tokens
        assert diverged == Session(target).generate([*PROMPT, 1, *plain[:30]], 4).tokens

    def test_another_session_on_the_same_target_is_noticed(self, target, drafters, plain):
        first = Session(target, drafters["dflash"])
        first.generate(PROMPT, 5)
        second = Session(target)  # no drafter, so nothing is captured
        second.generate(PROMPT[::-1], 6)
        assert first.generate(PROMPT + plain[:5], 10).tokens == plain[5:15]
        assert drafters["dflash"].length == target.length - len(first._pending[-1])
        running = first.stream(PROMPT, 30)
        next(running)
        second.generate(PROMPT, 3)
        with pytest.raises(RuntimeError, match="used by another session or stream in the meantime"):
            next(running)

    def test_an_interrupt_leaves_nothing_to_extend(self, target, plain, monkeypatch):
        session = Session(target)
        session.generate(PROMPT, 5)
        monkeypatch.setattr(target, "commit", lambda rows: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT + plain[:5], 5)
        monkeypatch.undo()
        assert session.generate(PROMPT + plain[:5], 10).tokens == plain[5:15]

    def test_an_interrupted_prompt_leaves_nothing_behind(self, target, drafters, plain):
        drafter = drafters["dflash"]
        session = Session(target, drafter)
        commit = drafter.commit
        drafter.commit = lambda rows: (_ for _ in ()).throw(KeyboardInterrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                session.generate(PROMPT * 6, 5)
        finally:
            drafter.commit = commit
        assert session.generate(PROMPT, 20).tokens == plain[:20]

    def test_a_stream_left_in_the_middle_can_be_extended(self, target, scripted, plain):
        session = Session(target, scripted)
        steps = session.stream(PROMPT, 40)
        got = [t for _, step in zip(range(2), steps, strict=False) for t in step.tokens]
        steps.close()
        assert session.generate(PROMPT + got, 10).tokens == plain[len(got) : len(got) + 10]

    @pytest.mark.parametrize("state", ["journal", "snapshots"])
    def test_row_40_caches_grow_in_the_middle(self, path, tmp_path, state):
        """At 256 and 512 rows the caches move. Tokens equal those of caches that never moved."""
        target = load_target(path, state=state)
        prompt = [(7 * i) % 500 for i in range(250)]
        target.state.kv.reserve(1024)
        before = [c.data_ptr() for c in target.state.kv.k]
        want = Session(target).generate(prompt, 280).tokens
        assert before == [c.data_ptr() for c in target.state.kv.k]
        moving = load_target(path, state=state)
        assert moving.state.kv.capacity == 0
        drafter = load_drafter(drafter_folder(tmp_path / "d", "dflash2"), moving)
        out = Session(moving, drafter, FixedPolicy(3)).generate(prompt, 280)
        assert out.tokens == want
        assert moving.state.kv.capacity == drafter.cache.capacity == 1024


class TestDrafters:
    def test_rows_08_09_another_drafter_on_the_same_target(self, target, drafters, plain, tmp_path):
        """Nothing of the first drafter (codebook, rank, caches) survives into the second."""

        def drafts(drafter):
            Session(target, drafter).generate(PROMPT, 20)
            drafter.reset()
            target.reset()
            target.capture(drafter.config.target_layer_ids)
            target.prefill(torch.tensor(PROMPT), drafter.commit)
            return drafter.propose(torch.tensor([plain[0]]), 7, SamplingParams()).tokens.tolist()

        first = drafts(drafters["dflash2"])
        small = {"dflash_config": {
            "mask_token_id": 511, "target_layer_ids": [0], "conv_kernel_size": 2,
            "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 3,
        }}  # fmt: skip
        other_folder = drafter_folder(
            tmp_path / "other", "dflash2", seed=8, target_layer_ids=(0,), **small
        )
        other = load_drafter(other_folder, target)
        fresh = drafts(load_drafter(other_folder, target))
        second = drafts(other)
        assert second == fresh != first
        assert drafts(drafters["dflash2"]) == first
        # the same object, other weights: park and reload
        codebook = drafters["dflash2"].successor.packed
        kept = codebook.clone()
        codebook.copy_((kept.view(torch.bfloat16) * 64).view(torch.uint8))
        changed = drafts(drafters["dflash2"])
        codebook.copy_(kept)
        assert changed != first == drafts(drafters["dflash2"])

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_proposal_leaves_nothing_behind(self, target, drafters, kind):
        drafter = drafters[kind]
        Session(target, drafter).generate(PROMPT, 5)
        anchor, length = torch.tensor([3]), drafter.length
        first = drafter.propose(anchor, 7, SamplingParams()).tokens
        drafter.propose(torch.tensor([99]), 2, SamplingParams(2.0, seed=4))
        assert torch.equal(drafter.propose(anchor, 7, SamplingParams()).tokens, first)
        assert drafter.length == length

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_nan_in_target_hidden_is_an_error_of_the_draft(self, drafters, kind, temperature):
        drafter = drafters[kind]
        drafter.reset()
        hidden = torch.ones(9, drafter.config.target_hidden_columns)
        hidden[8, 5] = float("nan")
        drafter.commit(hidden)
        with pytest.raises(RuntimeError, match="NaN"):
            drafter.propose(torch.tensor([3]), 3, SamplingParams(temperature))
        drafter.reset()


class TestArguments:
    @pytest.mark.parametrize("kind", [FixedPolicy, CostPolicy, ConfidencePolicy])
    def test_a_limit_beyond_the_block_is_refused(self, target, drafters, plain, kind):
        """Not clamped: who asks for 9 draft tokens learns that 7 are what there is."""
        most = drafters["dflash"].config.max_draft_tokens
        text = rf"draft_tokens must be 1..{most}, what a block of this dflash drafter holds, got 9"
        with pytest.raises(ValueError, match=text):
            Session(target, drafters["dflash"], kind(draft_tokens=9))
        Session(target, None, kind(draft_tokens=9))  # nothing is drafted, nothing clamped
        session = Session(target, drafters["dflash"], kind(draft_tokens=most))
        assert session.generate(PROMPT, 8).tokens == plain[:8]

    @pytest.mark.parametrize(
        "prompt, new, error, text",
        [
            ([], 5, ValueError, "prompt must have at least one token, got none"),
            ([3, 512], 5, ValueError, "prompt token 512 is outside the vocabulary of 512"),
            ([-1], 5, ValueError, "prompt token -1 is outside the vocabulary of 512"),
            ([3], 0, ValueError, "max_new_tokens must be >= 1, got 0"),
            ([3], -4, ValueError, "max_new_tokens must be >= 1, got -4"),
            ([3], 2.5, TypeError, "'float' object cannot be interpreted as an integer"),
            ([3.5], 2, TypeError, "'float' object cannot be interpreted as an integer"),
            (["a"], 2, TypeError, "'str' object cannot be interpreted as an integer"),
        ],
    )
    def test_wrong_arguments(self, target, prompt, new, error, text):
        with pytest.raises(error, match=text):
            Session(target).generate(prompt, new)

    def test_integers_of_any_kind(self, target, plain):
        assert Session(target).generate(torch.tensor(PROMPT), 4).tokens == plain[:4]

    @pytest.mark.parametrize(
        "changes, text",
        [
            ({"temperature": -1.0}, "temperature must be finite and >= 0, got -1.0"),
            ({"temperature": float("nan")}, "temperature must be finite and >= 0, got nan"),
            ({"temperature": float("inf")}, "temperature must be finite and >= 0, got inf"),
            ({"top_k": -1}, "top_k must be an integer >= 0"),
            ({"top_k": 1 << 63}, "top_k must be below 2.63, got 9223372036854775808"),
            ({"top_k": 2.5}, "top_k must be an integer >= 0 .* got 2.5"),
            ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
            ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
            ({"top_p": float("nan")}, r"top_p must be in \(0, 1\], got nan"),
            ({"seed": -1}, r"seed must be an integer in \[0, 2\^63\), got -1"),
            ({"seed": 1 << 63}, "seed must be an integer in"),
            ({"seed": 1.0}, "seed must be an integer in"),
        ],
    )
    def test_sampling_parameters(self, changes, text):
        with pytest.raises(ValueError, match=text):
            SamplingParams(**changes)

    def test_beyond_the_trained_context_is_said_once(self, target, caplog):
        trained = target.config.context_length
        session = Session(target)
        list(zip(session.stream(PROMPT, trained - len(PROMPT)), range(1), strict=False))
        assert not caplog.records
        list(zip(session.stream(PROMPT, trained), range(1), strict=False))
        assert [r.getMessage() for r in caplog.records] == [
            f"7 prompt tokens and up to {trained} new ones go beyond the {trained} that the target "
            "was trained for; what comes after may be nonsense"
        ]
