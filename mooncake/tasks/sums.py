"""Sums with the steps written out, column by column with carries; sorting and counting."""

from __future__ import annotations

from random import Random

from mooncake.tasks.sample import Sample, assistant, user
from mooncake.tasks.values import KNOWN, integer, word

_SUMS = (
    "What is {a} + {b}?", "{a} + {b} = ?", "Add {a} and {b}.", "How much is {a} + {b}?", "{a}+{b}",
    "What is {a} plus {b}?", "Compute {a} + {b}.", "What is the sum of {a} and {b}?", "{a} + {b}",
    "Please add {a} and {b}.", "{a} plus {b}", "Calculate {a} + {b}", "what's {a} + {b}?",
    "I have {a} and get {b} more. How many do I have?", "{a} + {b} is what?",
)  # fmt: skip
_DIFFERENCES = (
    "What is {a} - {b}?", "{a} - {b} = ?", "How much is {a} - {b}?", "{a}-{b}",
    "What is {a} minus {b}?", "Compute {a} - {b}.", "{a} - {b}", "Subtract {b} from {a}.",
    "{a} minus {b}", "I have {a} and give away {b}. How many are left?", "Calculate {a} - {b}",
    "What is the difference of {a} and {b}?",
)  # fmt: skip
_CHAINS = (
    "What is {all}?", "{all}", "{all} = ?", "Compute {all}.", "How much is {all}?",
    "Calculate {all}", "What's {all}?",
)  # fmt: skip
_SORTS = (
    "Sort these numbers: {items}", "Sort: {items}", "Put these numbers in order: {items}",
    "Sort the numbers {items} from small to large.", "Order these numbers: {items}",
    "Arrange from smallest to largest: {items}", "Can you sort {items}?",
)  # fmt: skip
_COUNTS = (
    "How many times is {item} in this list: {items}?", "Count {item} in: {items}",
    "How often does {item} appear: {items}?", "How many {item} are in: {items}",
    "How often is {item} in the list {items}?", "Count how often {item} occurs: {items}",
)  # fmt: skip
_OF_ONE_COLUMN = 20
"""Numbers below this are digits, or appear in a column after borrowing."""


def sum_of_two(random: Random) -> Sample:
    """Return a sum of two numbers of one to four digits, not both of one digit."""
    a, b = _pair(random)
    text = random.choice(_SUMS).format(a=a, b=b)
    answer = assistant(str(a + b), told(a, b, 1))
    return Sample("sum", [user(text)], answer, contents=_contents(a, b, 1))


def difference(random: Random) -> Sample:
    """Return a difference that is not negative."""
    b, a = sorted(_pair(random))
    text = random.choice(_DIFFERENCES).format(a=a, b=b)
    answer = assistant(str(a - b), told(a, b, -1))
    return Sample("difference", [user(text)], answer, contents=_contents(a, b, -1))


def chain(random: Random) -> Sample:
    """Return a sum of three to five numbers, some of them subtracted, with the steps written
    out.
    """
    total = integer(random, 3)
    said, steps = str(total), []
    contents: list[str] = []
    for _ in range(random.randint(2, 4)):
        other = integer(random, 3)
        sign = -1 if other <= total and random.random() < 0.4 else 1
        said += f" {'+' if sign > 0 else '-'} {other}"
        steps.append(told(total, other, sign))
        contents += _contents(total, other, sign)
        total += sign * other
    text = random.choice(_CHAINS).format(
        all=said if random.random() < 0.7 else said.replace(" ", "")
    )
    answer = assistant(str(total), " ".join(steps))
    return Sample("chain", [user(text)], answer, contents=(said, *contents))


def order(random: Random) -> Sample:
    """Return three to eight numbers to be sorted; the answer puts them in place one by one."""
    most = random.choice((10, 100, 100, 1000, 10000))
    numbers = [random.randrange(most) for _ in range(random.randint(3, 8))]
    items = ", ".join(map(str, numbers))
    text = random.choice(_SORTS).format(items=items)
    so_far = [sorted(numbers[:count]) for count in range(1, len(numbers) + 1)]
    thoughts = "; ".join(" ".join(map(str, some)) for some in so_far)
    right = ", ".join(map(str, so_far[-1]))
    return Sample("order", [user(text)], assistant(right, thoughts), contents=(items,))


def tally(random: Random) -> Sample:
    """Return a list of words in which one is to be counted, with each find written out."""
    item = word(random)
    others = [one for one in (word(random) for _ in range(random.randint(1, 4))) if one != item]
    others = others or [random.choice([one for one in KNOWN if one != item])]
    words = [item] * random.randint(0, 6)
    words += [random.choice(others) for _ in range(random.randint(1, 8))]
    random.shuffle(words)
    listed = random.choice((" ", ", ")).join(words)
    text = random.choice(_COUNTS).format(item=item, items=listed)
    seen, thoughts = 0, []
    for found in words:
        seen += found == item
        thoughts.append(f"{found} {seen}")
    answer = assistant(str(seen), ", ".join(thoughts))
    return Sample("tally", [user(text)], answer, contents=(listed,))


def told(a: int, b: int, sign: int) -> str:
    """Return `a + b` or `a - b` column by column from the right, and the result:
    "47+85:7+5=12,4+8+1=13;132".
    """
    width = max(len(str(a)), len(str(b)))
    columns = [(a // 10**place % 10, b // 10**place % 10) for place in range(width)]
    steps, carry = [], 0
    for one, other in columns:
        if sign > 0:
            total = one + other + carry
            steps.append(f"{one}+{other}{'+1' if carry else ''}={total}")
            carry = total // 10
        else:
            top = one + 10 if one - carry < other else one
            steps.append(f"{top}{'-1' if carry else ''}-{other}={top - carry - other}")
            carry = int(top > one)
    return f"{a}{'+' if sign > 0 else '-'}{b}:{','.join(steps)};{a + sign * b}"


def _pair(random: Random) -> tuple[int, int]:
    a, b = integer(random, 4), integer(random, 4)
    return (a, b) if max(a, b) >= _OF_ONE_COLUMN else _pair(random)


def _contents(a: int, b: int, sign: int) -> tuple[str, ...]:
    """Return what must not be trained on if the step is held out: a sum in both orders. A step of
    one column is part of other sums, so it cannot be held out.
    """
    if max(a, b) < _OF_ONE_COLUMN:
        return ()
    return (f"{a}+{b}", f"{b}+{a}") if sign > 0 else (f"{a}-{b}",)
