"""Contact sheets: every picture lies where it belongs."""

import numpy as np
import pytest

from jdllm.tasks.scenes import pictures as scene_pictures

BLACK = np.zeros((2, 2, 3), np.uint8)


def test_pictures_lie_row_by_row_on_paper():
    pictures = [np.full((2, 3, 3), value, np.uint8) for value in (10, 20, 30)]
    sheet = scene_pictures.contact_sheet(pictures, columns=2, gap=1, paper=(1, 2, 3))
    assert sheet.shape == (7, 9, 3) and sheet.dtype == np.uint8
    expected = np.empty((7, 9, 3), np.uint8)
    expected[:] = (1, 2, 3)
    expected[1:3, 1:4], expected[1:3, 5:8], expected[4:6, 1:4] = 10, 20, 30
    np.testing.assert_array_equal(sheet, expected)


def test_scale_repeats_pixels():
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    sheet = scene_pictures.contact_sheet([picture], columns=1, gap=0, scale=3)
    assert sheet.shape == (6, 6, 3)
    np.testing.assert_array_equal(sheet[::3, ::3], picture)
    np.testing.assert_array_equal(sheet[2::3, 2::3], picture)


@pytest.mark.parametrize(
    "pictures, options, message",
    [
        ([], {"columns": 1}, "at least 1"),
        ([BLACK], {"columns": 0}, "columns=0"),
        ([BLACK], {"columns": 1, "gap": -1}, "gap=-1"),
        ([BLACK], {"columns": 1, "scale": 0}, "scale=0"),
        ([BLACK, np.zeros((2, 3, 3), np.uint8)], {"columns": 1}, "picture 1 is"),
        ([np.zeros((2, 2, 3))], {"columns": 1}, "picture 0 is float64"),
        ([np.zeros((2, 2, 4), np.uint8)], {"columns": 1}, "picture 0 is uint8"),
    ],
    ids=["none", "columns", "gap", "scale", "sizes", "float", "alpha"],
)
def test_what_makes_no_sheet_is_refused(pictures, options, message):
    with pytest.raises(ValueError, match=message):
        scene_pictures.contact_sheet(pictures, **options)
