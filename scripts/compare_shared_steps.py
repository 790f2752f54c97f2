"""Compares images alone with the same images among others, in values of 0 to 255.

    python scripts/compare_shared_steps.py --dtype bfloat16 --limit 300 --image-size 64x64 128x128

Each held-out caption is painted alone, and then all of them together. They differ in their numbers
of steps, so that one ends and the next one joins at any step of the others.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time

import numpy as np

import jdllm
from jdllm.bench import tables
from jdllm.device import devices
from jdllm.engine.images import checks
from jdllm.tasks.scenes import generator

SEED = 7
STEPS = (4, 6, 8, 12)
NEAR = 2  # the difference of values that nobody sees


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path", default="jdllm-nano-image")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batching-max-size", type=int)
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--image-size", nargs="+", default=["64x64", "128x128"])
    options = parser.parse_args()
    with jdllm.ImageEngine(
        model_path=options.model_path,
        dtype=options.dtype,
        batching_max_size=options.batching_max_size,
        warmup_resolutions=",".join(options.image_size),
    ) as engine:
        tables.say(f"{devices.facts()}, {options.dtype}, {options.limit} images of each size")
        tables.say(f"| size | within {NEAR} | worst image | 50 % / 95 % of images: largest | all |")
        tables.say("|---|---|---|---|---|")
        for size in options.image_size:
            tables.say(_row(size, _differences(engine, size, options.limit)))


def _differences(engine: jdllm.ImageEngine, size: str, limit: int) -> np.ndarray:
    """Returns how far each value of each image among others is from the same image's alone."""
    width, height = checks.size_of(size) or (None, None)
    rng = random.Random(SEED)
    captions = [one.caption for one in itertools.islice(generator.scenes("test"), limit)]
    steps = [rng.choice(STEPS) for _ in captions]

    def painted(places: list[int]) -> list[np.ndarray]:
        images = engine.generate(
            [captions[place] for place in places],
            width=width,
            height=height,
            num_inference_steps=[steps[place] for place in places],
            seed=places,
            use_tqdm=False,
        )
        return [np.asarray(image, int) for image in images]

    places = list(range(limit))
    alone = [painted([place])[0] for place in places]
    painted(places)  # asks for the programs of several images
    while engine.stats().num_waiting_compiles:
        time.sleep(1)
    before = engine.stats()
    found = np.abs(np.stack(alone) - np.stack(painted(places)))
    after = engine.stats()
    shared = after.merged_steps_total - before.merged_steps_total
    total = after.denoising_steps_total - before.denoising_steps_total
    tables.say(f"{size}: {shared / total:.0%} of the steps were shared")
    return found


def _row(size: str, found: np.ndarray) -> str:
    """Returns a line of the table."""
    near = (found <= NEAR).reshape(len(found), -1).mean(axis=1)
    largest = found.reshape(len(found), -1).max(axis=1)
    half, most = np.percentile(largest, (50, 95))
    return (
        f"| {size} | {near.mean():.2%} | {near.min():.2%} | {half:.0f} / {most:.0f} "
        f"| {largest.max()} |"
    )


if __name__ == "__main__":
    main()
