// Times that are still to come are counted down between two drawings of a page, in the words that
// the server uses. The clock of the visitor may be wrong, so it is compared with the server's.
"use strict";

(function () {
  const UNITS = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ];
  let aheadMs = 0;

  function compare() {
    const place = document.querySelector("[data-now]");
    if (place) aheadMs = Date.now() - Date.parse(place.dataset.now);
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

  function tick() {
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
