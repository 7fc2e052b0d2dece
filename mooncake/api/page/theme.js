// Sets the colours before the first paint, and lets the button go through auto, light and dark.
"use strict";
(() => {
  const THEMES = ["auto", "light", "dark"];
  const NAMES = { auto: "as the system", light: "light", dark: "dark" };

  function stored() {
    try {
      const theme = localStorage.getItem("mooncake-theme");
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // storage may be forbidden
    }
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button === null) return;
    button.textContent = theme[0].toUpperCase() + theme.slice(1);
    button.setAttribute("aria-label", `Colours: ${NAMES[theme]}`);
  }

  function next() {
    const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("mooncake-theme", theme);
    } catch {
      // it then holds for this visit only
    }
    apply(theme);
  }

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    apply(stored());
    document.getElementById("theme").addEventListener("click", next);
  });
})();
