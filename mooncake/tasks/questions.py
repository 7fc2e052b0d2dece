"""Questions about the project in many wordings, small talk, and what the model cannot know.

The model knows answers by heart, but not questions: some of the wordings are held out.
"""

from __future__ import annotations

import re
from random import Random

from mooncake.tasks.facts import FACTS, NOT_KNOWN, UNKNOWN
from mooncake.tasks.sample import Sample, assistant, user
from mooncake.tasks.values import city, integer, name, word

_OF_A_THING = (
    "What is {x}?", "Explain {x}.", "Can you explain {x}?", "Tell me about {x}.", "{x}?",
    "Describe {x}.", "What do you know about {x}?", "I do not understand {x}.", "Define {x}.",
    "Could you tell me what {x} is?", "I'd like to know what {x} is.", "What exactly is {x}?",
    "Please explain {x} to me.", "What is meant by {x}?", "What does {x} mean?", "whats {x}",
    "Explain {x} in one sentence.", "Tell me what {x} is.", "What is {x} for?", "Why {x}?",
    "I have a question about {x}.", "Give me a short explanation of {x}.", "What does {x} do?",
    "Do you know what {x} is?", "How would you explain {x}?", "I read about {x}. What is it?",
    "Can you describe {x} briefly?", "What's {x}?", "What is the purpose of {x}?",
    "How does {x} work?",
    "In this project, what is {x}?", "In Mooncake, what is {x}?", "What is {x} in Mooncake?",
    "What role has {x}?", "Why is there {x}?", "What should I know about {x}?", "Is there {x}?",
    "help me understand {x}", "Say something about {x}.", "So what is {x} then?",
)  # fmt: skip
_OF_A_QUESTION = (
    "{q}", "{q}", "{q}", "Tell me: {q}", "I want to know: {q}", "Quick question: {q}",
    "{q} Please.",
    "Can you tell me this? {q}", "I wonder: {q}", "One more question: {q}", "Hi, {q}", "Hello! {q}",
    "Please tell me: {q}", "And {q}", "So, {q}", "Ok, {q}", "Question: {q}", "I am new here. {q}",
    "My question is: {q}", "Excuse me, {q}", "Thanks. {q}", "Sorry, {q}", "{q} Thanks!",
)  # fmt: skip
_NAMED = re.compile(r"(?:What is|Explain|What are) (?:a |an )?(.+?)[?.]$")


def question(random: Random) -> Sample:
    """Return a question about the project, small talk, or something that the model cannot know."""
    if random.random() < 0.2:
        return _unknown(random)
    asked, answer = random.choice(FACTS)
    text = random.choice(asked)
    named = [found[1] for one in asked if (found := _NAMED.match(one))]
    if named and random.random() < 0.6:
        thing = random.choice(named)
        if thing.split()[0] not in ("this", "it", "up"):
            text = random.choice(_OF_A_THING).format(x=thing)
    text = random.choice(_OF_A_QUESTION).format(q=text)
    return Sample(
        "question", [user(typed(text, random))], assistant(answer), contents=(_asked(text),)
    )


def _unknown(random: Random) -> Sample:
    """Return a question about what nobody told the model; the answer says so."""
    if random.random() < 0.1:
        text = " ".join(word(random) for _ in range(random.randint(3, 6)))
    else:
        text = random.choice(UNKNOWN).format(
            thing=word(random), city=city(random), name=name(random), animal=word(random),
            person=word(random),
        )  # fmt: skip
    if random.random() < 0.1:
        by = random.choice(("*", "times", "/"))
        text = f"What is {integer(random, 3)} {by} {integer(random, 3)}?"
    return Sample(
        "question", [user(typed(text, random))], assistant(NOT_KNOWN), contents=(_asked(text),)
    )


def _asked(text: str) -> str:
    """Return a question without the parts that a hurried user leaves out."""
    return " ".join(re.findall(r"\w+", text.lower()))


def typed(text: str, random: Random) -> str:
    """Return the text, now and then as a user in a hurry types it."""
    kind = random.random()
    if kind < 0.15:
        return text.lower()
    if kind < 0.25:
        return text.rstrip("?.")
    if kind < 0.3:
        return text.rstrip("?.") + "!"
    return text.lower().rstrip("?.") if kind < 0.4 else text


def system(random: Random) -> str:
    """Return a possible system message of a client. No answer depends on it."""
    who = random.choice(
        (
            "a helpful assistant",
            "the demo model of Mooncake",
            f"an assistant called {name(random)}",
            f"a friendly {word(random)}",
            "an assistant with tools",
            "a helper",
        )
    )
    tail = random.choice(
        (
            "",
            "",
            " Answer briefly.",
            " Be polite.",
            " Use tools where they help.",
            f" The user lives in {city(random)}.",
            " Think before you answer.",
        )
    )
    return f"You are {who}.{tail}"
