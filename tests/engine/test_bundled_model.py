"""The model that comes with the package: it answers, in vLLM's shape too, and keeps its promise."""

import itertools

import pytest

import jdllm
from jdllm import errors
from jdllm.tasks import arithmetic, example

pytestmark = pytest.mark.campaign  # an engine of its own, whose programs take long to compile

TOM = "Tom has 7 apples. He buys 5 more apples. How many apples does he have now?"
NUM_PROBLEMS = 60


@pytest.fixture(scope="module")
def llm():
    made = jdllm.LLM(max_running_requests=2, chunked_prefill_size=64)  # fewer programs to compile
    yield made
    made.shutdown()


def chat(question):
    return [{"role": "user", "content": question}]


def test_the_question_of_the_readme_is_answered(llm):
    (output,) = llm.chat(chat(TOM), use_tqdm=False)
    assert output.outputs[0].text == "7 + 5 = <<7+5=12>>12\n#### 12"
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].meta_info["tpf"] > 1


def right_answers(problems, replies):
    return sum(
        example.extract_answer(reply.outputs[0].text) == problem.gold
        for reply, problem in zip(replies, problems, strict=True)
    )


def test_held_out_problems_are_solved_with_many_tokens_a_forward(llm):
    # 500 problems are measured by `python -m jdllm.eval`; this guards the bundle in CI.
    # There, 90 % are right, of the templates all, of the problems that training never shows 82 %.
    problems = list(itertools.islice(arithmetic.problems("test"), 300))
    mixture = problems[:NUM_PROBLEMS]
    told = [problem for problem in problems if problem.kind == "template"][:NUM_PROBLEMS]
    assert len(told) == NUM_PROBLEMS
    asked = [chat(problem.question) for problem in (*told, *mixture)]
    replies = llm.chat(asked, use_tqdm=False)
    assert right_answers(told, replies[:NUM_PROBLEMS]) >= 0.95 * NUM_PROBLEMS
    assert right_answers(mixture, replies[NUM_PROBLEMS:]) >= 0.82 * NUM_PROBLEMS
    tokens = sum(len(reply.outputs[0].token_ids) for reply in replies)
    forwards = sum(reply.outputs[0].meta_info["nfe"] for reply in replies)
    assert tokens / forwards >= 3


def test_generate_keeps_the_order_of_prompts_and_choices(llm):
    prompts = [f"{n} + {n} =" for n in range(5)]
    params = jdllm.SamplingParams(max_tokens=6, temperature=1.0, seed=1, n=2)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [[c.index for c in output.outputs] for output in outputs] == [[0, 1]] * 5
    again = llm.generate(prompts[3], params, use_tqdm=False)
    assert again[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids


def test_vllms_prompt_objects_are_understood_and_others_refused(llm):
    params = {"max_new_tokens": 4}
    ids = llm.engine.encode("1 + 1 =")
    prompts = ["1 + 1 =", {"prompt": "1 + 1 ="}, {"prompt_token_ids": ids}]
    first, *others = llm.generate(prompts, params, use_tqdm=False)
    for other in others:
        assert other.outputs[0].token_ids == first.outputs[0].token_ids
        assert other.prompt_token_ids == ids and other.finished
    for wrong in (5, {"text": "x"}, {"prompt": 3}, {"prompt_token_ids": [[1]]}):
        with pytest.raises(errors.RequestError):
            llm.generate([wrong], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages.0.content"),
        ({"content": "x"}, "messages.0"),
        ("hi", "messages.0"),
        ({"role": 1}, "messages.0"),
    ],
)
def test_incomplete_messages_are_refused(llm, message, param):
    with pytest.raises(errors.RequestError) as raised:
        llm.chat([[message]], use_tqdm=False)
    assert raised.value.param == param


def test_messages_must_be_there(llm):
    with pytest.raises(errors.RequestError) as raised:
        llm.chat([])
    assert raised.value.param == "messages"
