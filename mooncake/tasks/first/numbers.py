"""Sums and differences with the steps written out, sorting and counting."""

from __future__ import annotations

from random import Random

from mooncake.tasks.first.draws import number, word
from mooncake.tasks.sample import Sample, assistant, user
from mooncake.tasks.words import FRUITS

_SUMS = (
    "What is {a} + {b}?", "{a} + {b} = ?", "Add {a} and {b}.", "How much is {a} + {b}?", "{a}+{b}",
    "What is {a} plus {b}?", "Compute {a} + {b}.", "What is the sum of {a} and {b}?", "{a} + {b}",
)  # fmt: skip
_DIFFERENCES = (
    "What is {a} - {b}?", "{a} - {b} = ?", "How much is {a} - {b}?", "{a}-{b}",
    "What is {a} minus {b}?", "Compute {a} - {b}.", "{a} - {b}",
)  # fmt: skip
_SORTS = (
    "Sort these numbers: {items}", "Sort: {items}", "Put these numbers in order: {items}",
    "Sort the numbers {items} from small to large.",
)  # fmt: skip
_COUNTS = (
    "How many times is {item} in this list: {items}?", "Count {item} in: {items}",
    "How often does {item} appear: {items}?",
)  # fmt: skip


def addition(random: Random) -> Sample:
    """Return a sum of two numbers of two or three digits, sometimes of one."""
    a, b = _pair(random)
    text = random.choice(_SUMS).format(a=a, b=b)
    return Sample(
        "addition", [user(text)], assistant(str(a + b), _carried(a, b)), f"addition {a} {b}"
    )


def subtraction(random: Random) -> Sample:
    """Return a difference that is not negative."""
    b, a = sorted(_pair(random))
    text = random.choice(_DIFFERENCES).format(a=a, b=b)
    return Sample(
        "subtraction", [user(text)], assistant(str(a - b), _borrowed(a, b)), f"subtraction {a} {b}"
    )


def sorting(random: Random) -> Sample:
    """Return three to seven numbers to be sorted."""
    numbers = random.sample(range(100), random.randint(3, 7))
    items = ", ".join(map(str, numbers))
    text = random.choice(_SORTS).format(items=items)
    right = ", ".join(map(str, sorted(numbers)))
    return Sample("sorting", [user(text)], assistant(right), f"sorting {items}")


def counting(random: Random) -> Sample:
    """Return a list of words in which one is to be counted, with each find written out."""
    item = random.choice(FRUITS) if random.random() < 0.7 else word(random)
    others = [
        other for other in (word(random) for _ in range(random.randint(1, 4))) if other != item
    ]
    times = random.randint(0 if others else 1, 6)
    words = [item] * times + [random.choice(others) for _ in range(random.randint(1, 8)) if others]
    random.shuffle(words)
    text = random.choice(_COUNTS).format(item=item, items=" ".join(words))
    seen, thoughts = 0, []
    for found in words:
        seen += found == item
        thoughts.append(f"{found} {seen}")
    return Sample(
        "counting", [user(text)], assistant(str(times), ", ".join(thoughts)), f"counting {text}"
    )


def _pair(random: Random) -> tuple[int, int]:
    if random.random() < 0.1:
        return number(random), number(random)
    low_a, low_b = random.choice((10, 100)), random.choice((10, 100))
    return random.randrange(low_a, low_a * 10), random.randrange(low_b, low_b * 10)


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    width = max(len(str(a)), len(str(b)))
    return [(a // 10**place % 10, b // 10**place % 10) for place in range(width)]


def _carried(a: int, b: int) -> str:
    """Return the sum column by column from the right: "7+5=12,4+8+1=13,0+3+1=4"."""
    steps, carry = [], 0
    for one, other in _columns(a, b):
        total = one + other + carry
        steps.append(f"{one}+{other}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"{a}+{b}:" + ",".join(steps)


def _borrowed(a: int, b: int) -> str:
    """Return the difference column by column from the right: "12-7=5,4-1-3=0"."""
    steps, borrow = [], 0
    for one, other in _columns(a, b):
        short = one - borrow < other
        top = one + 10 if short else one
        steps.append(f"{top}{'-1' if borrow else ''}-{other}={top - borrow - other}")
        borrow = int(short)
    return f"{a}-{b}:" + ",".join(steps)
