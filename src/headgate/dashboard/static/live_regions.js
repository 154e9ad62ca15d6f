// A region that is fetched anew must not take away what somebody is doing in it: typing, having
// something selected, having opened a part of it, or being somewhere in it with the keyboard.
"use strict";

(function () {
  function isBusy(region) {
    const active = document.activeElement;
    if (active && region.contains(active) && active.matches("input, select, textarea")) return true;
    if (region.querySelector("details.confirm[open]")) return true;
    const selection = window.getSelection();
    return Boolean(
      selection && !selection.isCollapsed && region.contains(selection.anchorNode)
    );
  }

  function isRefresh(event) {
    return event.detail.requestConfig.verb === "get";
  }

  document.addEventListener("htmx:beforeRequest", (event) => {
    if (isRefresh(event) && (document.hidden || isBusy(event.detail.target))) {
      event.preventDefault();
    }
  });

  const FOCUSABLE = "a[href], button, summary, input, select, textarea, [tabindex='0']";

  // The fields of a form that are others in each drawing, or whenever a figure changed.
  const ANEW = /^(csrf|once|drawn\..*)$/;

  // What an element is, so that it is found again in a new drawing: where it leads, what its form
  // sends, else its words; and in which row it stands, since rows have links and buttons alike.
  function ownKey(one) {
    const form = one.closest("form") || one.parentElement.querySelector(":scope > form");
    const fields = form ? Array.from(form.querySelectorAll("input[type=hidden]")) : [];
    return [
      one.localName,
      one.getAttribute("href") || one.ariaLabel || one.textContent.trim(),
      form ? form.getAttribute("action") : "",
      ...fields.filter((field) => !ANEW.test(field.name)).map((field) => field.value),
    ].join("\n");
  }

  function keyOf(one) {
    const row = one.closest("tr, li, article");
    const first = row && row.querySelector(FOCUSABLE);
    const head = row && row.querySelector("th, h2, h3");
    const rowKey = first ? ownKey(first) + (head ? head.textContent.trim() : "") : "";
    return one.id || `${ownKey(one)}\n${rowKey}`;
  }

  function focusIn(region) {
    const active = document.activeElement;
    if (!active || active === region || !region.contains(active)) return null;
    const all = Array.from(region.querySelectorAll(FOCUSABLE));
    const key = keyOf(active);
    const alike = all.filter((one) => keyOf(one) === key);
    return { region, key, nth: alike.indexOf(active), at: all.indexOf(active) };
  }

  // Where the element is gone, a link at its place is the next best. Never a button: a key that is
  // pressed at this moment would do to one thing what was meant for another. A region that was
  // replaced as a whole is another element of the same name.
  function focusAgain({ region: before, key, nth, at }) {
    const region = before.isConnected ? before : document.getElementById(before.id);
    if (!region || region.contains(document.activeElement)) return;
    const all = Array.from(region.querySelectorAll(FOCUSABLE));
    const alike = all.filter((one) => keyOf(one) === key);
    const near = all[Math.min(at, all.length - 1)];
    let one = alike[nth] || alike[0] || (near && near.matches("a") ? near : null);
    if (!one) {
      region.tabIndex = -1;
      one = region;
    }
    one.focus({ preventScroll: true });
  }

  let open = [];
  let scrolled = [];
  let focused = null;

  document.addEventListener("htmx:beforeSwap", (event) => {
    const region = event.detail.target;
    if (isRefresh(event) && isBusy(region)) {
      event.detail.shouldSwap = false;
      return;
    }
    open = Array.from(region.querySelectorAll("details[open][id]"), (one) => one.id);
    scrolled = Array.from(region.querySelectorAll("[id]"))
      .filter((one) => one.scrollTop || one.scrollLeft)
      .map((one) => [one.id, one.scrollTop, one.scrollLeft]);
    focused = focusIn(region);
  });

  document.addEventListener("htmx:afterSwap", () => {
    open.forEach((id) => {
      const one = document.getElementById(id);
      if (one) one.open = true;
    });
    scrolled.forEach(([id, top, left]) => {
      const one = document.getElementById(id);
      if (one) one.scrollTo(left, top);
    });
    reveal(document);
    if (focused) focusAgain(focused);
    focused = null;
  });

  function reveal(root) {
    root.querySelectorAll("[data-copy][hidden], [data-open][hidden]").forEach((one) => {
      one.hidden = false;
    });
  }

  document.addEventListener("DOMContentLoaded", () => reveal(document));
})();
