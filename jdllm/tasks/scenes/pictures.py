"""A contact sheet: pictures of one size in a grid, for documents and for looking at them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

Picture = UInt8[np.ndarray, "height width 3"]


def contact_sheet(
    pictures: Sequence[Picture],
    *,
    columns: int,
    gap: int = 4,
    scale: int = 1,
    paper: tuple[int, int, int] = (255, 255, 255),
) -> Picture:
    """Returns the pictures row by row, with `gap` pixels of paper around each.

    Every pixel becomes `scale` by `scale` of the sheet's. Places without a picture stay paper.
    """
    if not pictures or columns < 1 or gap < 0 or scale < 1:
        raise ValueError(
            f"{len(pictures)=} and {columns=} must be at least 1, {gap=} 0, {scale=} 1"
        )
    shape = pictures[0].shape
    for i, picture in enumerate(pictures):
        if picture.shape != shape or picture.shape[2:] != (3,) or picture.dtype != np.uint8:
            raise ValueError(
                f"picture {i} is {picture.dtype} {list(picture.shape)}; all must be uint8 "
                f"[height, width, 3] of one size, as the first one's {list(shape)}"
            )
    height, width = shape[0] * scale, shape[1] * scale
    rows = -(-len(pictures) // columns)
    sheet = np.empty(
        (rows * (height + gap) + gap, columns * (width + gap) + gap, shape[2]), np.uint8
    )
    sheet[:] = paper
    for i, picture in enumerate(pictures):
        top = (i // columns) * (height + gap) + gap
        left = (i % columns) * (width + gap) + gap
        sheet[top : top + height, left : left + width] = picture.repeat(scale, 0).repeat(scale, 1)
    return sheet
