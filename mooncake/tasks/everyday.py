"""Tools that many users have, with requests that name neither verb nor noun. Data.

A tool has a verb and a noun, a description, possible parameters, and requests. In requests, "{v}"
and "{w}" stand for the first and the second argument.
"""

from __future__ import annotations

EVERYDAY: tuple[tuple[str, str, str, tuple[tuple[str, ...], ...], tuple[str, ...]], ...] = (
    ("get", "time", "get the current time", ((), ("city",), ("timezone",)),
     ("what time is it", "what's the time", "how late is it", "current time", "time",
      "tell me the time", "do you know what time it is", "what time is it in {v}", "time in {v}",
      "how late is it in {v}")),
    ("get", "date", "get the date of today", ((),),
     ("what day is it", "what is the date", "which day is today", "what's the date today",
      "today?")),
    ("calculate", "sum", "calculate an expression", (("expression",), ("formula",)),
     ("what is {v}", "how much is {v}", "calculate {v}", "compute {v}", "{v}", "what's {v}",
      "{v} = ?", "solve {v}", "please work out {v}")),
    ("get", "forecast", "get the weather", (("city",), ("location",), ("place",)),
     ("what is the weather in {v}", "how is the weather in {v}", "weather in {v}",
      "is it raining in {v}", "what's the weather like in {v}", "will it rain in {v}",
      "how warm is it in {v}", "is it cold in {v}")),
    ("list", "files", "list the files of a folder", ((), ("folder",), ("path",), ("directory",)),
     ("which files are there", "what files do you see", "which files are in {v}", "list files",
      "show the files in {v}", "what is in {v}", "what is in the folder {v}", "ls {v}",
      "list the folder {v}")),
    ("read", "file", "read a file", (("path",), ("file",), ("filename",)),
     ("what does {v} say", "show me {v}", "open {v}", "read {v}", "what is written in {v}",
      "cat {v}", "print {v}", "show the content of {v}", "what stands in {v}")),
    ("get", "cluster", "get the status of the cluster", ((),),
     ("how is the cluster", "which workers are there now", "how many workers are running",
      "is the cluster healthy", "cluster status", "status of the cluster", "is everything running",
      "what is the state of the cluster")),
    ("send", "mail", "send a mail", (("to", "subject"), ("recipient", "subject"), ("to", "text")),
     ("mail {v} about {w}", "write {v} a mail about {w}", "send {v} a mail: {w}",
      "send a mail to {v} with subject {w}", "tell {v}: {w}", "let {v} know {w}",
      "write to {v}: {w}")),
    ("set", "alarm", "set an alarm", (("time",), ("at",)),
     ("wake me at {v}", "alarm at {v}", "remind me at {v}")),
    ("set", "timer", "set a timer", (("minutes",),),
     ("remind me in {v} minutes", "timer for {v} minutes", "in {v} minutes", "timer {v} minutes")),
    ("search", "web", "search the web", (("query",), ("q",)),
     ("google {v}", "look for {v}", "find out about {v}", "search for {v}",
      "search {v} on the web", "what can you find about {v}")),
)  # fmt: skip
