// The OpenAPI document as a list: each route with its body and its reply, references followed.

const made = (tag, text, ...inside) => {
  const node = document.createElement(tag);
  node.append(text, ...inside);
  return node;
};

const followed = (schema, known, within = []) => {
  if (Array.isArray(schema)) return schema.map((item) => followed(item, known, within));
  if (schema === null || typeof schema !== "object") return schema;
  const name = typeof schema.$ref === "string" ? schema.$ref.split("/").pop() : null;
  if (name !== null) {
    return within.includes(name) ? name : followed(known[name], known, [...within, name]);
  }
  return Object.fromEntries(Object.entries(schema).map(([key, value]) => [key, followed(value, known, within)]));
};

const shown = (title, content, known) => {
  const parts = Object.entries(content ?? {}).map(([media, { schema }]) =>
    made("pre", `${media}\n${JSON.stringify(followed(schema, known), null, 2)}`));
  return parts.length ? made("details", made("summary", title), ...parts) : "";
};

const reply = await fetch("openapi.json");
const { paths, components } = await reply.json();
const known = components?.schemas ?? {};
for (const [path, methods] of Object.entries(paths)) {
  for (const [method, { description, requestBody, responses }] of Object.entries(methods)) {
    document.getElementById("routes").append(made("details",
      made("summary", made("code", `${method.toUpperCase()} ${path}`), ` ${description ?? ""}`),
      shown("body", requestBody?.content, known),
      shown("reply", responses?.["200"]?.content, known)));
  }
}
