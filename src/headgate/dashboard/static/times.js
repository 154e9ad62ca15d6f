// Times in the zone of the visitor, with the zone's name. Pages are drawn in UTC, which is right for
// everybody and without scripts; this file writes the same times anew, also in what is drawn later.
"use strict";

(function () {
  const ZONE = new Intl.DateTimeFormat().resolvedOptions().timeZone;
  const UTC_ZONES = ["UTC", "Etc/UTC", "Etc/UCT", "Etc/GMT", "GMT"];
  const IN_TEXT = /\b(\d{4}-\d\d-\d\d) (\d\d:\d\d(?::\d\d)?)(\.\d+)? UTC\b/g;
  const AS_WRITTEN = "pre, code, textarea, script, style, [data-copy]";
  // Names such as EST are usual in American English only, those such as CET in British English.
  const LOCALE = /^(America|US|Canada|Pacific\/Honolulu)/.test(ZONE) ? "en-US" : "en-GB";

  function parts(date, options) {
    const format = new Intl.DateTimeFormat(LOCALE, { hourCycle: "h23", ...options });
    return Object.fromEntries(format.formatToParts(date).map((one) => [one.type, one.value]));
  }

  const DAY = { year: "numeric", month: "2-digit", day: "2-digit" };
  const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit" };

  function zoneName(date) {
    return parts(date, { timeZoneName: "short" }).timeZoneName || ZONE;
  }

  function written(date, hasSeconds, fraction) {
    const at = parts(date, { ...DAY, ...CLOCK });
    const seconds = hasSeconds ? `:${at.second}${fraction}` : "";
    return `${at.year}-${at.month}-${at.day} ${at.hour}:${at.minute}${seconds} ${zoneName(date)}`;
  }

  function inText(text) {
    return text.replace(IN_TEXT, (whole, day, clock, fraction = "") => {
      const date = new Date(`${day}T${clock}Z`);
      return Number.isNaN(date.getTime()) ? whole : written(date, clock.length > 5, fraction);
    });
  }

  function rewrite(place) {
    const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode;
      if (!node.data.includes(" UTC") || node.parentElement.closest(AS_WRITTEN)) continue;
      const text = inText(node.data);
      if (text !== node.data) node.data = text;
    }
    place.querySelectorAll("[title*=' UTC']").forEach((one) => {
      one.title = inText(one.title);
    });
  }

  // The fields of a filter are in UTC for the service, and in local time for whoever fills them.
  function local(input) {
    const date = new Date(`${input.value}Z`);
    if (!input.value || Number.isNaN(date.getTime())) return;
    const at = parts(date, { ...DAY, ...CLOCK });
    input.value = `${at.year}-${at.month}-${at.day}T${at.hour}:${at.minute}`;
  }

  function prepare(input) {
    local(input);
    const label = input.closest("label");
    if (!label) return;
    label.childNodes.forEach((node) => {
      if (node.nodeType === Node.TEXT_NODE) {
        node.data = node.data.replace("(UTC)", `(${zoneName(new Date())})`);
      }
    });
  }

  function send(event) {
    event.target.querySelectorAll("input[type=datetime-local]").forEach((input) => {
      const date = new Date(input.value);
      if (input.name && input.value && !Number.isNaN(date.getTime())) {
        event.formData.set(input.name, date.toISOString().slice(0, 16));
      }
    });
  }

  if (UTC_ZONES.includes(ZONE)) return;
  document.querySelectorAll("input[type=datetime-local]").forEach(prepare);
  document.querySelectorAll("[data-zone]").forEach((one) => {
    const name = zoneName(new Date());
    one.textContent = name === ZONE ? ZONE : `${name} (${ZONE})`;
  });
  rewrite(document.body);
  document.addEventListener("formdata", send);
  // Whatever is drawn later is a part of the page, wherever it was put.
  document.addEventListener("htmx:afterSettle", (event) => {
    rewrite(event.detail.target && event.detail.target.isConnected ? event.detail.target : document.body);
  });
})();
