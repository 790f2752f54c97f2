"""AUP against closed forms and against the values that its leaderboard shows."""

import math

import pytest

from jdllm.eval import aup, summary
from jdllm.eval.aup import Point

TOLERANCE = 0.006  # the leaderboard rounds to two places

# Points (TPF, accuracy in percent), the best accuracy of the task's set of methods, and AUP, as the
# leaderboard of hao-ai-lab/d3LLM publishes them (AUP_leaderboard/data_*.yaml, and its README).
PUBLISHED = {
    "Qwen2.5-7B GSM8K": ([(1, 74.1)], 74.98, 74.10),
    "LLaDA GSM8K": ([(1, 72.55)], 74.98, 72.55),
    "Fast-dLLM GSM8K": ([(1, 74.79), (2.77, 74.68)], 74.98, 205.78),
    "D2F GSM8K": ([(1, 74.98), (2.88, 74.39)], 74.98, 213.76),
    "dParallel GSM8K": ([(1, 74.0), (5.14, 72.63)], 74.98, 358.14),
    "d3LLM-LLaDA GSM8K": ([(1, 74.02), (9.11, 73.09)], 74.98, 637.65),
    "Fast-dLLM MATH": ([(1, 32.1), (1.97, 30.82)], 41.15, 47.19),
    "D2F MATH": ([(1, 29.1), (2.66, 28.94)], 41.15, 49.00),
    "dParallel HumanEval": ([(1, 39.68), (4.93, 39.02)], 67.73, 83.69),
    "Fast-dLLM Long-GSM8K": ([(1, 78.45), (2.45, 78.01)], 82.56, 175.37),
    "Fast-dLLM-v2 MBPP": ([(1, 61.23), (2.04, 59.12)], 63.80, 114.12),
    "EAGLE-3 HumanEval": ([(1, 67.58), (5.98, 67.58)], 72.25, 344.81),
    "d3LLM-Coder HumanEval": ([(1, 82.4), (2.88, 79.7)], 86.60, 208.36),
    "d3LLM-Coder MBPP": ([(1, 80.1), (2.5, 80.0)], 83.50, 186.18),
}


def points(pairs):
    return [Point(tpf, accuracy) for tpf, accuracy in pairs]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values(name):
    pairs, best, expected = PUBLISHED[name]
    assert aup.aup(points(pairs), best=best) == pytest.approx(expected, abs=TOLERANCE)


def test_closed_forms():
    assert aup.aup(points([(3, 50)])) == 150
    assert aup.aup(points([(3, 50)]), best=80) == 150, "the first point has no weight"
    assert aup.aup(points([(1, 60), (2, 60), (7, 60)])) == pytest.approx(7 * 60)
    two = points([(9.11, 73.09), (1, 74.02)])
    assert aup.aup(two, best=74.02) == pytest.approx(659.59, abs=TOLERANCE), "in any order"
    assert aup.aup(two) == aup.aup(two, best=74.02)
    far = aup.aup(points([(1, 40), (2, 40)]), best=80)
    assert far == pytest.approx(40 + 40 * math.exp(-1.5))


def test_points_that_lose_more_than_five_are_left_out():
    first, good, bad = points([(1, 80), (4, 75), (9, 74.9)])
    assert aup.kept([bad, good, first]) == [first, good]
    assert aup.aup([first, good, bad]) == aup.aup([first, good])
    assert "1 points lose" in aup.line([first, good, bad], None)


@pytest.mark.parametrize("pair", [(0, 50), (-1, 50), (math.inf, 50), (1, 101), (1, math.nan)])
def test_impossible_points_are_refused(pair):
    with pytest.raises(ValueError, match="positive TPF"):
        aup.aup(points([pair]))
    with pytest.raises(ValueError, match="needs a point"):
        aup.aup([])
    with pytest.raises(ValueError, match="best"):
        aup.aup(points([(1, 50)]), best=0)


def sweep(*pairs):
    blank = dict.fromkeys(summary.SWEEP_COLUMNS)
    return {
        str(i): {**blank, "tpf_mean": tpf, "accuracy": accuracy}
        for i, (tpf, accuracy) in enumerate(pairs)
    }


def test_a_sweep_tells_its_aup_and_its_file_gives_the_same(tmp_path, capsys):
    measured = sweep((1.0, 0.7402), (9.11, 0.7309))
    text = summary.sweep_markdown("threshold", measured)
    assert "AUP: 659.59 (best accuracy 74.02 % of these points)" in text
    file = tmp_path / "sweep.csv"
    file.write_text(summary.sweep_csv("threshold", measured))
    assert aup.main([str(file)]) == 0
    assert capsys.readouterr().out.strip() in text
    assert aup.main(["--best", "74.98", "1:74.02", "9.11:73.09"]) == 0
    assert "AUP: 637.65 (best accuracy 74.98 %)" in capsys.readouterr().out


@pytest.mark.parametrize("measured", [sweep((1, 0.5)), sweep((None, 0.5), (2, 0.5))])
def test_a_sweep_of_one_point_has_none(measured):
    assert "AUP" not in summary.sweep_markdown("threshold", measured)


@pytest.mark.parametrize(
    ("words", "named"),
    [(["nothing.csv"], "nothing.csv"), (["1:x"], "1:x"), (["--best", "0", "1:50"], "best")],
)
def test_bad_input_is_named(words, named, capsys):
    assert aup.main(words) == 2
    assert named in capsys.readouterr().err


def test_a_file_without_the_figures_is_refused(tmp_path, capsys):
    file = tmp_path / "sweep.csv"
    file.write_text(summary.sweep_csv("threshold", sweep((None, 0.5), (2.0, 0.6))))
    assert aup.main([str(file)]) == 2
    assert "sweep.csv" in capsys.readouterr().err
