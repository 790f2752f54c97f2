"""vLLM's offline interface to the engine: `LLM(...).generate`, `.chat`, request outputs."""

from __future__ import annotations

import dataclasses
import time
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdllm import errors
from jdllm.engine import generations, infilling, requests
from jdllm.engine.engine import Engine
from jdllm.foreign import names
from jdllm.host import progress
from jdllm.options import hints

if TYPE_CHECKING:
    from jdllm.checkpoint.quiet_transformers import transformers

Messages = Sequence[Mapping[str, Any]]
# Text, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice of one prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    meta_info: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its choices."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """Batch generation with a progress bar; keyword arguments as for `Engine`."""

    def __init__(self, model: str | None = None, **options: Any):
        self.engine = Engine(model_path=model, **options)

    @names.explained(hints.BESIDE_SAMPLING_PARAMS)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: requests.Params | Sequence[requests.Params] = None,
        *,
        use_tqdm: bool = True,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in the order of the prompts.

        For `suffix`, `given` and `add_special_tokens` see `Engine.generate`; the outputs are the
        text between prompt and suffix.
        """
        rows = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        pairs = [self._text_and_ids(row, add_special_tokens) for row in rows]
        texts, ids = [text for text, _ in pairs], [ids for _, ids in pairs]
        return self._run(texts, ids, sampling_params, use_tqdm, suffix, given)

    @names.explained(hints.BESIDE_SAMPLING_PARAMS)
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: requests.Params | Sequence[requests.Params] = None,
        *,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        escape_special_tokens: bool | None = None,
    ) -> list[RequestOutput]:
        """Returns the assistant's reply to one conversation, or to each of several.

        To continue the final message, give `continue_final_message=True` and
        `add_generation_prompt=False`, as in vLLM. With `escape_special_tokens` those in messages
        that are not the assistant's are plain text; None is the engine's option of this name.
        """
        if not messages:
            raise errors.RequestError("messages must not be empty", param="messages")
        is_one = isinstance(messages[0], Mapping)
        # A cast: the type of the first element decides between the two, which no checker follows.
        conversations = typing.cast(list[Messages], [messages] if is_one else list(messages))
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise errors.RequestError("chat needs a tokenizer", param="messages")
        ids = [
            tokenizer.apply_chat_template(
                one,
                chat_template_kwargs=chat_template_kwargs,
                escape_special_tokens=escape_special_tokens,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for one in conversations
        ]
        return self._run([None] * len(ids), ids, sampling_params, use_tqdm)

    def get_tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """Returns the Hugging Face tokenizer, as vLLM does: `encode`, `decode`, chat template."""
        if self.engine.tokenizer is None:
            raise errors.RequestError("the engine runs without a tokenizer", param="tokenizer")
        return self.engine.tokenizer.hugging_face

    def shutdown(self) -> None:
        """Stops the engine; see `Engine.shutdown`."""
        self.engine.shutdown()

    def _text_and_ids(
        self, prompt: Prompt, add_special_tokens: bool
    ) -> tuple[str | None, list[int]]:
        text = prompt
        if isinstance(prompt, Mapping) and len(prompt) == 1:
            text = prompt.get("prompt")
        if isinstance(text, str):
            return text, self.engine.encode(text, add_special_tokens=add_special_tokens)
        if isinstance(prompt, Mapping) and [*prompt] == ["prompt_token_ids"]:
            (ids,), is_single = requests.id_rows(prompt["prompt_token_ids"])
            if is_single:
                return None, ids
        raise errors.RequestError(
            f'a prompt is text, {{"prompt": text}} or {{"prompt_token_ids": ids}}, not '
            f"{errors.quote(prompt)}",
            param="prompt",
        )

    def _run(
        self,
        texts: Sequence[str | None],
        ids: list[list[int]],
        sampling_params: requests.Params | Sequence[requests.Params],
        use_tqdm: bool,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
    ) -> list[RequestOutput]:
        params = requests.params_per_prompt(sampling_params, len(ids))
        requests.refuse_steps(params)
        choices: dict[tuple[int, int], generations.Generation] = {}
        began, tokens, nfe = time.monotonic(), 0, 0
        total = sum(one.n for one in params)
        with progress.bar(total=total, desc="Generating", is_shown=use_tqdm) as bar:
            for generation in self.engine.iterate(ids, params, suffix=suffix, given=given):
                if generation.finish_reason is None:
                    continue
                choices[generation.prompt_index, generation.index] = generation
                tokens += len(generation.output_ids)
                nfe += generation.meta_info["nfe"]
                rate = tokens / max(time.monotonic() - began, 1e-9)
                bar.set_postfix_str(f"output {rate:.1f} toks/s, TPF {tokens / max(nfe, 1):.2f}")
                bar.update()
        return [
            RequestOutput(
                prompt=texts[i],
                prompt_token_ids=ids[i],
                outputs=[_completion(choices[i, j]) for j in range(params[i].n)],
            )
            for i in range(len(ids))
        ]


def _completion(generation: generations.Generation) -> CompletionOutput:
    assert generation.finish_reason is not None, "only finished choices are kept"
    return CompletionOutput(
        index=generation.index,
        text=generation.text,
        token_ids=generation.output_ids,
        finish_reason=generation.finish_reason["type"],
        meta_info=generation.meta_info,
    )
