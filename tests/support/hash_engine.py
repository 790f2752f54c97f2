"""A real `Engine` over the computable model of `hash_model`: no weights, no compiles.

The scheduler, the engine thread and the streams are the real ones; `expected` is what a choice
gets alone. Launches wait while `hold` is set, so that a test can act in the middle of requests.
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from unittest import mock

from support import hash_model
from support.hash_model import CONTEXT, EOS, VOCAB, B

import jdllm
from jdllm.device import facts
from jdllm.engine import core, requests
from jdllm.engine.start import build, sizing
from jdllm.options import config, sampling_params
from jdllm.scheduler.request import Request
from jdllm.spec import DiffusionSpec, ModelSpec

ROWS, QUEUE, PAGES = 4, 6, 8 * CONTEXT // B
KIND = "persist"
SPEC = ModelSpec(
    architecture="Hash",
    model_type="hash",
    vocab_size=VOCAB,
    hidden_size=1,
    num_layers=1,
    num_query_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position_embeddings=CONTEXT,
    diffusion=DiffusionSpec(block_size=B, mask_token_id=hash_model.MASK, eos_token_ids=(EOS,)),
    rotary_dim=1,
)


class LetterTokenizer:
    """One token per letter from a to z."""

    has_chat_template = False
    eos_token_id = EOS

    def encode(self, text, *, add_special_tokens=True):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids, *, skip_special_tokens=True):
        return hash_model.decode_text(ids)


class HeldModel(hash_model.PagedModel):
    """Counts its launches; with `hold` they wait, until `release_one` or `go_on`."""

    def __init__(self):
        super().__init__(KIND, PAGES, B)
        self.num_launches = 0
        self._permits = threading.Semaphore(0)
        self._holds = False

    def hold(self):
        self._holds = True

    def release_one(self):
        self._permits.release()

    def go_on(self):
        self._holds = False
        self._permits.release()

    def launch(self, batch):
        if self._holds:
            assert self._permits.acquire(timeout=60)
        self.num_launches += 1
        return super().launch(batch)

    def reset(self):
        raise AssertionError("no launch fails here")

    def release(self):
        self.blocks = {}


def make_engine(**options):
    """Returns a running engine with these options; `engine._built.runner` is its `HeldModel`."""
    return _made(jdllm.Engine, built(**options))


def make_llm(tokenizer):
    """Returns an `LLM` around a running engine with a tokenizer."""
    return _made(jdllm.LLM, dataclasses.replace(built(), tokenizer=tokenizer))


def _made(kind, found):
    with mock.patch.object(build, "build", lambda *_: found):
        return kind()


def built(**options):
    """Returns what an engine with these options is built from, without an engine thread."""
    tokenizer = LetterTokenizer()
    scheduler, _ = hash_model.build(B, True, "fcfs", PAGES, ROWS)
    scheduler._max_queued = QUEUE
    model = HeldModel()
    return build.Built(
        config=config.EngineConfig(max_queued_requests=QUEUE, **options),
        device=facts.DeviceFacts(platform="cpu", device_kind="cpu"),
        core=core.EngineCore(scheduler, model, max_total_tokens=PAGES * B),
        runner=model,
        model=None,
        model_dir=pathlib.Path(),
        spec=SPEC,
        tokenizer=tokenizer,
        default_sampling=sampling_params.SamplingParams(temperature=0.0, top_p=1.0, top_k=-1),
        default_dllm=sampling_params.DllmParams(algorithm="LowConfidence").resolve(
            sampling_params.DllmParams()
        ),
        algorithms=("LowConfidence",),
        eos_token_ids=(EOS,),
        sizes=sizing.Sizes(
            context_length=CONTEXT,
            max_running_requests=ROWS,
            page_size=B,
            prefill_token_budget=5 * B,
            max_prefill_tokens=hash_model.MAX_PREFILL_TOKENS,
            num_pages=PAGES,
            weight_bytes=0,
            kv_bytes=0,
        ),
        startup_s=0.0,
        compiles_at_ready=0,
    )


def expected(prompt_ids, params, index=0):
    """Returns the ids that choice `index` of a prompt gets alone; the params need a seed."""
    one = Request(
        request_id="alone",
        prompt_ids=list(prompt_ids),
        sampling=params,
        max_new_tokens=params.max_new_tokens,
        eos_token_ids=(EOS,),
        seed=requests.seed_of_choice(params.seed, index),
    )
    return hash_model.alone(KIND, one)[0]


def num_requests(engine):
    """Returns how many requests the scheduler has ever taken."""
    return engine.stats().num_requests_total
