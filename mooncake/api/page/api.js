// Talks to the server this page came from, with the key from the settings; nothing goes elsewhere.

const KEY = "mooncake-key";

/** Return the API key of this tab. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Remember the key until this tab is closed. */
export function keepKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // then it has to be typed again after a reload
  }
}

/** An answer other than 2xx; `message` is the server's own. */
export class Refused extends Error {
  constructor(status, message, retryAfter) {
    const later = retryAfter ? ` Try again in ${retryAfter} s.` : "";
    super(`${message}${later}`);
    this.status = status;
  }
}

async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = apiKey().trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (reply.ok) return reply;
  let message = `The server answered ${reply.status}.`;
  try {
    message = (await reply.json()).error.message || message;
  } catch {
    // not one of our own errors
  }
  throw new Refused(reply.status, message, reply.headers.get("Retry-After"));
}

/** Return the JSON document at `path`. */
export async function getJson(path, signal) {
  return (await ask(path, { signal })).json();
}

/** Yield the data of each server-sent event of `path` as a parsed value, until [DONE] or the end. `opened` gets the headers before. */
export async function* events(path, { body, signal, opened = () => {} } = {}) {
  const reply = await ask(path, { body, signal });
  opened(reply.headers);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (pending + value).split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:"));
      if (data.length === 0) continue;
      const text = data.map((line) => line.slice(5).trimStart()).join("\n");
      if (text === "[DONE]") return;
      yield JSON.parse(text);
    }
  }
}
