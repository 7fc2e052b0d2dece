"""Files and batches of OpenAI's API: JSONL in, answers in the valleys of the load, JSONL out."""
