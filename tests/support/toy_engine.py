"""An engine made by hand for evaluations: its answer is the number of words of the question."""

from __future__ import annotations

from jdllm import errors
from jdllm.checkpoint import source
from jdllm.device import facts
from jdllm.engine import generations


class ToyTokenizer:
    has_chat_template = True

    def apply_chat_template(self, messages):
        return [len(messages[0]["content"].split())]


class ToyEngine:
    """Answers with its prompt's only id, in two events."""

    tokenizer = ToyTokenizer()
    model_name = "toy"
    model_dir = source.bundled_model()
    device = facts.DeviceFacts(platform="cpu", device_kind="cpu")
    max_running_requests = 2

    def __init__(self):
        self.params = []
        self.aborted = 0

    def nfe(self, _params):
        return 2

    def default_max_new_tokens(self, prompt_len):
        return 300 + prompt_len

    def iterate(self, prompts, params):
        self.params += params
        ((word_count,),) = prompts
        if word_count > 5:
            raise errors.RequestTooLong("too long for the toy")
        for text, reason in (("####", None), (f"#### {word_count}", {"type": "stop"})):
            yield generations.Generation(
                request_id="r",
                index=0,
                prompt_index=0,
                text=text,
                delta_text="",
                output_ids=[1] * len(text),
                delta_ids=[],
                finish_reason=reason,
                meta_info={"nfe": self.nfe(params[0]), "e2e_latency": 0.5},
            )

    def abort(self, *, abort_all):
        self.aborted += abort_all
