// Reads the settings form into the fields of a chat request.

import { apiKey, getJson, keepKey } from "./api.js";
import { byId } from "./dom.js";
import { insertExample, readTools } from "./tools.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const WIDE = "(min-width: 60rem)";

/** Return the request's fields without its messages, or null when a setting cannot be read. */
export function readSettings() {
  const fields = {};
  const wrong = NUMBERS.map(byId).find((input) => !input.checkValidity());
  if (wrong !== undefined) {
    byId("settings-fold").open = true;
    wrong.reportValidity();
    return null;
  }
  for (const name of NUMBERS) {
    const { valueAsNumber } = byId(name);
    if (!Number.isNaN(valueAsNumber)) fields[name] = valueAsNumber;
  }
  const tools = readTools();
  if (tools === null) {
    byId("settings-fold").open = true;
    byId("tools").focus();
    return null;
  }
  if (tools.length > 0) {
    fields.tools = tools;
    fields.tool_choice = byId("tool_choice").value;
  }
  const thinking = byId("thinking").value;
  if (thinking) fields.chat_template_kwargs = { thinking: thinking === "on" };
  if (byId("model").value) fields.model = byId("model").value;
  return fields;
}

/** Return the system prompt as messages: one or none. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

async function loadModels(say) {
  const choice = byId("model");
  try {
    const { data } = await getJson("v1/models");
    choice.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    say("", data[0]?.id);
  } catch (problem) {
    if (problem.status === 401) byId("settings-fold").open = true;
    say(problem.message);
  }
}

/** Wire the form; `say` shows a sentence about the server, given its model once that is known. */
export function startSettings(say) {
  const fold = byId("settings-fold");
  const wide = matchMedia(WIDE);
  const follow = () => (fold.open = wide.matches);
  wide.addEventListener("change", follow);
  follow();
  byId("key").value = apiKey();
  byId("key").addEventListener("change", () => {
    keepKey(byId("key").value);
    loadModels(say);
  });
  byId("tools").addEventListener("input", readTools);
  byId("tools-example").addEventListener("click", insertExample);
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  loadModels(say);
}
