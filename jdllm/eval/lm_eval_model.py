"""The `jdllm` model of lm-eval: generation in process or over HTTP, likelihoods in process.

It is also registered under the names that the scripts of LLaDA and Dream use (`llada_dist`,
`diffllm`), so that their command lines work. `model_args` lists what `--model_args` takes. A
length or a temperature there replaces the task's.

With `--apply_chat_template` the text that lm-eval holds is the conversation as JSON. The template
is applied when a request is sent, by the checkpoint's tokenizer or by the server.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

# lm_eval is an optional dependency, which the type checker's environment does not have.
from lm_eval.api import instance, model, registry  # pyright: ignore[reportMissingImports]
from lm_eval.models import utils as models_utils  # pyright: ignore[reportMissingImports]

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.engine.engine import Engine
from jdllm.eval import backends, likelihood, model_args
from jdllm.host import progress
from jdllm.options import sampling_params, stop_options
from jdllm.options.config import EngineConfig, from_mapping
from jdllm.runner import full_forward

logger = logging.getLogger("lm_eval.models.jdllm")  # lm-eval shows the loggers of its name only

DEFAULT_SEED = 1234  # lm-eval's, and that of LLaDA's script
DEFAULT_MAX_GEN_TOKS = 256  # lm-eval's
OUR_OWN_BATCHES = (None, 1, "1", "auto")


@registry.register_model("jdllm", "llada_dist", "diffllm")
class JdllmLM(model.LM):
    """Loads the model, or looks for the server, when the first requests come."""

    def __init__(self, **given: Any):
        super().__init__()
        args = model_args.parse(given)
        _check(args)
        self._args = args
        self._has_chat = False
        self._backend: backends.Backend | None = None
        self._engine: Engine | None = None

    @property
    def tokenizer_name(self) -> str:
        """Names the model in the keys of lm-eval's caches."""
        name = self._args.server.get("base_url") or self._args.engine.get("model_path")
        return str(name or "jdllm").replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns nothing, since the template is applied later; refuses the name of one."""
        if isinstance(chat_template, str):
            raise errors.ConfigError(
                f"--apply_chat_template {errors.quote(chat_template)}: a checkpoint has one "
                "template; leave out the name, or give chat_template=FILE in --model_args"
            )
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the conversation as JSON; without generation prompt its last turn goes on."""
        self._has_chat = True
        chat = {"messages": chat_history, "add_generation_prompt": add_generation_prompt}
        return json.dumps(chat, ensure_ascii=False)

    def generate_until(self, requests: list[instance.Instance]) -> list[str]:
        """Returns one text per request, cut at the first of the task's `until` strings."""
        backend = self._open()
        samplings = [self._sampling(request.args[1]) for request in requests]
        parallel = self._args.parallel or backend.default_parallel
        began = time.monotonic()
        answers: list[backends.Answer] = []
        pool = concurrent.futures.ThreadPoolExecutor(max_workers=parallel)
        try:
            futures = [
                pool.submit(backend.answer, self._prompt(request.args[0]), sampling)
                for request, (sampling, _) in zip(requests, samplings, strict=True)
            ]
            for future in progress.bar(futures, desc="generate_until", unit="q"):
                answers.append(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            backend.abort()
            raise
        finally:
            pool.shutdown()
        if self._args.show_speed:
            _log_speed(answers, time.monotonic() - began)
        texts = []
        for request, answer, (_, until) in zip(requests, answers, samplings, strict=True):
            text = min((answer.text.partition(stop)[0] for stop in until), key=len, default=None)
            texts.append(answer.text if text is None else text)
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def loglikelihood(self, requests: list[instance.Instance]) -> list[tuple[float, bool]]:
        """Returns (Monte-Carlo estimate in nats, is greedy) of each (context, continuation)."""
        if "base_url" in self._args.server:
            raise NotImplementedError(
                "jdllm computes likelihoods in process only: a diffusion model has no chain-rule "
                "likelihood that a server could return; leave out base_url, give model_path"
            )
        self._open()
        assert self._engine is not None
        options = self._args.likelihood
        batch_size = options.get("batch_size")
        scorer = likelihood.Likelihood(
            full_forward.FullModel(self._engine.model),
            num_samples=options.get("mc_num", likelihood.NUM_SAMPLES),
            seed=self._args.sampling.get("seed", DEFAULT_SEED),
            batch_size=None if batch_size in OUR_OWN_BATCHES else batch_size,
            checks_greedy=options.get("is_check_greedy", True),
        )
        scores = scorer.score([self._pair(*request.args) for request in requests])
        results = [(score.logprob, score.is_greedy) for score in scores]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: list[instance.Instance]) -> list[float]:
        raise NotImplementedError(
            "jdllm has no rolling likelihood: the bound of a masked diffusion model depends on "
            "how the text is cut into windows, so a perplexity would compare with nothing"
        )

    def _open(self) -> backends.Backend:
        if self._backend is not None:
            return self._backend
        args = self._args
        if "base_url" in args.server:
            api_name = "chat" if self._has_chat else "completion"
            self._backend = backends.Http(**args.server, api_name=api_name)
            return self._backend
        config = from_mapping(EngineConfig, args.engine)
        self._engine = Engine(config)
        mask_id = self._engine.spec.diffusion.mask_token_id
        if args.mask_id is not None and args.mask_id != mask_id:
            raise errors.ConfigError(
                f"mask_id={args.mask_id}, but the model's mask id is {mask_id}"
            )
        self._backend = backends.InProcess(self._engine)
        return self._backend

    def _prompt(self, context: str) -> Any:
        """Returns ids in process; over HTTP the messages of a chat or the text."""
        if self._engine is not None:
            return self._context_ids(context)
        if not self._has_chat:
            return context
        chat = json.loads(context)
        if not chat["add_generation_prompt"]:
            raise NotImplementedError(
                "a chat whose last turn goes on (gen_prefix) runs in process only; "
                "leave out --apply_chat_template or base_url"
            )
        return chat["messages"]

    def _context_ids(self, context: str) -> list[int]:
        assert self._engine is not None and self._engine.tokenizer is not None
        if not self._has_chat:
            return self._engine.encode(context)
        chat = json.loads(context)
        adds = chat["add_generation_prompt"]
        return self._engine.tokenizer.apply_chat_template(
            chat["messages"], add_generation_prompt=adds, continue_final_message=not adds
        )

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the ids of both; without a chat, those that the two texts have as one text."""
        assert self._engine is not None and self._engine.tokenizer is not None
        if self._has_chat:
            target = self._engine.encode(continuation, add_special_tokens=False)
            return self._context_ids(context), target
        num_spaces = len(context) - len(context.rstrip())
        if num_spaces:
            context, continuation = context[:-num_spaces], context[-num_spaces:] + continuation
        before = self._engine.encode(context)
        target = self._engine.encode(context + continuation)[len(before) :]
        if not before and self._engine.spec.diffusion.is_shifted:
            end = self._engine.tokenizer.eos_token_id
            before = [] if end is None else [end]
        return before, target

    def _sampling(self, gen_kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Returns the sampling parameters of a request and its `until` strings."""
        kwargs = models_utils.normalize_gen_kwargs(
            dict(gen_kwargs), default_max_gen_toks=DEFAULT_MAX_GEN_TOKS
        )
        until = [stop for stop in kwargs.pop("until") if stop]
        samples = kwargs.pop("do_sample")
        task = {"max_new_tokens": kwargs.pop("max_gen_toks"), "temperature": 0.0, **kwargs}
        if not samples:
            task["temperature"] = 0.0
        options = {name: task.pop(name) for name in lookup.option_names() if name in task}
        given = self._args.sampling
        sampling = {
            **task,
            **given,
            "stop": until[: stop_options.MAX_STRINGS],
            "dllm": {**options, **given.get("dllm", {})},
        }
        sampling_params.SamplingParams.from_mapping(sampling)
        return sampling, until


def _check(args: model_args.ModelArgs) -> None:
    """Refuses what contradicts the rest of the line or the machine."""
    if args.server and "base_url" not in args.server:
        raise errors.ConfigError(f"--model_args: {next(iter(args.server))} needs base_url")
    model_args.check_machine(args, platform=jax.default_backend())
    if args.task is not None and any(name in args.task for name in ("humaneval", "mbpp")):
        raise errors.ConfigError(
            f"task={args.task!r} makes d3LLM's script apply a chat template; "
            "give --apply_chat_template instead"
        )
    sampling_params.SamplingParams.from_mapping(args.sampling)


def _log_speed(answers: Sequence[backends.Answer], wall_s: float) -> None:
    tokens = sum(answer.completion_tokens for answer in answers)
    nfe = sum(answer.nfe or 0 for answer in answers)
    logger.info(
        "%d tokens in %.2f s: %.2f tokens/s; %d forwards, %s tokens per forward",
        tokens,
        wall_s,
        tokens / wall_s,
        nfe,
        f"{tokens / nfe:.2f}" if nfe else "unknown",
    )
