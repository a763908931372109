"""Trainer and generator: what is measured, which planted cause is named first, and what closes the gap."""

import json
import math
import re

import pytest
import torch
from torch import nn

import amp_plugin
from amp_plugin import Gap, OpRules, Rollout
from amp_plugin.numerics.emulated_rounding import EmulatedRounding
from amp_plugin.tuning.gap_tuning import CLOSE, GapTuning
from amp_plugin.tuning.log_probs import GapNumbers, Sampling
from amp_plugin.tuning.model_call import model_calls
from amp_plugin.tuning.rollouts import RolloutBatch, Sample
from amp_plugin.tuning.suspects import suspects_of
from tests.commands import amp

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from tests.tuning import planted_llama
from tests.tuning.second_llama import PLANTED, Engine

pytestmark = pytest.mark.native
WORDS, PROMPTS, LENGTH = 64, 8, 24


def policy(
    attention: str = "sdpa", *, sharpness: float = 1.0, mixed: float = 1.0, embedding: float = 1.0
) -> nn.Module:
    """Return a small Llama with random weights.

    Its rounding errors are as large as those of a trained one.

    Args:
        attention: The name of the attention.
        sharpness: A factor for the scores of the attention.
        mixed: A factor for the output of the attention.
        embedding: A factor for the embeddings, which are the beginning of the residual stream.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        attn_implementation=attention,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    factors = {"q_proj": sharpness, "o_proj": mixed, "embed_tokens": embedding}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.3)
            weight.mul_(factors.get(name.split(".")[-2], 1.0))
    return model


def prompts(count: int = PROMPTS) -> list[list[int]]:
    """Return prompts of different lengths."""
    draws = torch.Generator().manual_seed(3)
    return [torch.randint(1, WORDS, (3 + i % 4,), generator=draws).tolist() for i in range(count)]


def step_of(model, dtype=torch.bfloat16):
    """Return the trainer's step, which processes all tokens at once under autocast."""

    def step(tokens):
        with amp_plugin.autocast("cpu", dtype=dtype):
            return model(tokens, use_cache=False)

    return step


def with_head_in_fp32(**strength: float) -> nn.Module:
    """Return a Llama whose head runs in fp32."""
    model = policy(**strength)
    amp_plugin.run_in(torch.float32)(model.lm_head)
    return model


class Fp8Cache(transformers.DynamicCache):
    """A cache that keeps keys and values in fp8."""

    def update(self, key_states, value_states, *args, **kwargs):
        operand = torch.get_autocast_dtype("cpu")
        states = (part.to(operand) for part in (key_states, value_states))
        low = (part.to(torch.float8_e4m3fn).to(part.dtype) for part in states)
        return super().update(*low, *args, **kwargs)


def generated(
    model, dtype=torch.bfloat16, *, processed=False, fp8=False, count=PROMPTS, **settings
) -> Rollout:
    """Sample with transformers' cache, in two left-padded batches, and record log-probabilities."""
    torch.manual_seed(1)
    tokens, values, given = [], [], prompts(count)
    for part in (given[:3], given[3:]):
        longest = max(map(len, part))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in part])
        with amp_plugin.autocast("cpu", dtype=dtype):
            made = model.generate(
                padded,
                attention_mask=(padded != 0).long(),
                do_sample=True,
                top_k=0,
                max_new_tokens=LENGTH,
                output_logits=True,
                output_scores=True,
                return_dict_in_generate=True,
                **({"past_key_values": Fp8Cache()} if fp8 else {}),
                **settings,
            )
        sampled = made.sequences[:, longest:]
        steps = torch.stack(made.scores if processed else made.logits, 1).double().log_softmax(-1)
        values += steps.gather(-1, sampled[..., None])[..., 0].tolist()
        tokens += sampled.tolist()
    stated = {name: settings.get(name, 1.0) for name in ("temperature", "top_p")}
    return Rollout.of(given, tokens, values, **stated)


def found_for(model, rollout, dtype=torch.bfloat16, **options) -> GapTuning:
    return amp_plugin.tune(step_of(model, dtype), model=model, goal=Gap(rollout, **options))


GOOD = {"version": 1, "prompt_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5]}


class TestTheFile:
    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"version": 2}, "version: got 2; this release reads version 1"),
            ({"version": None}, "version"),
            ({"prompt_ids": []}, "prompt_ids: give a list with at least one"),
            ({"prompt_ids": "1 2"}, "prompt_ids: give a list"),
            ({"token_ids": [3.0]}, "token_ids: give token ids, whole numbers from 0, got 3.0"),
            ({"token_ids": [True]}, "token ids, whole numbers"),
            ({"token_ids": [-3]}, "whole numbers from 0, got -3"),
            ({"logprobs": [-0.5, -0.5]}, "got 2 numbers for 1 token_ids; give one for each sampled token"),
            ({"logprobs": [None]}, "logprobs: give finite numbers, got None"),
            ({"logprobs": [math.nan]}, "finite numbers, got nan"),
            ({"logprobs": [0.6]}, "natural logarithms of probabilities, which are at most 0, got 0.6"),
            ({"temperature": 0}, "temperature: give a number above 0, got 0"),
            ({"top_p": 1.5}, "top_p: give a number above 0 and at most 1, got 1.5"),
            ({"prompt_token_ids": [1]}, "unknown key 'prompt_token_ids'; did you mean prompt_ids?"),
        ],
    )
    def test_a_line_that_does_not_fit_is_an_error_that_names_file_line_and_key(self, change, told, tmp_path):
        file = tmp_path / "rollouts.jsonl"
        file.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | change) + "\n")
        with pytest.raises(ValueError, match=re.escape(told)) as error:
            Gap(file)
        assert f"{file}, line 3: " in str(error.value)

    @pytest.mark.parametrize("key", ["version", "prompt_ids", "token_ids", "logprobs"])
    def test_a_key_that_is_missing_is_named(self, key, tmp_path):
        file = tmp_path / "rollouts.jsonl"
        file.write_text(json.dumps({name: value for name, value in GOOD.items() if name != key}))
        with pytest.raises(ValueError, match=f"line 1: the key '{key}' is missing"):
            Rollout.from_jsonl(file)

    @pytest.mark.parametrize(("text", "told"), [("", "no sequence"), ("[1]", "an object"), ("{", "not JSON")])
    def test_other_text_is_an_error(self, text, told, tmp_path):
        file = tmp_path / "rollouts.jsonl"
        file.write_text(text)
        with pytest.raises(ValueError, match=told):
            Rollout.from_jsonl(file)

    def test_what_is_saved_is_read(self, tmp_path):
        rollout = Rollout.of([[1, 2], [4]], [[3], [5, 6]], [[-0.5], [-1.0, -2.0]], temperature=0.7, top_p=0.9)
        rollout.save(tmp_path / "rollouts.jsonl")
        assert Rollout.from_jsonl(tmp_path / "rollouts.jsonl") == rollout

    def test_a_batch_knows_which_logits_predict_which_token(self):
        batch = RolloutBatch.of(
            [
                Sample(prompt_ids=(1, 2), token_ids=(3,), logprobs=(-0.5,)),
                Sample(prompt_ids=(4,), token_ids=(5, 6), logprobs=(-1.0, -2.0), top_p=0.9),
            ]
        )
        assert batch.tokens.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert [*zip(*(part.tolist() for part in (*batch.places, batch.targets)), strict=True)] == [
            *((0, 1, 3), (1, 0, 5), (1, 1, 6))
        ]
        assert batch.recorded.tolist() == [-0.5, -1.0, -2.0]
        assert batch.stated.top_p.tolist() == [1.0, 0.9, 0.9]


class TestTheNumbers:
    def test_they_are_those_of_their_formulas(self):
        draws = torch.Generator().manual_seed(0)
        ours, theirs = torch.randn(2, 500, generator=draws, dtype=torch.float64)
        numbers, d = GapNumbers.of(ours, theirs), (ours - theirs).tolist()
        sizes = sorted(map(abs, d))
        assert numbers.mean == pytest.approx(math.fsum(sizes) / 500)
        assert numbers.max == sizes[-1]
        assert sizes[494] <= numbers.p99 <= sizes[495]
        assert numbers.kl == pytest.approx(math.fsum(math.exp(x) - 1 - x for x in d) / 500)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    @pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
    def test_log_probabilities_are_those_of_transformers(self, temperature, top_p):
        draws = torch.Generator().manual_seed(0)
        logits = 2 * torch.randn(50, 20, generator=draws, dtype=torch.float64)
        warped = transformers.TemperatureLogitsWarper(temperature)(None, logits.clone())
        warped = transformers.TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped
        targets = warped.argmax(-1)
        expected = warped.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ours = Sampling(temperature=temperature, top_p=top_p).log_probs(logits, targets)
        assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-12)


# planted cause -> a pattern for the name of the first cause
NAMED = {
    "norm casts before the weight": r"mul in LlamaRMSNorm|LlamaRMSNorm.forward computes",
    "norm epsilon in bf16": r"(add|mean) in LlamaRMSNorm",
    "rope in bf16": r"rotary",
    "head in bf16": r"the head computes in bfloat16",
    "softmax in bf16": r"scores and probabilities of the attention are rounded to bfloat16",
    "residual in bf16": r"the residual stream is kept in bfloat16",
    "scale after the cast": r"multiplies the query by the scale after casting the query",
    "cache in fp8": r"keys and values of the attention are kept in fp8",
    "top-p": r"top-p: the recorded log-probabilities were computed with top-p 0.9",
    "temperature": r"temperature: the recorded log-probabilities were computed with temperature 0.7",
}
QUICK = ("temperature",)


def is_rounding(found: GapTuning) -> bool:
    is_of_rounding = found.headline.startswith("rounding alone explains the gap")
    return is_of_rounding and not (found.causes or found.changes)


class TestAPlantedCause:
    def check(self, planted, *, is_whole):
        model = with_head_in_fp32()
        rollout = Engine(model, planted).rollout(prompts())
        found = found_for(model, rollout)
        tokens = [list(sample.token_ids) for sample in rollout.samples]
        cures = {"top-p": {"top_p": 0.9}, "temperature": {"temperature": 0.7}}
        cured = (
            (rollout if planted in cures else Engine(model).rollout(prompts(), tokens)),
            cures.get(planted, {}),
        )
        gap = Gap(cured[0], **cured[1]).measure(step_of(model)).mean
        row = [planted, found.gap.mean, found.floor, found.explained, gap, found.causes[0].name]
        print("| " + " | ".join(f"{x:.2e}" if isinstance(x, float) else x for x in row) + " |")
        assert re.search(NAMED[planted], found.causes[0].name), found
        assert found.causes[0].side == ("record" if planted in {"top-p", "temperature"} else "generator")
        assert not found.is_rounding
        assert found.explained < 0.05 * found.floor, found  # two independent roundings differ by the floor
        assert gap <= CLOSE * found.floor
        assert gap < 0.8 * found.gap.mean
        if is_whole:
            again = found_for(model, cured[0], **cured[1])
            assert is_rounding(again), again

    @pytest.mark.parametrize("planted", QUICK)
    def test_is_named_first_and_without_it_the_gap_is_at_the_floor(self, planted):
        self.check(planted, is_whole=False)

    @pytest.mark.whole_run
    @pytest.mark.parametrize("planted", PLANTED)
    def test_so_is_each_of_the_list_and_then_it_is_rounding(self, planted):
        self.check(planted, is_whole=True)

    @pytest.mark.whole_run
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"temperature": 0.7, "processed": True}, "temperature"),
            ({"top_p": 0.9, "processed": True}, "top-p"),
            ({"fp8": True}, "cache in fp8"),
        ],
        ids=["temperature", "top-p", "cache in fp8"],
    )
    def test_so_is_one_that_transformers_generate_has(self, options, told):
        model = with_head_in_fp32()
        found = found_for(model, generated(model, **options))
        assert re.search(NAMED[told], found.causes[0].name), found
        assert found.explained <= CLOSE * found.floor, found

    @pytest.mark.whole_run
    @pytest.mark.parametrize("cause", [*planted_llama.PLANTED, "head in bf16"])
    def test_so_is_one_that_is_planted_into_the_llama_of_generate(self, cause):
        trainer, is_head = with_head_in_fp32(), cause == "head in bf16"
        # The cache and the padding of generate round otherwise, too, by about as much as a head does. So a
        # head is told apart from chance by 1536 tokens, and not by 192.
        with planted_llama.planted(cause):
            generator = policy() if is_head else with_head_in_fp32()
            rollout = generated(generator, count=64 if is_head else PROMPTS)
        found = found_for(trainer, rollout, batch_size=64)
        assert re.search(NAMED[cause], found.causes[0].name), found
        assert found.causes[0].side == "generator"
        assert found.explained < 0.6 * found.gap.mean, found


def with_head_in_bf16() -> nn.Module:
    """Return a Llama whose head runs in bf16, also under autocast to fp16."""
    model = policy()
    head = model.lm_head

    def forward(x):
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.bfloat16(), head.weight.bfloat16())

    head.forward = forward
    return model


class TestACauseAboveTheFloor:
    """Each cause is planted so strongly that its gap lies above the floor.

    Matrix products in fp16 have an eighth of the floor of bf16, so causes in bf16 lie above it. The scale of
    the attention matters more if its scores and its output are larger. For the residual stream, products stay
    in bf16, and the embeddings are larger. A small difference can turn into an ulp of bf16 when a stream is
    rounded, and such ulps would be above the floor of fp16.
    """

    @staticmethod
    def strength(planted):
        """Return the dtype of the matrix products, and the options of the model."""
        if planted == "residual in bf16":
            return torch.bfloat16, {"embedding": 60.0}
        is_scale = planted == "scale after the cast"
        return torch.float16, {"sharpness": 2.0, "mixed": 6.0} if is_scale else {}

    def check(self, planted, rollout, cured, **sampling):
        dtype, strength = self.strength(planted)
        model = with_head_in_fp32(**strength)
        found = found_for(model, rollout, dtype)
        gap = Gap(cured, **sampling).measure(step_of(model, dtype)).mean
        row = [planted, *(f"{x:.2e}" for x in (found.gap.mean, found.floor, found.explained, gap))]
        print("| " + " | ".join([*row, found.causes[0].name if found.causes else "none"]) + " |")
        assert found.gap.mean > 1.3 * found.floor, found
        assert re.search(NAMED[planted], found.causes[0].name), found
        assert found.is_closed, found
        assert found.explained <= CLOSE * found.floor, found
        assert gap <= CLOSE * found.floor
        again = found_for(model, cured, dtype, **sampling)
        assert is_rounding(again), again

    @pytest.mark.parametrize(
        "planted",
        [
            pytest.param(cause, marks=() if cause == "rope in bf16" else pytest.mark.whole_run)
            for cause in PLANTED
        ],
    )
    def test_of_a_second_llama_is_closed_to_the_floor(self, planted):
        dtype, strength = self.strength(planted)
        model = with_head_in_fp32(**strength)
        rollout = Engine(model, planted, dtype).rollout(prompts())
        tokens = [list(sample.token_ids) for sample in rollout.samples]
        sampling = {"top-p": {"top_p": 0.9}, "temperature": {"temperature": 0.7}}.get(planted)
        cured = rollout if sampling else Engine(model, low=dtype).rollout(prompts(), tokens)
        self.check(planted, rollout, cured, **(sampling or {}))

    @pytest.mark.whole_run
    @pytest.mark.parametrize("planted", PLANTED)
    def test_of_generate_is_closed_to_the_floor(self, planted):
        dtype, strength = self.strength(planted)
        options = {
            "cache in fp8": {"fp8": True},
            "top-p": {"top_p": 0.9, "processed": True},
            "temperature": {"temperature": 0.7, "processed": True},
        }
        healthy = with_head_in_fp32(**strength)
        with planted_llama.planted(planted):
            generator = with_head_in_bf16() if planted == "head in bf16" else healthy
            rollout = generated(generator, dtype, **options.get(planted, {}))
        sampling = {"top-p": {"top_p": 0.9}, "temperature": {"temperature": 0.7}}.get(planted)
        cured = rollout if sampling else generated(healthy, dtype)
        self.check(planted, rollout, cured, **(sampling or {}))


class TestNoCause:
    @pytest.mark.parametrize(
        "dtype",
        [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole_run)],
        ids=["bf16", "fp16"],
    )
    def test_generate_with_a_cache_another_layout_and_dtype_is_rounding(self, dtype):
        model = policy()
        found = found_for(model, generated(model, dtype))
        assert is_rounding(found), found
        assert 0 < found.gap.mean <= CLOSE * found.floor

    @pytest.mark.whole_run
    def test_another_implementation_is_rounding(self):
        model = with_head_in_fp32()
        found = found_for(model, Engine(model).rollout(prompts()))
        assert is_rounding(found), found

    @pytest.mark.whole_run
    def test_stated_sampling_is_no_cause_if_log_probabilities_were_recorded_before_it(self):
        model = policy()
        found = found_for(model, generated(model, temperature=0.7, top_p=0.9))
        assert is_rounding(found), found


def attention_with_own_softmax(*, wide: bool):
    """Return an attention that divides exponentials by their sum, in fp32 or in the dtype that autocast
    chooses.
    """

    def attention(module, query, key, value, mask, scaling, **_):
        key, value = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        length = scores.shape[-1]
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
        weights = (scores.float() if wide else scores).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return (weights @ value).transpose(1, 2).contiguous(), None

    return attention


def scored(model, rollout) -> Rollout:
    """Return the rollout with the scores of another model, which processes all tokens at once."""
    batch = RolloutBatch.of(rollout.samples)
    with torch.no_grad():
        logits = step_of(model)(batch.tokens).logits[batch.places]
    values = iter(Sampling().log_probs(logits, batch.targets).tolist())
    return Rollout(
        tuple(
            Sample(
                prompt_ids=s.prompt_ids,
                token_ids=s.token_ids,
                logprobs=tuple(next(values) for _ in s.token_ids),
            )
            for s in rollout.samples
        )
    )


class TestSuspects:
    @pytest.mark.parametrize("head_in_fp32", [True, False])
    def test_the_head_is_the_last_product_and_no_other_one_in_fp32(self, head_in_fp32):
        model = with_head_in_fp32() if head_in_fp32 else policy()
        table = torch.randn(4, 4)
        region = EmulatedRounding(torch.bfloat16)
        with torch.no_grad(), region:
            table @ table  # some models compute their rotary angles like this
            step_of(model)(torch.ones(1, 4, dtype=torch.int64))
        suspects = suspects_of(region.found, region.last, torch.bfloat16)
        heads = {suspect.name.partition(" (")[0] for suspect in suspects if suspect.setting[0] == "head"}
        told = {"the head computes in bfloat16", "the head casts its operands to bfloat16"}
        assert heads == (told if head_in_fp32 else set())
        assert any(suspect.name.startswith("mm in ") for suspect in suspects)
        assert region.product is model.lm_head


class TestTheTrainersOwnRounding:
    def test_a_head_in_16_bits_is_named_with_the_module(self):
        model = policy()
        found = found_for(model, Engine(model).rollout(prompts()))
        assert found.causes[0].name == "the head computes in 16 bits"
        assert found.causes[0].side == "trainer"
        assert found.fp32_modules == ("lm_head",)
        assert found.changes == ()
        assert found.after.mean <= CLOSE * found.floor
        assert found.after.mean < 0.8 * found.gap.mean
        assert "fp32_modules=['lm_head']" in str(found)

    def test_an_op_in_16_bits_is_found_with_the_one_rule_that_closes_the_gap_and_its_price(self, tmp_path):
        for wide in (True, False):
            name = f"own_softmax_{wide}"
            transformers.AttentionInterface.register(name, attention_with_own_softmax(wide=wide))
        model, generator = policy("own_softmax_False"), policy("own_softmax_True")
        rollout = scored(generator, Engine(generator).rollout(prompts()))
        found = found_for(model, rollout)
        ops = [change.op for change in found.changes]
        assert len(ops) == 1
        assert ops[0] in {"aten::exp", "aten::masked_fill"}  # masked_fill computes the input of exp
        assert found.causes[0].name == f"{ops[0]} runs in 16 bits"
        assert found.after.mean <= CLOSE * found.floor
        assert found.after.mean < 0.8 * found.gap.mean
        assert min(found.seconds) > 0
        assert "price " in str(found)
        found.save(tmp_path / "rules.yaml")
        assert OpRules.from_yaml(tmp_path / "rules.yaml") == found.rules

        def with_rules(tokens):
            with amp_plugin.autocast("cpu", dtype=torch.bfloat16, rules=found.rules):
                return model(tokens, use_cache=False)

        again = amp_plugin.tune(with_rules, goal=Gap(rollout))
        assert again.gap == found.after


class TestTheDoor:
    def test_a_trainer_of_other_weights_is_not_explained(self):
        model, other = policy(), policy()
        with torch.no_grad():
            other.lm_head.weight.add_(0.3 * torch.randn_like(other.lm_head.weight))
        found = found_for(model, Engine(other).rollout(prompts()))
        assert not found.is_closed
        assert "other weights" in found.headline
        assert not found.is_rounding

    def test_nothing_of_the_caller_changes(self):
        model, rollout = with_head_in_fp32(), Engine(policy()).rollout(prompts())
        before, state = {n: w.clone() for n, w in model.state_dict().items()}, torch.get_rng_state()
        weight = next(model.parameters())
        weight.grad = torch.ones_like(weight)
        found_for(model, rollout)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(weight.grad, torch.ones_like(weight))

    def test_a_measurement_alone_is_that_of_the_formula(self):
        model, rollout = policy(), Engine(policy()).rollout(prompts(), length=4)
        numbers = Gap(rollout).measure(step_of(model))
        batch = RolloutBatch.of(rollout.samples)
        with torch.no_grad():
            logits = step_of(model)(batch.tokens).logits.double()
        rows, columns = batch.places
        ours = logits.log_softmax(-1)[rows, columns, batch.targets]
        d = ours - batch.recorded
        assert numbers.mean == pytest.approx(float(d.abs().mean()))
        assert numbers.kl == pytest.approx(float((d.expm1() - d).mean()))
        assert numbers.tokens == 4 * PROMPTS

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"temperature": 0.0}, "Gap(temperature=0.0) is not allowed; give a number above 0"),
            ({"top_p": 1.1}, "Gap(top_p=1.1) is not allowed"),
            ({"dtype": torch.float32}, "give torch.bfloat16 or torch.float16"),
            ({"batch_size": 0}, "give at least 1"),
        ],
    )
    def test_an_option_that_is_not_allowed_is_an_error(self, given, told):
        with pytest.raises(ValueError, match=re.escape(told)):
            Gap(Rollout.of([[1]], [[2]], [[-0.5]]), **given)

    def test_a_step_without_logits_is_told_what_to_return(self):
        goal = Gap(Rollout.of([[1, 2]], [[2]], [[-0.5]]))
        with pytest.raises(ValueError, match=re.escape("return logits of shape (1, 3, vocabulary)")):
            amp_plugin.tune(lambda tokens: tokens.float(), goal=goal)

    def test_other_goals_ask_for_a_model(self):
        with pytest.raises(TypeError, match="needs model= and batches="):
            amp_plugin.tune(lambda batch: batch)


TRAIN = """\
import sys
import torch
from tests.tuning.small_gpt import GPT, WORDS

model = GPT(2, width=64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    words = torch.randint(WORDS, (4, 16))
    with torch.no_grad():
        model(words[:, :8])
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    open("made_by_the_script", "w").close()
"""


class TestTheCommand:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "train.py").write_text(TRAIN)
        return tmp_path

    def record(self, *, head_in_fp32: bool) -> None:
        from tests.tuning.small_gpt import GPT

        model, draws = GPT(2, width=64), torch.Generator().manual_seed(0)
        if head_in_fp32:
            amp_plugin.run_in(torch.float32)(model.head)
        tokens = torch.randint(WORDS, (8, 20), generator=draws)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = torch.cat([model(row[None]) for row in tokens])[:, 3:-1]
        values = logits.double().log_softmax(-1).gather(-1, tokens[:, 4:, None])[..., 0]
        Rollout.of(tokens[:, :4].tolist(), tokens[:, 4:].tolist(), values.tolist()).save("rollouts.jsonl")

    def test_rounding_is_exit_code_0_and_the_script_leaves_no_file(self, folder):
        self.record(head_in_fp32=False)
        done = amp("gap", "--rollout", "rollouts.jsonl", "train.py")
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("rounding alone explains the gap")
        assert sorted(path.name for path in folder.iterdir()) == ["rollouts.jsonl", "train.py"]

    def test_a_cause_is_exit_code_1_and_json_and_a_file_hold_it(self, folder):
        self.record(head_in_fp32=True)
        done = amp("gap", "--json", "--rollout", "rollouts.jsonl", "-o", "rules.yaml", "train.py")
        assert done.exit_code == 1, done.output
        told = json.loads(done.stdout)
        assert told["fp32_modules"] == ["head"]
        assert told["causes"][0]["side"] == "trainer"
        assert told["gap"]["tokens"] == 8 * 16
        assert told["after"]["mean"] <= CLOSE * told["floor"]
        assert OpRules.from_yaml("rules.yaml") == OpRules.default("cpu")

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["train.py"], "--rollout FILE is missing"),
            (["--rollout", "nowhere.jsonl", "train.py"], "nowhere.jsonl"),
            (["--rollout", "bad.jsonl", "train.py"], "bad.jsonl, line 1: the key 'token_ids' is missing"),
            (["--rollout", "good.jsonl", "without.py"], "no module had returned logits"),
        ],
    )
    def test_wrong_input_is_exit_code_2(self, folder, words, told):
        (folder / "bad.jsonl").write_text('{"version": 1, "prompt_ids": [1]}')
        (folder / "good.jsonl").write_text(json.dumps(GOOD))
        (folder / "without.py").write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(2, 2))\n")
        done = amp("gap", *words)
        assert done.exit_code == 2
        assert told in done.output

    @pytest.mark.parametrize("given", ["labels", "logits_to_keep"])
    def test_the_call_of_a_trainer_is_made_again_without_what_belongs_to_its_batch(self, given):
        model, calls = policy(), []
        tokens, others = torch.randint(1, WORDS, (2, 9)), torch.randint(1, WORDS, (3, 12))
        mask = torch.ones_like(tokens)
        more = {"labels": tokens} if given == "labels" else {"logits_to_keep": 4}
        with torch.no_grad():
            expected = step_of(model)(others).logits
        with model_calls(lambda *call: calls.append(call)), torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(input_ids=others)
            with pytest.raises(SystemExit):
                model(input_ids=tokens, attention_mask=mask, use_cache=False, **more)
        ((called, step),) = calls
        with torch.no_grad():
            found = step(others).logits
        assert called is model
        assert torch.equal(found, expected)
