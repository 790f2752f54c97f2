"""The requests of an image benchmark: prompts, and the size and steps of each.

Nothing is downloaded: prompts are lines of a local file (`vbench`) or captions of generated scenes
(`random`), one to eight of them joined, so that prompts differ in length as those of people do.
The tokenizer that stands in where a folder has none (`--load-format dummy`) counts bytes; there a
single caption has about as many tokens as a prompt of 50 words has otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import orjson

from jdllm import errors
from jdllm.engine.images import checks
from jdllm.tasks.scenes import generator

DATASETS = ("vbench", "random")
MOST_CAPTIONS = 8
PROMPT_KEYS = ("prompt", "prompt_en", "text", "caption")
CONFIG_FLAG = "--random-request-config"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: `count` images of a prompt; None is the server's default.

    `extra` are further fields of the body. `slo_s` is how long its answer may take.
    """

    prompt: str
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    count: int = 1
    seed: int = 0
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slo_s: float | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides how much work it is: requests of one kind differ in prompt and seed only."""
        return self.width, self.height, self.num_inference_steps, json.dumps(self.extra)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A kind of requests of a mixed load, drawn in proportion to its weight."""

    weight: float = 1.0
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    slo_s: float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Says which requests to send; `profiles` stand in place of one size for all.

    A random prompt joins at most `most_captions`.
    """

    dataset: Literal["vbench", "random"] = "random"
    path: str | None = None
    most_captions: int = MOST_CAPTIONS
    num_prompts: int = 10
    count: int = 1
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    profiles: tuple[Profile, ...] = ()
    profile_seed: int = 42
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 42

    def __post_init__(self) -> None:
        if self.dataset == "vbench" and not self.path:
            raise errors.ConfigError(
                "--dataset vbench needs --dataset-path FILE (nothing is downloaded): a line for "
                "each prompt, or the JSON file of VBench's prompts"
            )
        if self.dataset == "random" and self.path:
            raise errors.ConfigError("--dataset-path is for --dataset vbench")
        if (self.width is None) != (self.height is None):
            raise errors.ConfigError("give both --width and --height, or none of them")
        last = self.seed + self.num_prompts * self.count - 1
        if last > checks.MAX_SEED:
            raise errors.ConfigError(
                f"--seed {self.seed}: the last of {self.num_prompts * self.count} images would "
                f"have the seed {last}, above {checks.MAX_SEED}"
            )

    def asks(self) -> list[Ask]:
        """Returns the requests; the same load gives the same ones."""
        if self.path:
            # As in SGLang, a short file is read again and again.
            prompts = itertools.cycle(read_prompts(self.path))
        else:
            prompts = captions(self.seed, self.most_captions)
        own = Profile(
            width=self.width, height=self.height, num_inference_steps=self.num_inference_steps
        )
        given = self.profiles or (own,)
        drawn = random.Random(self.profile_seed).choices(
            given, [one.weight for one in given], k=self.num_prompts
        )
        return [
            Ask(
                prompt=prompt,
                width=one.width or self.width,
                height=one.height or self.height,
                num_inference_steps=one.num_inference_steps or self.num_inference_steps,
                count=self.count,
                seed=self.seed + place * self.count,
                extra={**self.extra, **one.extra},
                slo_s=one.slo_s,
            )
            for place, (prompt, one) in enumerate(zip(prompts, drawn))
        ]


def kinds(asks: Sequence[Ask]) -> list[Ask]:
    """Returns the first request of each kind."""
    found: dict[tuple[Any, ...], Ask] = {}
    for one in asks:
        found.setdefault(one.kind, one)
    return list(found.values())


def captions(seed: int, most: int = MOST_CAPTIONS) -> Iterator[str]:
    """Yields texts without end: some captions of scenes each, so that lengths differ widely."""
    rng, place = random.Random(seed), 0
    while True:
        count = rng.randint(1, most)
        some = [generator.generate(place + i, split="train", seed=seed) for i in range(count)]
        place += count
        yield ". ".join(scene.caption.removesuffix(".") for scene in some)


def read_prompts(path: str) -> list[str]:
    """Returns the prompts of a file: lines of text or of JSON, or a JSON list."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"cannot read --dataset-path {path}: {error}") from error
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            lines = [line.strip() for line in text.split("\n")]
            rows = [json.loads(line) if line.startswith("{") else line for line in lines if line]
    except json.JSONDecodeError as error:
        raise errors.ConfigError(f"--dataset-path {path} is not valid JSON: {error}") from error
    if not rows:
        raise errors.ConfigError(f"--dataset-path {path} holds no prompt")
    return [_prompt(row, path) for row in rows]


def parse_profiles(text: str | None) -> tuple[Profile, ...]:
    """Returns the profiles of SGLang's `--random-request-config`, a JSON list of objects.

    `weight` says how often one is drawn, `slo_ms` how long its answers may take; `width`, `height`
    and `num_inference_steps` are the request's, and other keys further fields of its body.
    """
    if not text:
        return ()
    try:
        rows = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise errors.ConfigError(f"{CONFIG_FLAG} is not valid JSON: {error}") from error
    rows = [rows] if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise errors.ConfigError(
            f"{CONFIG_FLAG} must be a JSON list of objects such as "
            '[{"width": 512, "height": 512, "num_inference_steps": 8, "weight": 0.5}]'
        )
    profiles = tuple(map(_profile, rows))
    if math.isinf(sum(one.weight for one in profiles)):
        raise errors.ConfigError(f"{CONFIG_FLAG}: the sum of all weight is not finite")
    return profiles


def _profile(row: Mapping[str, Any]) -> Profile:
    rest = dict(row)
    sizes = {name: rest.pop(name, None) for name in ("width", "height", "num_inference_steps")}
    weight, slo_ms = rest.pop("weight", 1.0), rest.pop("slo_ms", None)
    for name, value in sizes.items():
        # A 0 would be taken for the default.
        if value is not None and (type(value) is not int or value < 1):
            raise errors.ConfigError(f"{CONFIG_FLAG}: {name}={value!r} must be a positive integer")
    if (sizes["width"] is None) != (sizes["height"] is None):
        raise errors.ConfigError(f"{CONFIG_FLAG}: give both width and height in {dict(row)}")
    if not _is_positive(weight) or not (slo_ms is None or _is_positive(slo_ms)):
        raise errors.ConfigError(f"{CONFIG_FLAG}: weight and slo_ms must be above 0 in {dict(row)}")
    if "ratio" in rest:  # other tools' name; as a field of the body it would be refused later
        raise errors.ConfigError(f"{CONFIG_FLAG}: ratio is called weight")
    return Profile(
        weight=weight, slo_s=None if slo_ms is None else slo_ms / 1000, extra=rest, **sizes
    )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _prompt(row: Any, path: str) -> str:
    if isinstance(row, Mapping):
        row = next((row[key] for key in PROMPT_KEYS if key in row), None)
    if not isinstance(row, str) or not row.strip():
        raise errors.ConfigError(
            f"--dataset-path {path}: each row must be a text, or an object with one of "
            f"{', '.join(PROMPT_KEYS)}"
        )
    return row
