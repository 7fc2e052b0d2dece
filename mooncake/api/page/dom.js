// Small helpers over the DOM. Text always goes in as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element with this id. */
export const byId = (id) => document.getElementById(id);

/** Return a new element: properties as given, children strings or nodes. */
export function el(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Return a bar that is filled by `part` (0 to 1), with a label for those who do not see it. */
export function bar(part, label) {
  const filled = Math.min(Math.max(part || 0, 0), 1);
  const fill = el("div");
  fill.style.width = `${100 * filled}%`;
  const element = el("div", { className: "meter", role: "meter", title: label }, fill);
  for (const [name, value] of Object.entries({ valuemin: 0, valuemax: 1, valuenow: filled, label })) {
    element.setAttribute(`aria-${name}`, value);
  }
  return element;
}

/** Return a line through `values`, oldest first; decoration only. */
export function sparkline(values, room = 60) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "spark");
  svg.setAttribute("aria-hidden", "true");
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return svg;
  const top = Math.max(...known) || 1;
  const step = 100 / (room - 1);
  const points = values
    .map((value, at) => [100 - (values.length - 1 - at) * step, value])
    .filter(([, value]) => value !== null)
    .map(([x, value]) => `${x.toFixed(2)},${(22 - (20 * value) / top).toFixed(2)}`);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

/** Put `text` into `element`: blocks between ``` fences as code, the rest as it is written. */
export function showText(element, text) {
  const parts = text.split("```");
  if (parts.length < 3) {
    element.replaceChildren(text);
    return;
  }
  const nodes = parts.map((part, at) => {
    const isOpen = at % 2 === 1;
    if (isOpen && at === parts.length - 1) return "```" + part; // never closed
    if (isOpen) return el("pre", { tabIndex: 0 }, el("code", {}, part.replace(/^[\w+-]*\n/, "").trimEnd()));
    return at === 0 ? part : part.replace(/^\n/, ""); // a block of code ends its own line
  });
  element.replaceChildren(...nodes);
}
