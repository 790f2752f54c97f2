"""Changes of training questions never touch a number, and repeat for the same draw."""

import random
import re
from collections import Counter

import pytest

from jdllm.tasks import arithmetic
from jdllm.tasks.word_problems import mistakes, rewording, sentences, strange_words, synonyms

ALL = rewording.Changes(reworded=1.0, noise=1.0, strange_words=1.0)
PLAIN = arithmetic.Variety()


def digits(text):
    return Counter(re.findall(r"\d+", text))


@pytest.mark.parametrize("name", ["reworded", "noise", "strange_words"])
def test_numbers_stay_and_something_changes(name):
    changes = rewording.Changes(**{name: 1.0})
    changed = 0
    for i in range(1500):
        problem = arithmetic.generate(i, split="train", variety=PLAIN)
        text = rewording.change(problem.question, random.Random(i), problem.names, changes)
        assert digits(text) == digits(problem.question), (problem.question, text)
        changed += text != problem.question
    assert changed > 700


def test_no_share_changes_nothing():
    text = "Tom has 7 apples. How many apples does Tom have left?"
    assert rewording.change(text, random.Random(0), ["Tom"], rewording.Changes()) == text


def test_the_same_draw_gives_the_same_text_and_other_draws_other_texts():
    text = "Tom has 7 red apples. He buys 5 more apples. How many apples does he have in total?"
    found = [rewording.change(text, random.Random(i), ["Tom"], ALL) for i in range(200)]
    assert found == [rewording.change(text, random.Random(i), ["Tom"], ALL) for i in range(200)]
    assert len(set(found)) > 150


def test_the_test_split_is_never_changed():
    variety = arithmetic.Variety(written_share=0.0, changes=ALL)
    for i in range(20):
        plain = arithmetic.generate(i, split="test")
        assert plain == arithmetic.generate(i, split="test", variety=variety)


def test_synonyms_hold_no_digit_and_replace_themselves_never():
    for phrase, others in synonyms.TABLE.items():
        for other in others:
            assert not re.search(r"\d", phrase + other)
            assert other == phrase == "half a dozen" or other != phrase
            assert phrase == phrase.lower() and other.strip() == other


def test_a_repeated_phrase_has_one_synonym_and_keeps_capitals_and_ends():
    text = "Children like films. All the children see 3 films, in total. Each. kids?"
    for i in range(50):
        found = rewording.replace_synonyms(text, random.Random(i), 1.0)
        assert re.match(r"Kids like movies\. All the kids see 3 movies, [a-z ]+\.", found), found


@pytest.mark.parametrize(
    ("question", "embedded"),
    [
        ("How many apples does Tom have left?", "How many apples Tom has left"),
        ("How much money did she spend in all?", "How much money she spent in all"),
        ("How many apples do they have?", "How many apples they have"),
        ("How many more will he need?", "How many more he will need"),
        ("How many boxes are there now?", "How many boxes there are now"),
        ("How many are left?", "How many are left"),
        ("How many more must be fetched?", None),
        ("What is left?", None),
    ],
)
def test_a_question_becomes_part_of_a_sentence(question, embedded):
    assert sentences._embedded(question) == embedded


def test_sentences_join_split_and_swap():
    rng = random.Random(0)
    facts = ["Tom has 7 apples.", "He buys 5.", "How many does he have?"]
    assert sentences._split(["Tom has 7, and he buys 5."], rng, ()) == ["Tom has 7.", "He buys 5."]
    assert sentences._ask_first(facts, rng, ()) == [facts[2], *facts[:2]]
    supposed = {tuple(sentences._suppose(facts, random.Random(i), ())) for i in range(20)}
    assert supposed == {
        tuple(facts),
        ("Tom has 7 apples.", "If he buys 5, how many does he have?"),
    }
    back = sentences._suppose(["If Tom buys 5, how many does he have?"], rng, ())
    assert back == ["Tom buys 5.", "How many does he have?"]
    joined = sentences._join(["The hen lays 7 eggs.", "The dog eats 2."], rng, ())
    assert len(joined) == 1 and joined[0].endswith("the dog eats 2.")


def test_strange_words_spare_what_decides_the_operation():
    text = (
        "The baker has 7 boxes of 6 rolls each. She sells half. How many rolls are left in total?"
    )
    for i in range(300):
        found = strange_words.put(text, random.Random(i), ["Ann"])
        for word in ("7", "6", "each", "half", "left", "total", "How many"):
            assert re.search(rf"\b{word}\b", found), found


def test_slips_spare_words_of_numbers():
    for i in range(300):
        found = mistakes._slip("three times twenty, half of twice", random.Random(i))
        assert found == "three times twenty, half of twice"
    assert any(
        mistakes._slip("wonderful things", random.Random(i)) != "wonderful things" for i in range(5)
    )
