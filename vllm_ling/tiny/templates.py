# SPDX-License-Identifier: Apache-2.0
"""The word problems that tiny-ling learns, as data: wording, number ranges and worked steps.

In a text `{n}` and `{m}` are two names, `{o}` and `{p}` two kinds of object, and any other `{x}` is a number.
A step contains one equation `[x=a*b]`, written out as e.g. `6*4=24`, whose result is the number x from then
on; the last result is the answer. `derived` numbers are computed from drawn ones, so that divisions come out
even.
"""

from dataclasses import dataclass, field

Range = tuple[int, int] | tuple[int, ...]


@dataclass(frozen=True)
class Template:
    """One kind of problem. `ranges`: (low, high) inclusive, or three or more values to draw from."""

    name: str
    questions: tuple[str, ...]
    steps: tuple[str, ...]
    ranges: dict[str, Range]
    derived: dict[str, str] = field(default_factory=dict)


TEMPLATES: tuple[Template, ...] = (
    Template(
        "boxes",
        (
            (
                "{n} has {a} boxes with {b} {o} in each box. {n} gives {c} {o} to {m}. "
                "How many {o} does {n} have left?"
            ),
            "There are {b} {o} in each of {n}'s {a} boxes. {m} takes {c} {o}. How many {o} are left?",
        ),
        ("{n} has [x=a*b] {o}.", "[y=x-c] {o} are left."),
        {"a": (2, 9), "b": (3, 20), "c": (2, 99)},
    ),
    Template(
        "change",
        (
            "{n} buys {a} {o} for {b} dollars each and pays with {t} dollars. How much change does {n} get?",
            (
                "A store sells {o} for {b} dollars each. {n} buys {a} of them and pays {t} dollars. "
                "How many dollars does {n} get back?"
            ),
        ),
        ("The {o} cost [x=a*b] dollars.", "The change is [y=t-x] dollars."),
        {"a": (2, 9), "b": (2, 25), "t": (20, 50, 100, 150, 200, 300, 500)},
    ),
    Template(
        "wages",
        (
            (
                "{n} earns {a} dollars an hour and works {b} hours a day. "
                "How many dollars does {n} earn in {c} days?"
            ),
            (
                "{n} works {b} hours a day for {c} days and earns {a} dollars an hour. "
                "How many dollars is that in total?"
            ),
        ),
        ("{n} earns [x=a*b] dollars a day.", "In {c} days that is [y=x*c] dollars."),
        {"a": (5, 12), "b": (2, 8), "c": (2, 6)},
    ),
    Template(
        "share",
        (
            (
                "{n} has {a} bags with {b} {o} each and shares them equally among {c} friends. "
                "How many {o} does each friend get?"
            ),
            (
                "{c} friends share {a} bags of {o} equally. Each bag has {b} {o}. "
                "How many {o} does each friend get?"
            ),
        ),
        ("There are [x=a*b] {o}.", "Each friend gets [y=x/c] {o}."),
        {"a": (2, 9), "b": (2, 16), "c": (2, 9)},
    ),
    Template(
        "more",
        (
            "{n} has {a} {o}. {m} has {b} more {o} than {n}. How many {o} do they have together?",
            "{m} has {b} more {o} than {n}, who has {a}. How many {o} do they have in total?",
        ),
        ("{m} has [x=a+b] {o}.", "Together they have [y=a+x] {o}."),
        {"a": (3, 250), "b": (2, 150)},
    ),
    Template(
        "times",
        (
            "{n} has {a} {o}. {m} has {b} times as many. How many {o} do they have together?",
            "{m} has {b} times as many {o} as {n}, and {n} has {a}. How many {o} is that in total?",
        ),
        ("{m} has [x=a*b] {o}.", "Together they have [y=a+x] {o}."),
        {"a": (3, 40), "b": (2, 9)},
    ),
    Template(
        "reading",
        (
            (
                "{n} reads {a} pages on Monday, {b} more than that on Tuesday and {c} pages on Wednesday. "
                "How many pages does {n} read in total?"
            ),
            (
                "On Monday {n} reads {a} pages, on Tuesday {b} more pages than on Monday, on Wednesday {c} "
                "pages. How many pages is that?"
            ),
        ),
        (
            "On Tuesday {n} reads [x=a+b] pages.",
            "In two days that is [y=a+x] pages.",
            "In total [z=y+c] pages.",
        ),
        {"a": (5, 150), "b": (2, 80), "c": (5, 150)},
    ),
    Template(
        "book",
        (
            (
                "A book has {t} pages. {n} reads {a} pages a day for {b} days and then {c} pages. "
                "How many pages are left?"
            ),
            (
                "{n} reads {a} pages of a book a day for {b} days, then {c} more. The book has {t} pages. "
                "How many pages are left?"
            ),
        ),
        ("In {b} days {n} reads [x=a*b] pages.", "Altogether [y=x+c] pages.", "[z=t-y] pages are left."),
        {"t": (90, 600), "a": (5, 25), "b": (2, 9), "c": (2, 60)},
    ),
    Template(
        "garden",
        (
            "{n} plants {a} rows of {b} roses and {c} rows of {d} tulips. How many flowers does {n} plant?",
            (
                "In {n}'s garden there are {a} rows with {b} roses each and {c} rows with {d} tulips each. "
                "How many flowers are there?"
            ),
        ),
        ("There are [x=a*b] roses.", "There are [y=c*d] tulips.", "In total [z=x+y] flowers."),
        {"a": (2, 9), "b": (3, 16), "c": (2, 9), "d": (3, 16)},
    ),
    Template(
        "bakery",
        (
            (
                "{n} bakes {a} trays of {b} cookies, eats {c} of them and sells the rest for {d} dollars "
                "each. How many dollars does {n} get?"
            ),
            (
                "{n} bakes {a} trays with {b} cookies each. {m} eats {c} cookies and {n} sells the others "
                "for {d} dollars each. How many dollars does {n} get?"
            ),
        ),
        ("{n} bakes [x=a*b] cookies.", "[y=x-c] cookies are sold.", "{n} gets [z=y*d] dollars."),
        {"a": (2, 6), "b": (4, 12), "c": (2, 20), "d": (2, 5)},
    ),
    Template(
        "bus",
        (
            (
                "A bus has {a} people. At the first stop {b} people get on and {c} get off. "
                "At the next stop {d} get on. How many people are on the bus?"
            ),
            (
                "{a} people are on a train. First {b} people get on, then {c} get off, then {d} get on. "
                "How many people are on the train now?"
            ),
        ),
        (
            "First there are [x=a+b] people.",
            "Then there are [y=x-c] people.",
            "Now there are [z=y+d] people.",
        ),
        {"a": (5, 200), "b": (2, 60), "c": (2, 90), "d": (2, 60)},
    ),
    Template(
        "savings",
        (
            (
                "{n} has {a} dollars and saves {b} dollars a week for {c} weeks. Then {n} buys a bike "
                "for {d} dollars. How many dollars are left?"
            ),
            (
                "{n} saves {b} dollars a week for {c} weeks and already has {a} dollars. "
                "{n} spends {d} dollars on a game. How many dollars does {n} have left?"
            ),
        ),
        ("{n} saves [x=b*c] dollars.", "{n} then has [y=a+x] dollars.", "[z=y-d] dollars are left."),
        {"a": (5, 200), "b": (3, 20), "c": (2, 9), "d": (10, 300)},
    ),
    Template(
        "half",
        (
            (
                "{n} has {t} {o}. {n} gives half of them to {m} and then buys {c} {o}. "
                "How many {o} does {n} have now?"
            ),
            "Half of {n}'s {t} {o} go to {m}. Then {n} finds {c} {o}. How many {o} does {n} have now?",
        ),
        ("{n} keeps [x=t/2] {o}.", "Now {n} has [y=x+c] {o}."),
        {"h": (3, 150), "c": (2, 120)},
        {"t": "h*2"},
    ),
    Template(
        "teams",
        (
            "There are {a} boys and {s} girls in a club. They make teams of {c}. How many teams are there?",
            "A club with {a} boys and {s} girls makes teams of {c} children. How many teams are there?",
        ),
        ("There are [x=a+s] children.", "They make [y=x/c] teams."),
        {"c": (2, 9), "k": (4, 25), "a": (3, 90)},
        {"u": "c*k", "s": "u-a"},
    ),
    Template(
        "compare",
        (
            (
                "{n} picks {a} {o} a day for {b} days. {m} picks {c} {o} a day for {d} days. "
                "How many more {o} does {n} pick than {m}?"
            ),
            (
                "For {b} days {n} picks {a} {o} a day. For {d} days {m} picks {c} {o} a day. "
                "How many more {o} does {n} pick?"
            ),
        ),
        ("{n} picks [x=a*b] {o}.", "{m} picks [y=c*d] {o}.", "The difference is [z=x-y] {o}."),
        {"a": (4, 25), "b": (2, 9), "c": (2, 16), "d": (2, 9)},
    ),
    Template(
        "market",
        (
            (
                "{n} sells {a} {o} for {b} dollars each and {c} {p} for {d} dollars each. "
                "Then {n} spends {e} dollars on lunch. How many dollars are left?"
            ),
            (
                "At the market {n} sells {a} {o} at {b} dollars and {c} {p} at {d} dollars each, "
                "and spends {e} dollars. How many dollars does {n} have left?"
            ),
        ),
        (
            "The {o} bring [x=a*b] dollars.",
            "The {p} bring [y=c*d] dollars.",
            "Together [z=x+y] dollars.",
            "[w=z-e] dollars are left.",
        ),
        {"a": (2, 9), "b": (2, 20), "c": (2, 9), "d": (2, 20), "e": (3, 60)},
    ),
    Template(
        "tickets",
        (
            (
                "A show costs {b} dollars for adults and {d} dollars for children. {n} pays for {a} "
                "adults and {c} children with {t} dollars. How much change does {n} get?"
            ),
            (
                "{n} buys {a} adult tickets for {b} dollars each and {c} child tickets for {d} dollars each. "
                "{n} pays {t} dollars. How many dollars does {n} get back?"
            ),
        ),
        (
            "Adults cost [x=a*b] dollars.",
            "Children cost [y=c*d] dollars.",
            "In total [z=x+y] dollars.",
            "The change is [w=t-z] dollars.",
        ),
        {"a": (2, 9), "b": (6, 20), "c": (2, 9), "d": (2, 12), "t": (100, 150, 200, 250, 300, 400, 500)},
    ),
    Template(
        "packs",
        (
            "{n} needs {s} {o} and has {a} already. A pack holds {b} {o}. How many packs must {n} buy?",
            "{n} has {a} {o} but needs {s}. {o} come in packs of {b}. How many packs does {n} need?",
        ),
        ("{n} needs [x=s-a] more {o}.", "That is [y=x/b] packs."),
        {"a": (3, 120), "b": (2, 9), "k": (3, 25)},
        {"u": "b*k", "s": "a+u"},
    ),
    Template(
        "trip",
        (
            (
                "{n} drives {a} miles an hour for {b} hours and {c} miles an hour for {d} hours. "
                "The trip is {t} miles long. How many miles are left?"
            ),
            (
                "A trip is {t} miles long. {n} drives for {b} hours at {a} miles an hour and for {d} hours "
                "at {c} miles an hour. How many miles are left?"
            ),
        ),
        (
            "First {n} drives [x=a*b] miles.",
            "Then {n} drives [y=c*d] miles.",
            "That is [z=x+y] miles.",
            "[w=t-z] miles are left.",
        ),
        {
            "a": (20, 30, 40, 50, 60),
            "b": (2, 6),
            "c": (20, 30, 40, 50, 60),
            "d": (2, 6),
            "t": (150, 950),
        },
    ),
    Template(
        "collect",
        (
            (
                "{n} has {a} {o}, {m} has {s}. They find {b} more and share all {o} equally in {c} boxes. "
                "How many {o} are in each box?"
            ),
            (
                "{n} and {m} have {a} and {s} {o}. They get {b} more and put all {o} equally into {c} boxes. "
                "How many {o} are in each box?"
            ),
        ),
        ("They have [x=a+s] {o}.", "With the others [y=x+b] {o}.", "Each box has [z=y/c] {o}."),
        {"a": (5, 60), "b": (2, 60), "c": (2, 9), "k": (6, 25)},
        {"u": "c*k", "v": "u-a", "s": "v-b"},
    ),
)

NAMES: tuple[str, ...] = (
    "Ada", "Ben", "Cara", "Dan", "Ella", "Finn", "Gina", "Hugo", "Ivy", "Jack", "Kim", "Leo", "Mia", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Umar", "Vera", "Will", "Yuki", "Zoe",
)  # fmt: skip
OBJECTS: tuple[str, ...] = (
    "apples", "balls", "beads", "books", "buttons", "cards", "coins", "cups", "dolls", "eggs", "kites",
    "lemons", "marbles", "muffins", "nuts", "oranges", "peaches", "pears", "pencils", "plums", "shells",
    "stamps", "stickers", "toys",
)  # fmt: skip
