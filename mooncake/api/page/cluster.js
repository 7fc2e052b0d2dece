// The live cluster page: follows the server's feed while it is looked at, and draws what it says.

import { events } from "./api.js";
import { bar, byId, el, sparkline } from "./dom.js";

const KEPT = 60;
const RETRY_MS = 2000;
const history = new Map(); // figure -> its last values

const NONE = "–";
const number = (value) => new Intl.NumberFormat("en").format(value);
const percent = (part) => `${Math.round(100 * part)} %`;

function seconds(value) {
  if (value === null || value === undefined) return NONE;
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(2)} s`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${value.toFixed(value < 10 && at > 0 ? 1 : 0)} ${units[at]}`;
}

function figure(name, value, detail, plotted) {
  const past = [...(history.get(name) ?? []), plotted ?? null].slice(-KEPT);
  history.set(name, past);
  const shown = el("dd", {}, el("strong", {}, value), " ", el("span", { className: "hint" }, detail));
  shown.append(sparkline(past, KEPT));
  return el("div", { className: "figure" }, el("dt", {}, name), shown);
}

function drawFigures({ load }, recent) {
  const hits = recent.num_prompt_tokens ? recent.num_cached_tokens / recent.num_prompt_tokens : null;
  byId("figures").replaceChildren(
    figure("Requests", number(load.num_inflight), `${number(load.num_queued)} queued`, load.num_inflight),
    figure("TTFT", seconds(recent.ttft_s_p50), `p99 ${seconds(recent.ttft_s_p99)}`, recent.ttft_s_p50),
    figure("TBT", seconds(recent.tbt_s_p50), `p99 ${seconds(recent.tbt_s_p99)}`, recent.tbt_s_p50),
    figure("Output", number(Math.round(recent.output_tokens_per_s)), "tokens/s", recent.output_tokens_per_s),
    figure("Cache hits", hits === null ? NONE : percent(hits), "of prompts", hits),
  );
}

const sum = (workers, name) => workers.reduce((whole, { load }) => whole + (load[name] ?? 0), 0);

function held({ load }) {
  return (load.num_total_blocks ?? 0) - (load.num_free_blocks ?? 0);
}

function card(title, rows, part, label) {
  const list = el("dl", {}, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const element = el("div", { className: "card" }, el("h3", {}, title), list);
  if (part !== null) element.append(bar(part, label));
  return element;
}

function drawPools(workers) {
  const cards = ["prefill", "decode"].map((role) => {
    const members = workers.filter((worker) => worker.role === role);
    const total = sum(members, "num_total_blocks");
    const used = total - sum(members, "num_free_blocks");
    const name = role === "prefill" ? "Prefill pool" : "Decode pool";
    return card(name, [
      ["Workers", number(members.length)],
      ["Running", number(sum(members, "num_running"))],
      ["Waiting", number(sum(members, "num_waiting"))],
      role === "prefill"
        ? ["Queued tokens", number(sum(members, "num_queued_tokens"))]
        : ["Context tokens", number(sum(members, "num_context_tokens"))],
      ...drafted(members),
    ], total ? used / total : null, `${name}: ${number(used)} of ${number(total)} blocks in use`);
  });
  byId("pools").replaceChildren(...cards);
}

function drafted(members) {
  const counted = (name) => members.reduce(
    (whole, { load }) => whole + (load.counters?.[`spec_decode_num_${name}`] ?? 0), 0);
  const drafts = counted("drafts");
  if (!drafts) return [];
  const accepted = counted("accepted_tokens");
  return [
    ["Drafts accepted", `${Math.round((100 * accepted) / counted("draft_tokens"))} %`],
    ["Tokens a step with drafts", (1 + accepted / drafts).toFixed(2)],
  ];
}

function onSsd(worker) {
  const counted = (name) => worker.load.counters?.[name] ?? 0;
  const stored = counted("ssd_blocks_found") + counted("ssd_blocks_written");
  return Math.max(0, stored - counted("ssd_blocks_evicted"));
}

function drawTiers({ workers, pool }) {
  const engines = workers.filter(({ role }) => role !== "kvstore");
  const stores = workers.filter(({ role }) => role === "kvstore");
  const total = sum(engines, "num_total_blocks");
  const cached = sum(engines, "num_cached_blocks");
  const used = total - sum(engines, "num_free_blocks");
  const ssd = stores.reduce((whole, worker) => whole + onSsd(worker), 0);
  const read = stores.reduce((whole, { load }) => whole + (load.counters?.ssd_blocks_read ?? 0), 0);
  const blocks = pool.num_total_blocks;
  byId("tiers").replaceChildren(
    card("HBM", [
      ["Blocks in use", `${number(used)} of ${number(total)}`],
      ["Reusable", number(cached)],
    ], total ? (used + cached) / total : null, `HBM: ${number(used + cached)} of ${number(total)} blocks hold KV`),
    card("DRAM", [
      ["Blocks held", `${number(pool.num_used_blocks)} of ${number(blocks)}`],
      ["Bytes", `${bytes(pool.used_bytes)} of ${bytes(pool.total_bytes)}`],
    ], blocks ? pool.num_used_blocks / blocks : null,
    `DRAM: ${number(pool.num_used_blocks)} of ${number(blocks)} blocks held`),
    card("SSD", [["Blocks held", number(ssd)], ["Read back", number(read)]], null),
    card("Index", [["Distinct blocks", number(pool.num_indexed_blocks)], ["Nodes", number(pool.num_nodes)]], null),
  );
}

function row(...cells) {
  return el("tr", {}, ...cells.map((cell) => (cell instanceof Node ? cell : el("td", {}, String(cell)))));
}

const numeric = (value) => el("td", { className: "num" }, number(value ?? 0));

function drawWorkers(workers) {
  const rows = workers.map((worker) => {
    const total = worker.load.num_total_blocks ?? 0;
    const label = `${number(held(worker))} of ${number(total)} blocks`;
    const memory = el("td", { className: "memory" }, bar(total ? held(worker) / total : 0, label), " ", label);
    const { id, role, node_id: node, state, load } = worker;
    return row(el("th", { scope: "row" }, id), role, node, state, numeric(load.num_running),
      numeric(load.num_waiting), memory);
  });
  byId("workers").tBodies[0].replaceChildren(...(rows.length ? rows : [empty(7, "No worker has joined yet")]));
}

function empty(columns, text) {
  return el("tr", {}, el("td", { colSpan: columns, className: "hint" }, text));
}

/** Draw a row a worker, a field an expert: the more rows it computed of it, the stronger. */
function drawExperts(workers) {
  const sharing = workers.filter(({ load }) => load.expert_rows?.length);
  byId("experts").hidden = !sharing.length;
  const most = Math.max(1, ...sharing.flatMap(({ load }) => load.expert_rows));
  byId("experts").querySelector("tbody").replaceChildren(...sharing.map(({ id, load }) => {
    const whole = load.expert_rows.reduce((rows, its) => rows + its, 0);
    const fields = load.expert_rows.map((rows, expert) => {
      const field = el("span", { title: `expert ${expert}: ${number(rows)} rows` });
      field.style.opacity = rows ? 0.15 + (0.85 * rows) / most : 0.04;
      return field;
    });
    const heat = el("div", { className: "heat" }, ...fields);
    heat.setAttribute("role", "img");
    heat.setAttribute("aria-label", `${id}: ${number(whole)} rows`);
    return row(el("th", { scope: "row" }, id), el("td", {}, heat));
  }));
}

function ago(value) {
  if (value < 60) return `${Math.round(value)} s ago`;
  return value < 3600 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
}

function drawRefusals(refusals) {
  const rows = refusals.map((each) => row(
    ago(each.ago_s), each.reason.replaceAll("_", " "), numeric(each.status), el("td", {}, el("code", {}, each.request_id)),
  ));
  byId("refusals").tBodies[0].replaceChildren(...(rows.length ? rows : [empty(4, "None")]));
}

function draw({ status, recent }) {
  drawFigures(status, recent);
  drawPools(status.workers);
  drawTiers(status);
  drawWorkers(status.workers);
  drawExperts(status.workers);
  drawRefusals(recent.refusals);
  const serving = status.ready ? "live" : "live, not ready";
  tell(status.draining ? "live, shutting down" : serving, "live");
}

function show(news) {
  try {
    draw(news);
  } catch (problem) {
    reportError(problem); // our own mistake: not a lost connection
  }
}

function tell(text, state) {
  const live = byId("live");
  if (live.textContent !== text) live.textContent = text;
  live.dataset.state = state;
}

const pause = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

async function follow(signal) {
  while (!signal.aborted) {
    try {
      for await (const news of events("v1/cluster/events", { signal })) show(news);
      tell("connection lost, trying again", "waiting");
    } catch (problem) {
      if (signal.aborted) return;
      tell(problem.status ? problem.message : "no connection, trying again", "waiting");
    }
    await pause(RETRY_MS, signal);
  }
}

let following = null;

/** Follow the feed, or leave it: a page that nobody looks at takes no place on the server. */
export function watch(wanted) {
  if (wanted === (following !== null)) return;
  if (!wanted) {
    following.abort();
    following = null;
    return;
  }
  following = new AbortController();
  tell("connecting", "waiting");
  follow(following.signal);
}
