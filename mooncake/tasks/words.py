"""The words of generated tasks, as data, and sentences without useful content."""

from __future__ import annotations

from random import Random

NAMES = [
    "Ada", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo",
    "Mia", "Nora", "Omar", "Paul", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Yuri", "Zoe",
    "Anna", "Bob", "Clara", "Dan", "Eve", "Fred", "Grace", "Henry", "Ida", "John", "Lena", "Max",
    "Nina", "Oscar", "Peter", "Ruth",
]  # fmt: skip
CITIES = [
    "Rome", "Paris", "London", "Berlin", "Madrid", "Oslo", "Vienna", "Prague", "Tokyo", "Delhi",
    "Cairo", "Lima", "Boston", "Chicago", "Shanghai", "Beijing", "Sydney", "Dublin", "Athens",
    "Warsaw", "Lisbon", "Zurich", "Milan", "Seoul", "Toronto", "Denver", "Austin", "Geneva",
    "Porto", "Kyoto",
]  # fmt: skip
FRUITS = [
    "apple", "pear", "plum", "fig", "grape", "lemon", "mango", "peach", "cherry", "banana",
    "melon", "kiwi", "orange", "berry", "date", "lime",
]  # fmt: skip
COLORS = [
    "red", "blue", "green", "yellow", "black", "white", "brown", "purple", "gray", "pink",
    "orange", "silver",
]  # fmt: skip
THINGS = [
    "boat", "lamp", "chair", "table", "book", "clock", "bridge", "wheel", "stone", "river",
    "garden", "window", "letter", "bottle", "ladder", "basket", "hammer", "candle", "mirror",
    "pillow", "bicycle", "guitar", "kettle", "rocket", "castle", "forest", "island", "market",
    "engine", "barrel",
]  # fmt: skip
ANIMALS = [
    "cat", "dog", "horse", "bird", "fish", "mouse", "rabbit", "tiger", "sheep", "goat", "duck",
    "frog", "wolf", "bear", "fox", "bee",
]  # fmt: skip
PEOPLE = [
    "cook", "baker", "farmer", "sailor", "teacher", "doctor", "painter", "driver", "singer",
    "king", "queen", "pilot",
]  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
JOBS = [
    "cook", "baker", "farmer", "teacher", "doctor", "painter", "driver", "singer", "pilot",
    "writer", "nurse", "lawyer",
]  # fmt: skip
NOUNS = [
    "account", "alarm", "album", "answer", "article", "backup", "balance", "battery", "bill",
    "box", "branch", "bus", "button", "cable", "calendar", "call", "camera", "car", "card", "cart",
    "case", "channel", "chart", "client", "cloud", "coffee", "color", "comment", "contact", "copy",
    "course", "coupon", "cup", "data", "device", "dinner", "document", "door", "draft", "email",
    "event", "family", "fan", "field", "file", "film", "flight", "folder", "form", "game", "gate",
    "gift", "group", "guest", "heater", "hotel", "house", "image", "invoice", "item", "job", "key",
    "label", "light", "line", "link", "list", "lock", "log", "lunch", "machine", "mail", "map",
    "meal", "meeting", "member", "memo", "menu", "message", "meter", "model", "money", "movie",
    "music", "network", "news", "note", "offer", "office", "order", "package", "page", "paper",
    "parcel", "park", "part", "party", "password", "payment", "phone", "photo", "picture", "plan",
    "plant", "player", "playlist", "post", "price", "printer", "product", "profile", "project",
    "pump", "query", "question", "queue", "rate", "recipe", "record", "reminder", "report",
    "request", "result", "review", "ride", "robot", "room", "route", "rule", "sample", "schedule",
    "score", "screen", "seat", "sensor", "server", "service", "session", "shelf", "shop", "signal",
    "song", "sound", "speaker", "station", "status", "stock", "store", "story", "street", "switch",
    "tank", "task", "taxi", "team", "test", "ticket", "timer", "token", "tool", "track", "train",
    "trip", "truck", "user", "valve", "video", "visit", "volume", "wall", "watch", "water",
    "weather", "website", "workspace",
]  # fmt: skip


def sentence(random: Random) -> str:
    """Return a sentence without useful content."""
    kind = random.randrange(4)
    thing, color = random.choice(THINGS), random.choice(COLORS)
    if kind == 0:
        return f"The {random.choice(PEOPLE)} saw a {color} {thing}."
    if kind == 1:
        return f"A {random.choice(ANIMALS)} sat near the {thing}."
    if kind == 2:
        return f"The {thing} is {color}."
    return f"{random.choice(NAMES)} went to {random.choice(CITIES)} on {random.choice(DAYS)}."
