"""The vocabulary of the arithmetic problems: names, things, verbs and sentence frames.

This module holds data only. A phrasing is a (frame, verb) pair of one family. A hash in `splits`
decides which pairs training never shows, so a table can grow without a second list.

Placeholders: {A} the main person, {B} and {D} others, {P}/{p} the pronoun of A, {m} him/her,
{h}/{H} his/her, {v} the verb, {n} and {k} numbers, {o} the things, {C}/{c} containers and
container, {S}/{s} sharers and sharer, {G}/{g} who gives, {t} who takes.
"""

from __future__ import annotations


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Returns the words of a text, or what a separator divides, without the spaces around."""
    return tuple(word.strip() for word in text.replace("\n", " ").split(separator))


HE_NAMES = listed(
    """Tom James Robert John Michael David William Richard Joseph Thomas Charles Daniel Matthew
    Anthony Mark Steven Paul Andrew Joshua Kevin Brian George Edward Ronald Timothy Jason Jeffrey
    Ryan Jacob Gary Nicholas Eric Jonathan Stephen Larry Justin Scott Brandon Benjamin Samuel Frank
    Gregory Raymond Patrick Alexander Jack Dennis Jerry Tyler Aaron Jose Henry Adam Peter Nathan
    Zachary Walter Kyle Harold Carl Jeremy Gerald Keith Roger Arthur Terry Lawrence Sean Christian
    Albert Joe Ethan Austin Jesse Willie Billy Bryan Bruce Jordan Ralph Roy Noah Dylan Eugene Wayne
    Alan Juan Louis Russell Gabriel Randy Philip Harry Vincent Bobby Johnny Logan Omar Ahmed Raj
    Chen Ivan Pedro Luca Mateo Kenji Ali Hugo Felix Oscar Leo Max Sam Ben Dan Tim Bob"""
)
SHE_NAMES = listed(
    """Mary Patricia Jennifer Linda Elizabeth Barbara Susan Jessica Sarah Karen Nancy Lisa Betty
    Margaret Sandra Ashley Kimberly Emily Donna Michelle Carol Amanda Melissa Deborah Stephanie
    Rebecca Laura Sharon Cynthia Kathleen Amy Angela Shirley Anna Brenda Pamela Emma Nicole Helen
    Samantha Katherine Christine Debra Rachel Carolyn Janet Maria Heather Diane Ruth Julie Olivia
    Joyce Virginia Victoria Kelly Lauren Christina Joan Evelyn Judith Megan Andrea Cheryl Hannah
    Jacqueline Martha Gloria Teresa Ann Sara Madison Frances Kathryn Janice Jean Abigail Alice Julia
    Judy Sophia Grace Denise Amber Doris Marilyn Danielle Beverly Isabella Theresa Diana Natalie
    Brittany Charlotte Marie Kayla Alexis Lori Mia Zoe Fatima Aisha Mei Yuki Priya Sofia Elena Ana
    Lucy Jane Kate Ella Ava Lily Chloe Eva Nina Rosa Weng"""
)
# Never in training, in any role; an invented name that is one of these is drawn again.
TEST_HE_NAMES = listed(
    """Oliver Liam Elijah Mason Wyatt Caleb Isaac Connor Hunter Owen Miles Jasper Silas Theo Ezra
    Marcus Victor Simon Trevor Derek Curtis Dustin Rafael Diego Tariq Hiro Stefan Nolan Ned
    Gus"""
)
TEST_SHE_NAMES = listed(
    """Natalia Penelope Aurora Hazel Violet Stella Naomi Ivy Clara Ruby Alma Iris Daisy Phoebe Tessa
    Miriam Leila Ingrid Paula Bianca Carmen Gina Holly April Wendy Tanya Sonia Yara Freya
    Dot"""
)
TEST_NAMES = frozenset(TEST_HE_NAMES + TEST_SHE_NAMES)

ONSETS = listed("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl qu sh st th tr y")
VOWELS = listed("a e i o u a e i o ai ee ia oo ou y")
CODAS = ("", "", "", "", "n", "l", "r", "s", "t", "m", "ck", "nd", "x", "th")

THINGS = listed(
    """apples|oranges|bananas|pears|peaches|plums|lemons|grapes|cherries|mangoes|melons|berries
    |strawberries|tomatoes|potatoes|carrots|onions|peppers|pumpkins|eggs|cookies|cupcakes|muffins
    |donuts|cakes|pies|candies|chocolates|lollipops|sandwiches|pizzas|bagels|rolls|pancakes|nuts
    |books|notebooks|pencils|pens|crayons|markers|erasers|rulers|folders|magazines|comics|posters
    |stickers|stamps|cards|coins|marbles|balls|balloons|toys|dolls|puzzles|kites|blocks|robots
    |shells|rocks|stones|flowers|roses|tulips|leaves|seeds|plants|trees|acorns|feathers|sticks
    |cups|plates|bowls|spoons|forks|bottles|glasses|candles|lamps|pillows|blankets|towels|chairs
    |shirts|hats|socks|scarves|gloves|shoes|jackets|dresses|buttons|beads|ribbons|bracelets|rings
    |photos|paintings|drawings|letters|tickets|badges|medals|keys|clips|pins|nails|screws|bricks
    |tiles|boards|wheels|batteries|bulbs|magnets|fish|birds|chickens|ducks|rabbits|kittens|goats
    |points|pages|games|songs|movies|stars|tokens|gifts|bags of chips|boxes of tea|cans of soup
    |toy cars|toy trains|water bottles|picture books|gold coins|silver coins|paper planes
    |tennis balls|baseball cards|video games|phone cases|bottle caps|jars of honey|pairs of socks
    |slices of bread
    """,
    "|",
)
COLORS = listed("red blue green yellow white black brown pink purple new old small big shiny")

# (plural, singular)
CONTAINERS = (
    ("boxes", "box"), ("bags", "bag"), ("baskets", "basket"), ("jars", "jar"), ("packs", "pack"),
    ("shelves", "shelf"), ("crates", "crate"), ("trays", "tray"), ("drawers", "drawer"),
    ("bins", "bin"), ("rows", "row"), ("piles", "pile"), ("buckets", "bucket"),
    ("cases", "case"), ("packets", "packet"), ("cartons", "carton"),
)  # fmt: skip
PLACES = ("bag", "box", "basket", "room", "drawer", "jar", "backpack", "garage", "shop", "closet")
SHARERS = (
    ("friends", "friend"), ("children", "child"), ("classmates", "classmate"),
    ("cousins", "cousin"), ("neighbors", "neighbor"), ("students", "student"),
    ("sisters", "sister"), ("brothers", "brother"), ("teachers", "teacher"), ("teams", "team"),
    ("kids", "kid"), ("people", "person"), ("players", "player"), ("coworkers", "coworker"),
)  # fmt: skip
GIVERS = (
    "{H} mother", "{H} father", "{H} sister", "{H} brother", "{H} friend", "A friend",
    "{H} uncle", "{H} aunt", "{H} teacher", "{H} grandmother", "{H} grandfather", "A neighbor",
    "{D}", "{D}", "{D}",
)  # fmt: skip
TAKERS = (
    "{h} mother", "{h} father", "{h} sister", "{h} brother", "{h} friend", "a friend",
    "{h} cousin", "{h} teacher", "a neighbor", "{D}", "{D}", "{D}", "{D}",
)  # fmt: skip

# family -> (frames, verbs)
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (
        (
            "{A} {v} {n} {o}.", "{A} {v} {n} {o} in {h} {c}.", "At first, {A} {v} {n} {o}.",
            "In the morning, {A} {v} {n} {o}.", "On Monday, {A} {v} {n} {o}.",
            "{A} {v} {n} {o} at home.", "{A} {v} exactly {n} {o}.", "Today {A} {v} {n} {o}.",
        ),
        ("has", "has", "has", "owns", "keeps", "starts with", "begins with", "gets", "holds"),
    ),
    "gain": (
        (
            "{P} {v} {n} more {o}.", "Then {p} {v} {n} more {o}.", "{A} {v} {n} more {o}.",
            "{P} {v} another {n} {o}.", "Later, {p} {v} another {n} {o}.", "{P} {v} {n} more.",
            "The next day, {A} {v} {n} more {o}.", "After lunch, {p} {v} {n} more {o}.",
            "{P} also {v} {n} {o}.", "On Tuesday, {p} {v} {n} more.", "Then {A} {v} {n} {o} more.",
        ),
        (
            "buys", "finds", "gets", "collects", "wins", "makes", "receives", "gathers", "adds",
            "picks up", "borrows", "brings home", "earns", "orders",
        ),
    ),
    "given": (
        (
            "{G} {v} {m} {n} more {o}.", "{G} {v} {m} {n} {o}.", "{G} {v} {m} another {n} {o}.",
            "Then {g} {v} {m} {n} more {o}.", "Later, {g} {v} {m} {n} more.",
            "{G} {v} {A} {n} more {o}.", "The next day, {g} {v} {A} {n} {o}.",
        ),
        ("gives", "hands", "sends", "brings", "lends", "buys", "offers", "mails"),
    ),
    "lose": (
        (
            "{P} {v} {n} {o}.", "Then {p} {v} {n} {o}.", "{P} {v} {n} of them.",
            "{A} {v} {n} {o}.", "Later, {p} {v} {n} of the {o}.", "{P} then {v} {n} of {h} {o}.",
            "The next day, {A} {v} {n} of them.", "After lunch, {p} {v} {n} {o}.",
            "On Tuesday, {p} {v} {n} of the {o}.", "Then {A} {v} {n} of {h} {o}.",
        ),
        (
            "loses", "gives away", "sells", "uses", "breaks", "donates", "drops", "throws away",
            "returns", "trades away", "ruins", "hides", "eats",
        ),
    ),
    "give": (
        (
            "{P} {v} {n} {o} to {t}.", "Then {p} {v} {n} {o} to {t}.", "{P} {v} {t} {n} {o}.",
            "{A} {v} {n} of them to {t}.", "Later, {p} {v} {t} {n} of them.",
            "{P} then {v} {n} of {h} {o} to {t}.", "The next day, {A} {v} {t} {n} {o}.",
        ),
        ("gives", "hands", "sends", "lends", "mails", "passes", "sells", "offers"),
    ),
    "groups": (
        (
            "{A} {v} {n} {C}. Each {c} holds {k} {o}.", "{A} {v} {n} {C} with {k} {o} in each.",
            "{A} {v} {n} {C}. There are {k} {o} in each {c}.",
            "{A} {v} {n} {C} of {o}. Each {c} has {k} {o}.",
            "{A} {v} {n} {C}, and every {c} contains {k} {o}.",
            "{A} {v} {n} {C} with {k} {o} in every {c}.",
            "{A} {v} {n} {C} and puts {k} {o} in each {c}.",
        ),
        ("has", "buys", "gets", "fills", "packs", "owns", "carries", "orders"),
    ),
    "rate": (
        (
            "{A} {v} {k} {o} every day for {n} days.", "{A} {v} {k} {o} a day for {n} days.",
            "Each day {A} {v} {k} {o}. {P} does this for {n} days.",
            "{A} {v} {k} {o} an hour for {n} hours.", "{A} {v} {k} {o} each week for {n} weeks.",
            "Every hour, {A} {v} {k} {o}. {P} works for {n} hours.",
            "For {n} days, {A} {v} {k} {o} per day.",
        ),
        ("makes", "collects", "picks", "gathers", "finds", "gets", "packs", "sorts", "prepares"),
    ),
    "share": (
        (
            "{P} {v} the {o} equally among {n} {S}.", "Then {p} {v} them equally among {n} {S}.",
            "{P} {v} all the {o} evenly between {n} {S}.",
            "{A} {v} the {o} equally with {n} {S} and keeps none.",
            "In the end, {p} {v} all of them evenly among {n} {S}.",
        ),
        ("shares", "splits", "divides", "distributes", "hands out"),
    ),
    "pack": (
        (
            "{P} {v} the {o} into {C} of {n}.", "{P} {v} the {o} into {C} with {n} in each {c}.",
            "Then {p} {v} all the {o} into {C} of {n} {o} each.",
            "{A} {v} them into {C}, {n} {o} to a {c}.",
            "Each {c} can hold {n} {o}, and {A} {v} all of the {o} into {C}.",
        ),
        ("packs", "puts", "sorts", "places", "arranges", "stores"),
    ),
    "more": (
        (
            "{B} {v} {n} more {o} than {A}.", "{B} {v} {n} more than {A}.",
            "{A}'s friend {B} {v} {n} more {o} than {A}.", "{B} {v} {n} more {o} than {A} does.",
            "Compared with {A}, {B} {v} {n} more {o}.",
        ),
        ("has", "has", "owns", "keeps", "holds", "gets"),
    ),
    "fewer": (
        (
            "{B} {v} {n} fewer {o} than {A}.", "{B} {v} {n} fewer than {A}.",
            "{A}'s friend {B} {v} {n} fewer {o} than {A}.", "{B} {v} {n} less than {A}.",
            "Compared with {A}, {B} {v} {n} fewer {o}.",
        ),
        ("has", "has", "owns", "keeps", "holds", "gets"),
    ),
    "times": (
        (
            "{B} {v} {n} as many {o} as {A}.", "{B} {v} {n} as many as {A}.",
            "{A}'s friend {B} {v} {n} as many {o} as {A}.", "{B} {v} {n} as many {o} as {A} does.",
            "Compared with {A}, {B} {v} {n} as many {o}.",
        ),
        ("has", "has", "owns", "keeps", "holds", "gets"),
    ),
    "two": (
        (
            "{A} {v} {n} {o} and {B} {v} {k} {o}.", "{A} {v} {n} {o}. {B} {v} {k} {o}.",
            "{A} {v} {n} {o}, while {B} {v} {k}.", "While {A} {v} {n} {o}, {B} {v} {k} {o}.",
            "There are two people: {A} {v} {n} {o}, and {B} {v} {k} {o}.",
        ),
        ("has", "owns", "finds", "collects", "gets", "buys", "picks", "keeps", "holds"),
    ),
    "price": (
        (
            "{A} {v} {n} {o} for ${k} each.", "{A} {v} {n} {o} at ${k} each.",
            "{A} {v} {n} {o}. Each one costs ${k}.", "{A} {v} {n} {o} that cost ${k} each.",
            "At the store, {A} {v} {n} {o} for ${k} apiece.", "{A} {v} {n} {o}, each for ${k}.",
            "The price of the {o} is ${k} each, and {A} {v} {n} of them.",
        ),
        ("buys", "orders", "gets", "purchases", "picks out"),
    ),
    "price_more": (
        (
            "{P} also {v} {n} {o} for ${k} each.", "Then {p} {v} {n} {o} at ${k} each.",
            "{P} {v} {n} {o} too. Each one costs ${k}.", "{A} also {v} {n} {o}, each for ${k}.",
        ),
        ("buys", "orders", "gets", "purchases", "picks out"),
    ),
    "wage": (
        (
            "{A} {v} ${k} an hour and works for {n} hours.", "{A} {v} ${k} per day for {n} days.",
            "{A} {v} ${k} for each hour of work. {P} works {n} hours.",
            "For {n} weeks, {A} {v} ${k} every week.", "{A} {v} ${k} a day. {P} works {n} days.",
        ),
        ("earns", "makes", "gets", "is paid", "saves", "receives"),
    ),
    "money": (
        ("{A} {v} ${n}.", "{A} {v} ${n} in {h} wallet.", "At first, {A} {v} ${n}.",
         "{A} {v} ${n} in the bank.", "This week {A} {v} ${n}."),
        ("has", "has", "has", "owns", "starts with", "begins with", "keeps"),
    ),
    "earn": (
        ("{P} {v} ${n}.", "Then {p} {v} ${n} more.", "{A} {v} another ${n}.",
         "Later, {p} {v} ${n} more.", "On Friday, {A} {v} ${n}."),
        ("earns", "gets", "finds", "receives", "wins", "makes", "saves"),
    ),
    "spend": (
        ("{P} {v} ${n} on {o}.", "Then {p} {v} ${n} for {o}.", "{A} {v} ${n} for some {o}.",
         "Later, {p} {v} ${n} on {o}.", "On Friday, {A} {v} ${n} for {o}."),
        ("spends", "pays", "uses", "gives"),
    ),
    "cash": (
        ("{P} {v} with ${n}.", "{A} {v} the cashier with ${n}.", "At the desk, {p} {v} with ${n}.",
         "{P} {v} for them with ${n}."),
        ("pays", "checks out"),
    ),
}  # fmt: skip

# Questions; their (stem, ending) pairs are phrasings too.
QUESTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "now": (
        (
            "How many {o} does {A} have", "How many {o} does {p} have", "How many does {A} have",
            "What number of {o} does {A} have", "So how many {o} does {A} have",
        ),
        ("now?", "now?", "in the end?", "at the end?", "in total now?", "after that?", "in all?"),
    ),
    "left": (
        (
            "How many {o} does {A} have", "How many {o} does {p} have", "How many does {A} have",
            "What number of {o} does {A} have", "So how many {o} does {A} have",
        ),
        ("left?", "left?", "now?", "left over?", "in the end?", "remaining?"),
    ),
    "total": (
        (
            "How many {o} does {A} have", "How many {o} does {p} have", "How many {o} are there",
            "What number of {o} does {A} have", "How many {o} is that",
        ),
        ("in total?", "altogether?", "in all?", "overall?", "all together?"),
    ),
    "both": (
        (
            "How many {o} do they have", "How many {o} do {A} and {B} have",
            "How many do the two have", "How many {o} do both of them have",
        ),
        ("in total?", "altogether?", "together?", "in all?", "combined?"),
    ),
    "other": (
        ("How many {o} does {B} have", "How many does {B} have", "What number of {o} does {B} have",
         "So how many {o} does {B} have"),
        ("?", "?", "now?", "in total?"),
    ),
    "each": (
        ("How many {o} does each {s} get", "How many {o} does every {s} receive",
         "How many does each {s} get", "How many {o} will each {s} have"),
        ("?", "?", "in the end?", "then?"),
    ),
    "bags": (
        ("How many {C} does {p} need", "How many {C} does {A} fill", "How many {C} will {p} use",
         "How many {C} are there"),
        ("?", "?", "in total?", "in the end?"),
    ),
    "differ": (
        ("How many more {o} does {A} have than {B}", "How many more does {A} have than {B}",
         "By how many {o} does {A} beat {B}", "How many fewer {o} does {B} have than {A}"),
        ("?", "?", "now?"),
    ),
    "pay": (
        ("How much does {A} pay", "How much money does {p} spend", 
         "How many dollars does {A} spend", "How much does it cost {A}"),
        ("in total?", "altogether?", "in all?", "overall?"),
    ),
    "change": (
        ("How much change does {A} get", "How much money does {p} get back",
         "How many dollars does {A} get back", "How much change will {p} receive"),
        ("?", "?", "at the end?"),
    ),
    "wallet": (
        ("How much money does {A} have", "How many dollars does {p} have",
         "How much does {A} have"),
        ("now?", "now?", "in the end?", "in total?", "at the end?"),
    ),
    "earned": (
        ("How much money does {A} make", "How many dollars does {p} earn",
         "How much does {A} earn"),
        ("in total?", "altogether?", "in all?", "overall?"),
    ),
}  # fmt: skip
