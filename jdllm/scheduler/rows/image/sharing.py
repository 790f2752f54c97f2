"""Which images of a group share steps: those whose captions are not too unequal in length.

A step is compiled for a number of rows and a length of captions, and pads both. A large model takes
time for each token of it, and once for the launch. So images with long captions may be better off
in steps of their own. What is best for all images that are ready decides, whoever's turn it is:
else an image could fill the steps of others beside those of its own, and others fall behind.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from jdllm.scheduler.rows.image.buckets import ImageBuckets, StepBucket

# Captions are kept apart only if steps take so much less time, as a share. What they cost is not
# known more exactly.
LEAST_GAIN = 0.03


def choices(
    buckets: ImageBuckets,
    shape: StepBucket,
    sizes: Sequence[int],
    lengths: Sequence[int],
) -> dict[StepBucket, list[int]]:
    """Returns the buckets that a step may have, the best one first, and who could share each.

    The images have the size of `shape` and captions of the compiled `lengths`, in their turns; a
    step has one of `sizes` rows. Those who could share it are places in `lengths`, the first of all
    among them; as many as it has rows take part, and it is compiled for their longest caption. The
    last buckets are for captions as long as the first.
    """
    image_tokens = buckets.image_tokens(shape.height, shape.width)
    launch_cost = buckets.launch_cost * (image_tokens + buckets.tokens[0])

    def cost(rows: int, longest: int) -> float:
        """Returns what a step costs, in tokens."""
        return rows * (image_tokens + longest) + launch_cost

    def rate(rows: int, longest: int, count: int) -> tuple[float, int]:
        """Returns how many of `count` images a step serves for its cost; of equals, the larger."""
        return min(rows, count) / cost(rows, longest), rows

    def of_all(part: Sequence[tuple[int, int]]) -> float:
        """Returns what a step of each image costs; those left over go first in the next one."""
        longest, count = part[-1][0], sum(count for _, count in part)
        return count / max(rate(rows, longest, count)[0] for rows in sizes)

    divided = list(_divisions(sorted(collections.Counter(lengths).items())))
    costs = [sum(map(of_all, parts)) for parts in divided]
    enough = (1 + LEAST_GAIN) * min(costs)
    parts = next(parts for parts, one in zip(divided, costs, strict=True) if one <= enough)
    together = next(dict(part) for part in parts if lengths[0] in dict(part))
    found: dict[StepBucket, list[int]] = {}
    for shared in (together, {lengths[0]}):
        places = [place for place, length in enumerate(lengths) if length in shared]
        by_rate = functools.partial(rate, longest=max(shared), count=len(places))
        for rows in sorted(sizes, key=by_rate, reverse=True):
            tokens = max(lengths[place] for place in places[:rows])
            found.setdefault(dataclasses.replace(shape, rows=rows, tokens=tokens), places)
    return found


def _divisions(counts: Sequence[tuple[int, int]]) -> Iterator[list[Sequence[tuple[int, int]]]]:
    """Yields all divisions of a sequence into parts, those into few parts first."""
    for number in range(len(counts)):
        for cuts in itertools.combinations(range(1, len(counts)), number):
            ends = [0, *cuts, len(counts)]
            yield [counts[a:b] for a, b in itertools.pairwise(ends)]
