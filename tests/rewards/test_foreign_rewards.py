"""Reward functions of other trainers: called in their own form, or refused when they are loaded."""

import pytest

from agentrl.errors import ConfigError, GraderError
from agentrl_rewards.runner import RewardInput, RewardRunner

PROMPT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "6 * 7?"}]


def answers(*texts, reference="42", **metadata):
    given = {"prompt": PROMPT, "metadata": metadata, "num_tokens": 9}
    return [RewardInput(text, reference, **given) for text in texts]


async def rewards(function, inputs, **options):
    runner = RewardRunner([function], options={function.__name__: options} if options else None)
    results = await runner.score_group(inputs)
    return [r if isinstance(r, GraderError) else r.reward for r in results]


def trl_text(completions, answer, **kwargs):
    return [float(each.endswith(right)) for each, right in zip(completions, answer, strict=True)]


def trl_messages(prompts, completions, solution, **kwargs):
    assert prompts[0][-1]["content"] == "6 * 7?"
    return [float(c[0]["content"].endswith(s)) for c, s in zip(completions, solution, strict=True)]


def trl_column(completions, level, answer=None):
    assert answer == ["42"] * len(completions)
    return [float(each) for each in level]


def trl_kwargs(completions, **kwargs):
    return [float(g in c) for g, c in zip(kwargs["ground_truth"], completions, strict=True)]


async def trl_async(completions, answer, **kwargs):
    return trl_text(completions, answer)


def trl_option(completions, answer, *, scale):
    return [scale * float(a in c) for a, c in zip(answer, completions, strict=True)]


def nemo(prompts, responses, answers):
    return [float(a in r) for a, r in zip(answers, responses, strict=True)]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info == {"level": 2, "data_source": "gsm8k"}
    return {"score": ground_truth in solution_str, "pred": "42", "right": data_source == "gsm8k"}


def verl_short(solution_str, ground_truth, method="strict"):
    return float(ground_truth in solution_str)


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(g in s) for g, s in zip(ground_truths, solution_strs, strict=True)]


async def slime(args, sample, **kwargs):
    assert sample.prompt and sample.response_length == 9 and sample.metadata["level"] == 2
    return float(sample.label in sample.response) * args.scale


async def slime_group(args, samples, **kwargs):
    return [float(sample.label in sample.response) * args.scale for sample in samples]


def rubric(completion, answer, state):
    assert state["completion"] is completion
    return float(answer in completion[-1]["content"])


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (trl_text, {}),
        (trl_messages, {}),
        (trl_kwargs, {}),
        (trl_async, {}),
        (trl_option, {"scale": 1.0}),
        (nemo, {}),
        (verl, {}),
        (verl_short, {}),
        (verl_batch, {}),
        (slime, {"scale": 1}),
        (slime_group, {"scale": 1}),
        (rubric, {}),
    ],
)
@pytest.mark.parametrize("prompt", [PROMPT, "6 * 7?"])
async def test_a_function_gives_its_own_verdict(function, options, prompt):
    turns = [[{"role": "assistant", "content": "So it is 42"}]] * 2
    metadata = {"level": 2, "data_source": "gsm8k"}
    inputs = [
        RewardInput(text, "42", prompt, 9, metadata, turns)
        for text in ("So it is 42", "no", "#### 42")
    ]
    assert await rewards(function, inputs, **options) == [1.0, 0.0, 1.0]


async def test_columns_come_from_the_metadata():
    assert await rewards(trl_column, answers("a", "b", level=3)) == [3.0, 3.0]
    (missing,) = await rewards(trl_column, answers("a"))
    assert isinstance(missing, GraderError) and "level" in str(missing)


async def test_another_trainers_function_sees_the_reasoning_as_there():
    def think(completions, **kwargs):
        return [float(each.startswith("<think>")) for each in completions]

    assert await rewards(think, answers("<think>so</think>42")) == [1.0]


async def test_none_means_that_a_function_does_not_judge_the_answer():
    def some(completions, **kwargs):
        return [None, 1.0]

    first, second = await rewards(some, answers("a", "b"))
    assert isinstance(first, GraderError) and second == 1.0
    results = await RewardRunner([some, "em"]).score_group(answers("42", "b"))
    assert [each.reward for each in results] == [1.0, 1.0]
    assert results[0].components == {"em": 1.0}


async def test_a_list_of_lists_or_of_another_length_is_no_verdict():
    def nested(completions, **kwargs):
        return [[1.0] for _ in completions]

    def short(completions, **kwargs):
        return [1.0]

    for function in (nested, short):
        for result in await rewards(function, answers("a", "b")):
            assert isinstance(result, GraderError)


def completions_and_sample(completions, solution_str):
    return 0.0


def queries(queries, prompts, labels):
    return 0.0


def lone_sample(sample):
    return 0.0


def lone_args(args, reference):
    return 0.0


def source_first(data_source, text, ground_truth):
    return 0.0


def extra(text, reference, extra_info=None):
    return 0.0


@pytest.mark.parametrize(
    "function", [completions_and_sample, queries, lone_sample, lone_args, source_first, extra]
)
def test_a_mixture_or_an_unknown_form_is_refused_with_the_wrapper(function):
    with pytest.raises(ConfigError, match="def my_reward") as caught:
        RewardRunner([function])
    assert function.__name__ in str(caught.value)


def test_names_that_only_look_foreign_stay_as_they_are():
    def own(text, *args, **kwargs):
        return 0.0

    def own_group(samples):
        return []

    def truth(response, ground_truth):
        return 0.0

    RewardRunner([own, own_group, truth])
    with pytest.raises(ConfigError, match="sharp"):
        RewardRunner([trl_option], options={"trl_option": {"scale": 1.0, "sharp": 2}})


def test_the_form_is_named_and_the_reference_required():
    runner = RewardRunner([trl_text, verl_short, trl_kwargs, slime])
    assert runner.needs_reference == ["trl_text", "verl_short"]
