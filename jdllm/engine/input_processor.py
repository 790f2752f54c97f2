"""Makes requests from what callers pass: checks ids and options, adds defaults, draws seeds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jdllm import errors, value_checks
from jdllm.engine import candidates, infilling, requests
from jdllm.engine.start import build
from jdllm.options import sampling_params
from jdllm.scheduler.request import Request
from jdllm.templates import chat

# Making a choice takes about as long as looking at so many token ids.
SIZE_OF_A_CHOICE = 500


class InputProcessor:
    """Makes the requests of one engine, on the threads of its callers."""

    def __init__(self, built: build.Built):
        self._built = built
        self._random = random.Random(built.config.random_seed)

    def choices(
        self,
        prompts: Sequence[requests.Prompt],
        params: Sequence[sampling_params.SamplingParams],
        *,
        request_ids: str | Sequence[str] | None = None,
        suffix: infilling.Suffixes = None,
        given: infilling.Givens = None,
        priority: int | None = None,
    ) -> dict[str, requests.Choice]:
        """Returns the choices of all prompts by request id, in the order of the prompts.

        The time grows with the number of tokens, of characters and of choices.
        """
        names = requests.request_ids(request_ids, len(prompts))
        infills = infilling.infills(suffix, given, len(prompts), self._built.tokenizer)
        group, priority_class = object(), requests.priority_class(priority, self._built.config)
        choices: dict[str, requests.Choice] = {}
        # The prompts of a list mostly share their params, by identity, and many have one length.
        completed: dict[tuple[int, int], sampling_params.SamplingParams] = {}
        rows = zip(prompts, params, names, infills, strict=True)
        for prompt_index, (prompt, one, name, infill) in enumerate(rows):
            prompt_ids = self._ids(prompt)
            key = (id(one), len(prompt_ids) + len(infill.suffix_ids))
            if key not in completed:
                completed[key] = self._complete(one, key[1])
            made = self._requests(prompt_ids, completed[key], name, infill)
            for index, request in enumerate(made):
                request.group, request.priority_class = group, priority_class
                if request.request_id in choices:
                    raise errors.RequestError(
                        f"duplicate request id {errors.quote(request.request_id)}", param="rid"
                    )
                choices[request.request_id] = requests.Choice(
                    request, prompt_index, index, self._built.tokenizer
                )
        return choices

    def prompt_ids(
        self,
        prompt: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[list[list[int]], bool]:
        """Returns (one list of ids per prompt, whether a single prompt was given)."""
        if prompt is None and input_ids is not None:
            return requests.id_rows(input_ids)
        if prompt is None or input_ids is not None:
            raise errors.RequestError("give either a prompt or input_ids", param="prompt")
        is_single = isinstance(prompt, str)
        texts = [prompt] if is_single else prompt
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise errors.RequestError("prompt must be text or a list of texts", param="prompt")
        rows = [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return rows, is_single

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of plain text."""
        if self._built.tokenizer is None:
            raise errors.RequestError(
                "the engine runs with skip_tokenizer_init; give input_ids", param="prompt"
            )
        value_checks.check_unicode(text, "prompt")
        return self._built.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def one_prompt(
        self, prompt: requests.Prompt | chat.Messages, *, escape_special_tokens: bool | None = None
    ) -> list[int]:
        """Returns the ids of a prompt, or of a conversation through the chat template."""
        # Any: the first element decides, which no checker follows.
        given: Any = prompt
        if not isinstance(given, list | tuple) or not given or not isinstance(given[0], Mapping):
            return self._ids(given)
        if self._built.tokenizer is None:
            raise errors.RequestError("a conversation needs a tokenizer", param="prompt")
        return self._built.tokenizer.apply_chat_template(
            given, escape_special_tokens=escape_special_tokens
        )

    def visible_text(self, ids: Sequence[int]) -> str:
        """Returns the text of output tokens with special ones; without a tokenizer, their ids."""
        if self._built.tokenizer is None:
            return "".join(f"[{token_id}]" for token_id in ids)
        return self._built.tokenizer.decode(ids, skip_special_tokens=False)

    def default_max_new_tokens(self, prompt_len: int, block_length: int | None = None) -> int:
        """Returns how many tokens a request writes if it sets no limit; its kind of rows knows."""
        return self._built.core.scheduler.rows.default_new_tokens(prompt_len, block_length)

    def _ids(self, prompt: requests.Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        if isinstance(prompt, list | tuple | np.ndarray):
            return requests.whole_ids(prompt)
        raise errors.RequestError(
            f"a prompt is text or a list of token ids, not {errors.quote(prompt)}", param="prompt"
        )

    def _requests(
        self,
        prompt_ids: list[int],
        full: sampling_params.SamplingParams,
        name: str,
        infill: infilling.Infill,
    ) -> list[Request]:
        """Returns the requests of one prompt, one for each of its `n` choices.

        `full` has every default filled in. The requests share the ids, which nobody changes.
        """
        assert full.max_new_tokens is not None, "_complete fills it in"
        self._check_ids(
            input_ids=prompt_ids,
            stop_token_ids=full.stop_token_ids,
            suffix=infill.suffix_ids,
            given=infill.given.values(),
            logit_bias=[token_id for token_id, _ in full.logit_bias],
            allowed_token_ids=full.allowed_token_ids or (),
        )
        banned_ids = candidates.banned_ids(full.bad_words, self._built.tokenizer)
        candidates.check(
            full, banned_ids, self._built.spec, eos_token_ids=self._built.eos_token_ids
        )
        suffix_ids, given = list(infill.suffix_ids), dict(infill.given)
        seed = self._random.getrandbits(requests.SEED_BITS) if full.seed is None else full.seed
        return [
            Request(
                request_id=requests.choice_id(name, full.n, index),
                prompt_ids=prompt_ids,
                suffix_ids=suffix_ids,
                given=given,
                sampling=full,
                max_new_tokens=full.max_new_tokens,
                eos_token_ids=self._built.eos_token_ids,
                banned_ids=banned_ids,
                seed=requests.seed_of_choice(seed, index),
            )
            for index in range(full.n)
        ]

    def _complete(
        self, params: sampling_params.SamplingParams, prompt_len: int
    ) -> sampling_params.SamplingParams:
        """Returns the params with every default filled in, and with checked options.

        `prompt_len` includes the suffix.
        """
        dllm = params.dllm.resolve(self._built.default_dllm)
        if dllm.algorithm not in self._built.algorithms:
            raise errors.RequestError(
                f"algorithm {dllm.algorithm!r} is not compiled; this server has "
                f"{', '.join(self._built.algorithms)} (--dllm-algorithm A,B adds more)",
                param="dllm.algorithm",
            )
        default = self._built.default_sampling
        pick = lambda value, fallback: fallback if value is None else value  # noqa: E731
        return dataclasses.replace(
            params,
            max_new_tokens=pick(
                params.max_new_tokens, self.default_max_new_tokens(prompt_len, dllm.block_length)
            ),
            temperature=pick(params.temperature, default.temperature),
            top_p=pick(params.top_p, default.top_p),
            top_k=pick(params.top_k, default.top_k),
            min_p=pick(params.min_p, default.min_p),
            repetition_penalty=pick(params.repetition_penalty, default.repetition_penalty),
            dllm=dllm,
        )

    def _check_ids(self, **named: Collection[Any]) -> None:
        V = self._built.spec.vocab_size
        for name, ids in named.items():
            # Much faster than the loop, for what nearly all callers pass.
            if set(map(type, ids)) <= {int} and 0 <= min(ids, default=0) <= max(ids, default=0) < V:
                continue
            for token_id in ids:
                is_id = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
                if not is_id or not 0 <= token_id < V:
                    raise errors.RequestError(
                        f"{name} holds {errors.quote(token_id)}, not a token id between 0 and "
                        f"{V - 1}",
                        param=name,
                    )


def size(prompts: Sequence[requests.Prompt]) -> int:
    """Returns how many characters or ids the prompts have, also if some are no prompts at all."""
    return sum(len(one) for one in prompts if isinstance(one, str | list | tuple | np.ndarray))
