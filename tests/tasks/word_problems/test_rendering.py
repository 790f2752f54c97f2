"""Texts of written problems: every slot filled, numbers shown, sentences well formed."""

import random
import re

import pytest
from support import shown_numbers

from jdllm.tasks import words
from jdllm.tasks.word_problems import number_words, persons, rendering, written


def wording(text):
    (problem,) = written.parse(f"@ a+b\n{text}\n", "p.txt")
    return problem.wordings[0]


def texts(text, values, split="test", count=60, **options):
    rng = random.Random(0)
    found = [rendering.render(wording(text), values, rng, split, **options) for _ in range(count)]
    return [text for text, _ in found]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_text_shows_its_numbers_and_no_slot(split):
    rng = random.Random(1)
    for problem in (*written.everything(), *written.read(written.NEXT_FOLDER)):
        for one in problem.wordings:
            values = {slot: rng.randint(2, 99) for slot in one.slots if slot in "abcdef"}
            text, names = rendering.render(one, values, rng, split, spoken_share=0.3)
            assert not re.search(r"[{}\[\]|\x00-\x1f]|  | [.,?]", text), (problem.place, text)
            assert text[0] == text[0].upper(), (problem.place, text)
            assert set(values.values()) <= shown_numbers.of(text), (problem.place, text)
            assert split == "train" or set(names) <= words.TEST_NAMES


def test_people_keep_their_pronouns_and_differ():
    for text in texts("{A} gave {a} to {B}. {B.He} gave {A.him} {b}. How many?", {"a": 3, "b": 4}):
        match = re.fullmatch(r"(\w+) gave \w+ to (\w+)\. (He|She) gave (him|her) .*", text)
        assert match and match[1] != match[2]
        assert (match[3] == "He") == (match[2] in words.TEST_HE_NAMES)
        assert (match[4] == "him") == (match[1] in words.TEST_HE_NAMES)


def test_choices_leave_clean_sentences():
    found = set(texts("[Today |]they had {a}[ ,|]. [|but ]then {b}. How many?", {"a": 30, "b": 44}))
    assert found == {
        "Today they had 30,. Then 44. How many?",
        "Today they had 30. Then 44. How many?",
        "They had 30,. Then 44. How many?",
        "They had 30. Then 44. How many?",
        "Today they had 30,. But then 44. How many?",
        "Today they had 30. But then 44. How many?",
        "They had 30,. But then 44. How many?",
        "They had 30. But then 44. How many?",
    }


def test_small_numbers_are_sometimes_words_but_never_amounts_of_money():
    found = texts("A hat costs ${a}. {b} hats are {b}% off. How many?", {"a": 7, "b": 8}, count=300)
    assert all("$7" in text and "8%" in text for text in found)
    assert any("Eight hats" in text for text in found) and any("8 hats" in text for text in found)


def test_numbers_in_words():
    pairs = {0: "zero", 13: "thirteen", 40: "forty", 42: "forty-two", 100: "one hundred"}
    pairs |= {305: "three hundred and five", 999: "nine hundred and ninety-nine"}
    assert {number: number_words.spell(number) for number in pairs} == pairs
    assert number_words.spell(1000) == "one thousand"
    with pytest.raises(ValueError, match="number=1001"):
        number_words.spell(1001)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("{A} has {a} and buys {b}. How many does {A.he} have?",
         "I have 30 and buy 44. How many do I have?"),
        ("{A} is {a} and was {b}. How old is {A.he}?", "I am 30 and was 44. How old am I?"),
        ("{A}'s box holds {a}. Dad gives {b} to {A}. How many has {A.he}?",
         "My box holds 30. Dad gives 44 to me. How many have I?"),
        ("{A} carries {a} and {b} by {A.himself}. {A.His} how many?",
         "I carry 30 and 44 by myself. My how many?"),
    ],
)  # fmt: skip
def test_verbs_follow_the_speaker(named, told, monkeypatch):
    monkeypatch.setattr(persons, "SPEAKERS", persons.SPEAKERS[:1])
    found = texts(named, {"a": 30, "b": 44}, "train", spoken_share=1.0)
    assert told in {text.replace("thirty", "30").replace("forty-four", "44") for text in found}


def test_who_is_subject_or_object_stays_a_name_where_it_is_not_plain():
    (text, *_) = texts("Dad gave {A} {a} of {b}. How many?", {"a": 30, "b": 44}, spoken_share=1.0)
    assert re.match(r"Dad gave [A-Z]\w+ ", text)
