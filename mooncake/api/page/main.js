// Starts the page: two views, shown by the part of the address behind #.

import { startChat, welcome } from "./chat.js";
import { watch } from "./cluster.js";
import { byId } from "./dom.js";
import { startSettings } from "./settings.js";

const VIEWS = ["chat", "cluster"];

function view() {
  const name = location.hash.slice(1);
  return VIEWS.includes(name) ? name : "chat";
}

function showView() {
  const shown = view();
  for (const name of VIEWS) {
    byId(name).hidden = name !== shown;
    const link = byId(`to-${name}`);
    if (name === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = shown === "chat" ? "Mooncake" : "Mooncake · Cluster";
  byId("skip").textContent = shown === "chat" ? "Skip to the conversation" : "Skip to the cluster";
  watch(shown === "cluster" && !document.hidden);
}

addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", showView);
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which view is shown
  byId(view() === "chat" ? "prompt" : "cluster-title").focus();
});
startSettings(welcome);
startChat();
showView();
if (view() === "chat") byId("prompt").focus();
