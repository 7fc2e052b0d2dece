// The chat: owns the conversation and the one request that may run.

import { events } from "./api.js";
import { byId, el } from "./dom.js";
import { readSettings, systemMessages } from "./settings.js";
import { Answer, plainTurn } from "./turn.js";

const NEAR_PX = 80;
const TRIES = { "k2-demo": ["What is Mooncake?", "What is 347 + 585?", "My name is Anna. What is my name?"] };

let messages = [];
let running = null; // AbortController of the request under way
let waiting = []; // calls whose results are asked for
let numCalls = 0;

const say = (text) => (byId("status").textContent = text);

function show(element) {
  const turns = byId("turns");
  const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < NEAR_PX;
  byId("welcome").hidden = true;
  if (element.parentElement !== turns) turns.append(element);
  if (atEnd) turns.scrollTop = turns.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  byId("turns").setAttribute("aria-busy", String(controller !== null));
}

/** End the running request, if there is one. */
export function stop() {
  running?.abort();
}

async function generate() {
  const fields = readSettings();
  if (fields === null) return;
  const controller = new AbortController();
  const talk = messages; // a new chat has a new one
  setRunning(controller);
  say("Generating");
  const answer = new Answer(performance.now());
  show(answer.element);
  const body = {
    ...fields,
    messages: [...systemMessages(), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  let failure = null;
  try {
    const opened = (headers) => (answer.receipt = headers.get("X-Mooncake-Receipt"));
    for await (const chunk of events("v1/chat/completions", { body, signal: controller.signal, opened })) {
      if (controller.signal.aborted) break;
      answer.take(chunk, performance.now());
      show(answer.element);
    }
  } catch (problem) {
    failure = problem;
  }
  const stopped = controller.signal.aborted;
  setRunning(null);
  const facts = answer.end(performance.now(), stopped);
  if (failure !== null && !stopped) {
    fail(answer, failure);
    return;
  }
  if (talk !== messages) return;
  if (answer.firstMs !== null) talk.push(answer.message());
  say(`${stopped ? "Stopped" : "Done"}: ${facts}`);
  if (answer.cards.length > 0) askResults(answer);
  else byId("prompt").focus();
}

function fail(answer, problem) {
  if (answer.firstMs === null) answer.element.remove();
  const turn = plainTurn("error", problem.message);
  turn.setAttribute("role", "alert");
  const retry = el("button", { type: "button", className: "quiet" }, "Try again");
  retry.addEventListener("click", () => {
    if (running !== null) return;
    answer.element.remove();
    turn.remove();
    byId("prompt").focus();
    generate();
  });
  turn.append(retry);
  show(turn);
  say("");
}

function askResults(answer) {
  waiting = answer.cards;
  for (const card of waiting) card.askResult(`result-${(numCalls += 1)}`);
  const send = el("button", { type: "button", className: "send-results" }, "Send results");
  send.addEventListener("click", () => sendResults(send));
  answer.calls.append(send);
  show(answer.element);
  waiting[0].box.focus();
}

function sendResults(button) {
  if (running !== null || readSettings() === null) return;
  messages.push(...waiting.map((card) => card.result()));
  waiting = [];
  button.remove();
  byId("prompt").focus();
  generate();
}

function submit() {
  const box = byId("prompt");
  const content = box.value.trim();
  if (running !== null || content === "") return;
  if (waiting.length > 0) {
    say("The model waits for the results of its calls");
    waiting[0].box.focus();
    return;
  }
  if (readSettings() === null) return;
  messages.push({ role: "user", content });
  show(plainTurn("user", content));
  box.value = "";
  grow(box);
  byId("turns").scrollTop = byId("turns").scrollHeight;
  generate();
}

function grow(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function clear() {
  stop();
  messages = [];
  waiting = [];
  const welcome = byId("welcome");
  welcome.hidden = false;
  byId("turns").replaceChildren(welcome);
  say("New chat");
  byId("prompt").focus();
}

/** Wire the conversation. */
export function startChat() {
  const box = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  box.addEventListener("input", () => grow(box));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running !== null) {
      stop();
      box.focus();
    }
  });
  byId("stop").addEventListener("click", () => {
    stop();
    box.focus();
  });
  byId("clear").addEventListener("click", clear);
}

/** Show a sentence from the server above the conversation's first turn, and what to ask a model that is known. */
export function welcome(text, model) {
  const tries = (TRIES[model] ?? []).map((question) => {
    const button = el("button", { type: "button", className: "quiet" }, question);
    button.addEventListener("click", () => {
      byId("prompt").value = question;
      submit();
    });
    return button;
  });
  byId("welcome").replaceChildren(text || "What would you like to know?", ...tries);
}
