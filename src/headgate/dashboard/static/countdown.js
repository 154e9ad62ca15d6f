// Times that are still to come are counted down between two drawings of a page, in the words that
// the server uses. The clock of the visitor may be wrong, so it is compared with the server's. It
// may be set while a page is open, or the machine may have slept: then only the server knows.
"use strict";

(function () {
  const UNITS = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ];
  const JUMP_MS = 2000;
  let aheadMs = 0;
  let startedMs = sinceStart();
  let isSure = true;

  // When the clock of the visitor was at the start of the page: the same, unless it is set.
  function sinceStart() {
    return Date.now() - performance.now();
  }

  function place() {
    return document.querySelector("[data-now]");
  }

  function compare() {
    const one = place();
    if (!one) return;
    aheadMs = Date.now() - Date.parse(one.dataset.now);
    startedMs = sinceStart();
    isSure = true;
  }

  function words(seconds) {
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    const parts = [];
    let left = Math.floor(seconds);
    UNITS.forEach(([size, unit]) => {
      if (left >= size) {
        parts.push(`${Math.floor(left / size)} ${unit}`);
        left %= size;
      }
    });
    if (parts.length === 1 && left && parts[0].endsWith("min")) parts.push(`${left} s`);
    return parts.slice(0, 2).join(" ");
  }

  function askServer() {
    const region = place() && place().closest("[hx-get]");
    if (region && window.htmx) window.htmx.trigger(region, "sse:changed");
  }

  function tick() {
    if (isSure && Math.abs(sinceStart() - startedMs) > JUMP_MS) {
      isSure = false;
      askServer();
    }
    if (!isSure) return;
    const now = Date.now() - aheadMs;
    document.querySelectorAll("time[data-countdown]").forEach((one) => {
      const seconds = (Date.parse(one.dateTime) - now) / 1000;
      const text = seconds < 1 ? "due now" : `in ${words(seconds)}`;
      if (one.textContent !== text) one.textContent = text;
    });
  }

  document.addEventListener("htmx:afterSwap", compare);
  compare();
  setInterval(tick, 1000);
})();
