// What scripts add to pages that work without them: copying, the theme, keys.
"use strict";

// Copying, the dialog of keys, and the theme without a reload.
(function () {
  const SHOWN_MS = 1500;
  const YEAR_SECONDS = 31536000;

  async function copy(button) {
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      // Without HTTPS there is no clipboard; the text is selected, to be copied by hand.
      const code = button.parentElement.querySelector("code");
      if (code) window.getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => {
      button.textContent = "Copy";
    }, SHOWN_MS);
  }

  document.addEventListener("click", (event) => {
    const target = event.target instanceof Element ? event.target : null;
    const copied = target && target.closest("[data-copy]");
    const opened = target && target.closest("[data-open]");
    if (copied) copy(copied);
    if (opened) document.getElementById(opened.dataset.open).showModal();
  });

  // The service says the name: over HTTPS it has a prefix, which a browser takes with Secure alone.
  function keepTheme(theme) {
    const name = document.documentElement.dataset.themeCookie;
    const secure = name.startsWith("__Host-") ? "; Secure" : "";
    const age = `Max-Age=${YEAR_SECONDS}`;
    document.cookie = `${name}=${theme}; Path=/; SameSite=Strict; ${age}${secure}`;
  }

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!(form instanceof HTMLFormElement) || !("themeSwitch" in form.dataset)) return;
    event.preventDefault();
    const button = form.querySelector("[name=theme]");
    const theme = button.value;
    document.documentElement.dataset.theme = theme;
    keepTheme(theme);
    button.value = theme === "dark" ? "light" : "dark";
    document.dispatchEvent(new Event("headgate:theme"));
  });
})();

// Keys: "g" and a letter go to a page, "/" to the filter if there is one, "?" shows the list. While
// that list is open, it alone has the keys.
(function () {
  const PATIENCE_MS = 1200;
  const FILTER = "main [role=search] :is(input:not([type=hidden]), select)";
  // Time is counted from the load of the page, so that nothing was ever pressed at 0.
  let wentAt = -Infinity;

  function isTyping(target) {
    return target instanceof Element && target.matches("input, select, textarea, [contenteditable]");
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const dialog = document.getElementById("keys");
    if (dialog && dialog.open) return;
    if (event.key === "?" && dialog) {
      dialog.showModal();
    } else if (event.key === "/") {
      const filter = document.querySelector(FILTER);
      if (filter) {
        event.preventDefault();
        filter.focus();
      }
    } else if (event.key === "g") {
      wentAt = event.timeStamp;
    } else if (event.timeStamp - wentAt < PATIENCE_MS) {
      wentAt = -Infinity;
      const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
      if (link) link.click();
    }
  });
})();
