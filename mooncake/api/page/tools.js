// The tools a person declares, the calls a model makes, and the boxes for their results.

import { byId, el } from "./dom.js";

const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Weather of a city, now",
      parameters: {
        type: "object",
        properties: {
          city: { type: "string", enum: ["Beijing", "Oslo", "Paris"] },
          unit: { type: "string", enum: ["celsius", "fahrenheit"] },
        },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];

/** Fill the tools box with something to try. */
export function insertExample() {
  byId("tools").value = JSON.stringify(EXAMPLE, null, 2);
  byId("tools").dispatchEvent(new Event("input"));
}

/** Return the declared tools, [] for none, or null when they cannot be read (and say why). */
export function readTools() {
  const box = byId("tools");
  const error = byId("tools-error");
  error.textContent = "";
  box.removeAttribute("aria-invalid");
  if (box.value.trim() === "") return [];
  try {
    const given = JSON.parse(box.value);
    return (Array.isArray(given) ? given : [given]).map(asTool);
  } catch (problem) {
    error.textContent = `Tools: ${problem.message}`;
    box.setAttribute("aria-invalid", "true");
    return null;
  }
}

function asTool(given) {
  const tool = given?.function ? given : { type: "function", function: given };
  if (typeof tool.function?.name !== "string") throw new Error("every tool needs a name");
  return { type: "function", ...tool };
}

/** One call of a message, growing while it streams. */
export class CallCard {
  constructor() {
    this.call = { id: "", type: "function", function: { name: "", arguments: "" } };
    this.name = el("code", { className: "call-name" });
    this.args = el("pre", { className: "code", tabIndex: 0 });
    this.element = el("section", { className: "call" }, el("p", {}, "Calls ", this.name), this.args);
    this.element.setAttribute("aria-label", "Tool call");
  }

  /** Take one streamed piece. */
  add(piece) {
    if (piece.id) this.call.id = piece.id;
    if (piece.function?.name) this.call.function.name += piece.function.name;
    this.call.function.arguments += piece.function?.arguments ?? "";
    this.name.textContent = this.call.function.name;
    this.args.textContent = this.call.function.arguments;
  }

  /** The call is whole: show its arguments tidily and ask for the result. */
  askResult(id) {
    try {
      this.args.textContent = JSON.stringify(JSON.parse(this.call.function.arguments), null, 2);
    } catch {
      // cut off by the token limit: shown as it came
    }
    this.box = el("textarea", { id, rows: 2, className: "code result", spellcheck: false });
    const label = el("label", { htmlFor: id }, `Result of ${this.call.function.name}`);
    this.element.append(label, this.box);
  }

  /** Return the message that carries the result, and close the box. */
  result() {
    this.box.readOnly = true;
    return { role: "tool", tool_call_id: this.call.id, content: this.box.value };
  }
}
