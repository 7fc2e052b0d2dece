// The receipt of an answer: folded away, and asked for when somebody opens it. Owns its elements.

import { getJson } from "./api.js";
import { el } from "./dom.js";

function span(seconds) {
  return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(1)} ms`;
}

function workersOf({ prefill, decode }) {
  return prefill === null ? decode : `${prefill} → ${decode}`;
}

/** Say where an attempt went, what was predicted and came, and what others would have needed. */
function attemptLines(attempt) {
  const parts = [`${workersOf(attempt)}: first token predicted after ${span(attempt.predicted_ttft_s)}`];
  if (attempt.ttft_s !== null) parts.push(`came after ${span(attempt.ttft_s)}`);
  if (attempt.lost !== null) parts.push(`lost: ${attempt.lost}`);
  const others = (attempt.choice?.prefill ?? []).filter(({ taken }) => !taken);
  const lines = [el("p", {}, parts.join(", "))];
  if (others.length > 0) {
    const told = others.map(({ worker, ttft_s: seconds }) => `${worker} ${span(seconds)}`);
    lines.push(el("p", { className: "hint" }, `Not taken: ${told.join(", ")}`));
  }
  return lines;
}

/** Return a row for one step, with a bar where it lies between 0 and `last`. */
function stepRow(step, last) {
  const end = step.end_s ?? last;
  const fill = el("div");
  fill.style.left = `${(100 * step.start_s) / last}%`;
  fill.style.width = `${(100 * Math.max(end - step.start_s, 0)) / last}%`;
  const facts = Object.entries(step.facts).map(([name, value]) => `${name} ${value}`);
  const took = step.end_s === null ? "runs" : span(end - step.start_s);
  return el(
    "li", { className: "step", title: facts.join(", ") },
    el("span", {}, `${step.name}, ${step.worker ?? "gateway"}`),
    el("div", { className: "track", ariaHidden: "true" }, fill),
    el("span", { className: "num" }, took),
  );
}

function timeline({ steps }) {
  const last = Math.max(...steps.map(({ start_s: start, end_s: end }) => end ?? start), 1e-6);
  return el("ol", { className: "steps" }, ...steps.map((step) => stepRow(step, last)));
}

function showReceipt(body, receipt) {
  const [sequence] = receipt.sequences;
  body.replaceChildren(
    el("p", { className: "code" }, receipt.id),
    ...sequence.attempts.flatMap(attemptLines),
    timeline(sequence),
  );
}

/** Return the receipt of this name, closed. */
export function receiptFold(name) {
  const body = el("div", { className: "receipt-body" });
  const fold = el("details", { className: "receipt" }, el("summary", {}, "Receipt"), body);
  fold.addEventListener("toggle", async () => {
    if (!fold.open) return;
    try {
      showReceipt(body, await getJson(`v1/requests/${encodeURIComponent(name)}/receipt`));
    } catch (problem) {
      body.replaceChildren(el("p", { className: "wrong" }, problem.message));
    }
  });
  return fold;
}
