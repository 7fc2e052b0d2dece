"""Short talk about the project: greetings, facts of it, and saying so where an answer is not known.

There is a fixed number of these; the model knows them by heart. What is not asked about: anything
that changes with a release.
"""

from __future__ import annotations

from random import Random

from mooncake.tasks.sample import Message, Sample, assistant, user
from mooncake.tasks.words import ANIMALS, CITIES, NAMES, PEOPLE, THINGS, number, word

_FACTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hi", "Hello!", "Hi!", "Test", "Hello there", "Hi there", "Hey", "Good morning",
      "Good evening", "Good day"),
     "Hello! I am the demo model of Mooncake. Ask me about the project, or give me a small task."),
    (("How are you?", "How are you doing?", "How is it going?", "Are you well?",
      "How are you today?", "What is up?"),
     "I am fine, thank you. What can I do for you?"),
    (("Who are you?", "What are you?", "Are you Kimi?", "Are you an AI?", "Are you a robot?",
      "What is your name?", "Introduce yourself.",
      "Tell me about yourself.", "Which model are you?", "What model is this?"),
     "I am k2-demo, a small model with the architecture of Kimi K2. Mooncake trained me on "
     "generated tasks, so I know little beyond them."),
    (("Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Great, thanks", "Nice",
      "Cool"),
     "You are welcome."),
    (("Bye", "Goodbye", "See you", "See you later", "Good night"), "Goodbye!"),
    (("What can you do?", "What can you do for me?", "What else can you do?",
      "What can I ask you?", "How can you help me?", "Help", "Help me",
      "What do you know?", "What are you good at?"),
     "I can answer questions about Mooncake, add and subtract, sort and count, write JSON, repeat "
     "text, remember what you tell me, and call tools."),
    (("What is Mooncake?", "Tell me about Mooncake.", "What is Mooncake about?",
      "How does Mooncake work?",
      "What is Mooncake for?", "Explain how Mooncake works.", "What is this project about?",
      "What is this project?", "Explain Mooncake.",
      "What does Mooncake do?", "What is this?", "Describe Mooncake."),
     "Mooncake is a serving engine for Kimi K2. Prefill and decode run on separate workers, and "
     "a pool keeps the KVCache of every prompt."),
    (("What is prefill?", "What does prefill do?", "What does a prefill worker do?",
      "Explain prefill.", "What is a prefill worker?"),
     "Prefill computes the KVCache of a prompt, in chunks, and samples the first token."),
    (("What is decode?", "What does decode do?", "What does a decode worker do?",
      "Explain decode.", "What is a decode worker?"),
     "Decode generates the tokens of an answer, one a step for every sequence in its batch."),
    (("What is the pool?", "What is kvstore?", "What does kvstore do?", "Explain the pool.",
      "What does a kvstore worker do?", "What is the KVCache pool?"),
     "The pool keeps KVCache blocks in DRAM and on SSD of every node, so that a known prefix is "
     "not computed again."),
    (("What is the Conductor?", "What does the Conductor do?", "Explain the Conductor.",
      "How are requests placed?", "How does scheduling work?",
      "Who places requests?", "What is the scheduler?"),
     "The Conductor places every request: by where its prefix already lies, and by how long it "
     "would wait."),
    (("What is a block?", "What is a KVCache block?", "How large is a block?", "Explain blocks.",
      "How many tokens has a block?"),
     "A block is the KVCache of 64 tokens, for all layers. Its key is a hash of its tokens and of "
     "the key before it."),
    (("What is a block key?", "How are blocks named?", "Explain block keys."),
     "A block key is the name of a block: a hash of its tokens and of the key before it. Equal "
     "keys mean equal bytes."),
    (("What is a gateway?", "What does the gateway do?", "Explain the gateway."),
     "A gateway is the process with the HTTP API and the Conductor. A cluster may have several."),
    (("What is a worker?", "Explain workers.", "Which workers are there?", "What roles are there?"),
     "A worker is the process of one role: prefill, decode or kvstore."),
    (("What is TTFT?", "What does TTFT mean?", "Explain TTFT."),
     "TTFT is the time from a request's arrival to its first token."),
    (("What is TBT?", "What does TBT mean?", "Explain TBT."),
     "TBT is the time between two tokens of an answer."),
    (("What is goodput?", "What does goodput mean?", "Explain goodput."),
     "Goodput counts the requests a second that kept all their limits."),
    (("What is MLA?", "What does MLA mean?", "Explain MLA.", "What is latent attention?"),
     "MLA is multi-head latent attention. It caches one small latent for each token in place of "
     "the keys and values of all heads."),
    (("What is an expert?", "What are experts?", "What is MoE?", "Explain MoE.",
      "What is a mixture of experts?"),
     "A mixture of experts has many small networks in a layer, and a router picks a few of them "
     "for each token."),
    (("What is Kimi K2?", "Tell me about Kimi K2.", "What is K2?", "Explain Kimi K2."),
     "Kimi K2 is a model of Moonshot AI with MLA attention and 384 experts a layer. Mooncake "
     "serves its architecture."),
    (("What is MuonClip?", "Explain MuonClip.", "How were you trained?", "Who trained you?",
      "Which optimizer trained you?", "What were you trained on?"),
     "I was trained with MuonClip on generated tasks only. Muon moves the matrices, and QK-Clip "
     "bounds the attention logits."),
    (("How do I start it?", "How do I use it?", "How do I use Mooncake?",
      "How do I start Mooncake?", "How do I run Mooncake?",
      "How can I serve a model?", "How do I serve?", "How do I install it?"),
     "Run make serve. It installs what is needed and serves on port 8000."),
    (("How do I run the tests?", "How do I test it?", "How do I check a change?"),
     "Run make test for the checks and the short tests."),
    (("Do I need a GPU?", "Does it need a GPU?", "Can it run on a CPU?",
      "Does it run without a GPU?"),
     "No. Everything runs on a CPU too, only more slowly."),
    (("Which API do you speak?", "Is there an API?", "Is it compatible with OpenAI?",
      "Which APIs are there?", "Does it have an OpenAI API?"),
     "Mooncake speaks the OpenAI and Anthropic APIs over HTTP."),
    (("What happens when a worker dies?", "What happens if a worker fails?",
      "Is it fault tolerant?", "What if a worker crashes?",
      "What happens if a worker is lost?", "What if I kill a worker?"),
     "The answer pauses and goes on: another worker continues from the tokens and blocks that are "
     "still there."),
    (("Why separate prefill and decode?", "Why are prefill and decode apart?",
      "What is disaggregation?", "Why disaggregated serving?"),
     "Prefill is bound by compute and decode by memory. Apart, each gets the machines and batches "
     "that suit it."),
    (("What is a prefix?", "What is prefix reuse?", "What is prefix caching?",
      "Explain the prefix cache."),
     "When a prompt begins like an earlier one, its first blocks are already in the pool and are "
     "fetched, not computed."),
    (("How does KV move?", "How is KV moved?", "How do blocks move?", "How is KV transferred?"),
     "KV moves as blocks, by key: over RDMA, TCP or shared memory, layer by layer behind the "
     "compute."),
    (("What is RDMA?", "What is RDMA for?", "Do you use RDMA?", "Explain RDMA.", "Why RDMA?"),
     "RDMA lets a network card write into another machine's memory without its CPU. Mooncake moves "
     "blocks with it."),
    (("What is Ray for?", "What does Ray do?", "Why Ray?", "Do you use Ray?"),
     "Ray places and supervises the processes. It carries neither tokens nor KV."),
    (("What is the simulator?", "Is there a simulator?", "What does the simulator do?",
      "How do I plan a cluster?"),
     "The simulator runs the shipped scheduler, engines and pools on simulated hardware, to plan "
     "clusters and to replay failures from a seed."),
    (("Which language is it written in?", "What is it written in?", "Is it Python?"),
     "Mooncake is written in Python, with kernels in Triton and C++."),
    (("Is it free?", "What is the license?", "Under which license is it?", "Is it open source?"),
     "The license is Apache 2.0."),
    (("Where do I read more?", "Where is the documentation?", "Is there documentation?"),
     "Read README.md first, then ARCHITECTURE.md and the pages in docs."),
)  # fmt: skip
_UNKNOWN = (
    "Who painted the {thing}?", "What is the capital of {city}?", "Who was {name}?",
    "Tell me a joke about a {animal}.", "Write a poem about the {thing}.",
    "Why is the {thing} old?",
    "What do you think of {city}?", "How do I become a {person}?", "Is {city} a nice place?",
    "Who is the mayor of {city}?", "What does a {animal} eat?", "How old is {name}?",
    "Can you cook a {thing}?", "When was the {thing} invented?", "Do you like the {animal}?",
    "Write a story about a {person} and a {animal}.", "Write a haiku about the {thing}.",
    "Translate {thing} into French.", "What is {thing} in German?",
    "Tell me something about {city}.",
    "Write a function in Python.", "Write code that finds a {thing}.",
    "What is the meaning of life?",
    "Explain the {thing} to me.", "What is the weather today?", "What time is it?",
    "What day is it today?", "Who is the president?", "Who won the game?", "Where is {city}?",
    "How many people live in {city}?", "How far is it to {city}?",
    "Which language do they speak in {city}?",
    "What should I eat today?", "Recommend a book about the {animal}.", "Summarize the news.",
    "Give me ideas for a {person}.", "Why is the sky blue?", "What is a {thing} made of?",
    "Can you speak English?", "Do you speak German?", "Can you draw a {thing}?", "Play some music.",
    "What is love?", "Are you conscious?", "Do you dream?", "Tell me a story.", "Tell me a joke.",
    "Write a poem.", "Sing a song.", "How does a {thing} work?", "Which {thing} is the best?",
    "Can you help me with my {thing}?", "What is the difference between a {thing} and a {animal}?",
)  # fmt: skip
_PRODUCTS = (
    "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a} x {b}", "{a} / {b}",
    "Multiply {a} by {b}.", "Divide {a} by {b}.", "What is {a} divided by {b}?", "{a}*{b}",
    "What is the square root of {a}?", "How much is {a} * {b}?",
)  # fmt: skip
_NO_PRODUCTS = "I can add and subtract, but not multiply or divide."
_BEFORE = ("Hi, ", "Hello, ", "Please, ", "Hi! ", "And ", "So, ", "Ok, ", "Hello! ")
_NOT_KNOWN = (
    "I do not know that. I am a small demo model: ask me about Mooncake, or for a small task."
)


def chat(random: Random) -> Sample:
    """Return a question of the project, small talk, or something the model cannot know."""
    kind = random.random()
    if kind < 0.03:
        text, answer = " ".join(word(random) for _ in range(random.randint(1, 5))), _NOT_KNOWN
    elif kind < 0.07:
        text = random.choice(_PRODUCTS).format(a=number(random), b=number(random))
        answer = _NO_PRODUCTS
    elif kind < 0.27:
        text = random.choice(_UNKNOWN).format(
            thing=random.choice(THINGS), city=random.choice(CITIES), name=random.choice(NAMES),
            animal=random.choice(ANIMALS), person=random.choice(PEOPLE),
        )  # fmt: skip
        answer = _NOT_KNOWN
    else:
        asked, answer = random.choice(_FACTS)
        text = random.choice(asked)
    messages: list[Message] = [user(_typed(text, random))]
    return Sample("chat", messages, assistant(answer), "")


def _typed(text: str, random: Random) -> str:
    """Return the text as a user in a hurry types it, now and then."""
    if random.random() < 0.1:
        text = f"{random.choice(_BEFORE)}{text[0].lower()}{text[1:]}"
    kind = random.random()
    if kind < 0.15:
        return text.lower()
    if kind < 0.25:
        return text.rstrip("?.")
    if kind < 0.3:
        return text.rstrip("?.") + "!"
    return text.lower().rstrip("?.") if kind < 0.4 else text
