// One turn of the conversation on the page: what was said, thought and called. Owns its elements.

import { el, showText } from "./dom.js";
import { receiptFold } from "./receipt.js";
import { CallCard } from "./tools.js";

const NAMES = { user: "You", assistant: "Model", error: "Error" };

function speed(number, ms) {
  const perSecond = (number * 1000) / ms;
  return perSecond.toFixed(perSecond < 100 ? 1 : 0);
}

/** Return what is not 0 of some counts, as "128 hbm, 64 peer". */
function named(counts) {
  const found = Object.entries(counts ?? {}).filter(([, number]) => number > 0);
  return found.map(([name, number]) => `${number} ${name.replace("_", " ")}`).join(", ");
}

/** Say how much of the prompt was reused, from where, and why more that was cached was not. */
function cacheFacts(usage) {
  const { cached_tokens: cached, mooncake } = usage?.prompt_tokens_details ?? {};
  const [from, why] = [named(mooncake?.hits), named({ ...mooncake?.misses, not_seen: 0 })];
  return [
    cached ? `${cached} of ${usage.prompt_tokens} prompt tokens cached${from && ` (${from})`}` : "",
    why && `computed again: ${why}`,
  ].filter(Boolean);
}

/** Return a finished turn. */
export function plainTurn(role, text) {
  const body = el("div", { className: "text" });
  showText(body, text);
  return el("article", { className: `turn ${role}` }, el("h2", {}, NAMES[role]), body);
}

/** An answer while it comes, and afterwards. */
export class Answer {
  constructor(now) {
    this.startedMs = now;
    this.firstMs = null;
    this.content = "";
    this.reasoning = "";
    this.cards = [];
    this.finishReason = null;
    this.usage = null;
    this.receipt = null; // its name, where the server keeps one
    this.thoughts = el("div", { className: "text" });
    this.thoughtsTitle = el("summary", {}, "Thinking…");
    this.fold = el("details", { className: "thinking", hidden: true }, this.thoughtsTitle, this.thoughts);
    this.body = el("div", { className: "text" });
    this.calls = el("div", { className: "calls" });
    this.foot = el("p", { className: "foot" }, el("span", { className: "dots", ariaHidden: "true" }, "● ● ●"));
    this.element = el(
      "article", { className: "turn assistant" },
      el("h2", {}, NAMES.assistant), this.fold, this.body, this.calls, this.foot,
    );
  }

  /** Take one chunk of the stream. */
  take(chunk, now) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (choice === undefined) return;
    const { content, reasoning, reasoning_content: older, tool_calls: calls = [] } = choice.delta;
    const thought = reasoning ?? older ?? "";
    if (this.firstMs === null && (content || thought || calls.length > 0)) this.firstMs = now;
    if (thought) this.#think(thought);
    if (content) {
      if (this.content === "") this.#endThinking(now);
      this.content += content;
      this.body.append(content);
    }
    for (const piece of calls) this.#call(piece, now);
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
  }

  #think(text) {
    this.fold.hidden = false;
    this.reasoning += text;
    this.thoughts.append(text);
  }

  #endThinking(now) {
    if (this.reasoning === "" || this.thoughtsTitle.dataset.ended) return;
    this.thoughtsTitle.dataset.ended = "yes";
    this.thoughtsTitle.textContent = `Thought for ${((now - this.firstMs) / 1000).toFixed(1)} s`;
  }

  #call(piece, now) {
    this.#endThinking(now);
    while (this.cards.length <= piece.index) {
      const card = new CallCard();
      this.cards.push(card);
      this.calls.append(card.element);
    }
    this.cards[piece.index].add(piece);
  }

  /** The stream is over; `stopped`: by the reader. */
  end(now, stopped) {
    this.#endThinking(now);
    showText(this.body, this.content);
    if (stopped) {
      this.calls.replaceChildren(); // half a call is no call
      this.cards = [];
    }
    const facts = [];
    const first = this.firstMs;
    if (this.usage) facts.push(`${this.usage.completion_tokens} tokens`);
    if (first !== null) facts.push(`first after ${((first - this.startedMs) / 1000).toFixed(2)} s`);
    const tokens = this.usage?.completion_tokens ?? 0;
    if (tokens > 1 && now > first) facts.push(`${speed(tokens - 1, now - first)} tokens/s`);
    facts.push(...cacheFacts(this.usage));
    if (stopped) facts.push("stopped");
    else if (this.finishReason === "length") facts.push("cut off at the token limit");
    this.foot.textContent = facts.join(" · ");
    if (this.receipt !== null) this.element.append(receiptFold(this.receipt));
    return facts.join(", ");
  }

  /** Return the message that stands for this answer in the history. */
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.cards.length > 0) message.tool_calls = this.cards.map(({ call }) => call);
    return message;
  }
}
