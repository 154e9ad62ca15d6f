// What scripts add to pages that work without them: live regions, keys, copying, the theme.
"use strict";

// A browser opens only a few connections to one host, so a page that nobody sees keeps none. This
// stands between the SSE extension and the real stream, and opens and closes that as the page is
// shown and hidden. One that says nothing for too long is given up for another: whoever only listens
// is not told that a line was forgotten on the way, or that the service hangs.
(function () {
  const RETRY_MS = 5000;
  const REFUSED_MS = 15000;
  const OPEN_MS = 10000;
  // With the most pages open the service says something to each every 20 seconds.
  const SILENT_MS = 25000;
  // Why the service tells this page of no changes, in its words; empty as long as it does.
  let refusal = "";

  function PatientSource(url) {
    const listeners = [];
    let real = null;
    let retry = null;
    let silence = null;
    const own = {
      onopen: null,
      addEventListener(name, listener) {
        listeners.push([name, listener]);
        if (real) real.addEventListener(name, listener);
      },
      removeEventListener(name, listener) {
        const at = listeners.findIndex((one) => one[0] === name && one[1] === listener);
        if (at >= 0) listeners.splice(at, 1);
        if (real) real.removeEventListener(name, listener);
      },
      close() {
        stop();
        document.removeEventListener("visibilitychange", look);
        window.removeEventListener("pagehide", stop);
        window.removeEventListener("pageshow", look);
      },
    };

    function tell(name) {
      listeners.filter((one) => one[0] === name).forEach((one) => one[1](new Event(name)));
    }

    function start() {
      if (real) return;
      real = new EventSource(url);
      giveUpAfter(OPEN_MS);
      listeners.forEach((one) => real.addEventListener(one[0], one[1]));
      real.addEventListener("changed", () => {
        giveUpAfter(SILENT_MS);
        if (refusal) {
          refusal = "";
          show(true);
        }
      });
      real.addEventListener("refused", (event) => {
        refusal = event.data;
        show(false, refusal);
        again(REFUSED_MS);
      });
      real.onopen = (event) => {
        giveUpAfter(SILENT_MS);
        show(true);
        if (own.onopen) own.onopen(event);
      };
      real.onerror = () => {
        show(false);
        if (real && real.readyState === EventSource.CLOSED) {
          // Refused, not broken off: perhaps the login has ended, which a region finds out.
          again(RETRY_MS);
        }
      };
    }

    // The browser may have further lines that are as dead; each try uses one up.
    function giveUpAfter(silentMs) {
      clearTimeout(silence);
      silence = setTimeout(() => {
        show(false);
        stop();
        look();
      }, silentMs);
    }

    // Without a stream the page is drawn anew each time that one is asked for.
    function again(afterMs) {
      stop();
      tell("changed");
      retry = setTimeout(look, afterMs);
    }

    function stop() {
      clearTimeout(retry);
      clearTimeout(silence);
      if (real) real.close();
      real = null;
    }

    function look() {
      if (document.hidden) {
        stop();
      } else if (!real) {
        start();
        tell("changed");
      }
    }

    document.addEventListener("visibilitychange", look);
    window.addEventListener("pagehide", stop);
    window.addEventListener("pageshow", look);
    if (!document.hidden) start();
    return own;
  }

  const SILENT = "the service does not answer";
  const ANSWERS = {
    403: "your token may not see this any more; log in again",
    404: "what this page shows is gone",
    429: "the service was asked too often; it is tried again",
  };

  // A page that may not listen is drawn anew now and then, and goes on saying why it is behind.
  function show(isLive, why = SILENT) {
    const place = document.getElementById("live-state");
    if (!place) return;
    const said = isLive ? refusal : why;
    document.getElementById("live-why").textContent = said;
    place.hidden = !said;
    place.toggleAttribute("data-silent", said === SILENT);
  }

  function reasonOf(status) {
    if (ANSWERS[status]) return ANSWERS[status];
    return status >= 500 ? "the service has trouble" : `the service answered ${status}`;
  }

  document.addEventListener("htmx:responseError", (event) => {
    show(false, reasonOf(event.detail.xhr.status));
  });
  document.addEventListener("htmx:sendError", () => show(false));
  document.addEventListener("htmx:timeout", () => show(false));
  document.addEventListener("htmx:afterSwap", () => show(true));

  if (window.htmx) window.htmx.createEventSource = (url) => new PatientSource(url);
})();

// A region that is fetched anew must not take away what somebody is doing in it: typing, having
// something selected, having opened a part of it, or being somewhere in it with the keyboard.
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

// A page that could not be shown now is asked for again, and loaded when it can be: loading it each
// time would take the words away from whoever reads them. A form that is sent into an outage would
// take along what was typed, so the service is asked first; perhaps the stream alone is away.
(function () {
  const AGAIN_MS = 5000;
  const PATIENCE_MS = 10000;
  const FORM_PATIENCE_MS = 3000;
  const UNAVAILABLE = 503;
  const NOT_SENT =
    "Not sent: the service does not answer. What you entered stays here; send it when it answers.";
  let askedFor = null;

  async function ask(patienceMs) {
    const signal = AbortSignal.timeout(patienceMs);
    try {
      return await fetch(location.href, { method: "HEAD", cache: "no-store", signal });
    } catch {
      return null;
    }
  }

  async function look() {
    const answer = document.hidden ? null : await ask(PATIENCE_MS);
    if (answer && answer.status !== UNAVAILABLE) location.reload();
    else setTimeout(look, AGAIN_MS);
  }

  function sayNotSent(form) {
    form.querySelectorAll("[role=alert]").forEach((one) => one.remove());
    const said = document.createElement("p");
    said.className = "flash bad";
    said.role = "alert";
    said.textContent = NOT_SENT;
    form.append(said);
  }

  document.addEventListener("submit", async (event) => {
    const form = event.target;
    const staysHere = form.matches("[method=dialog], [data-theme-switch]");
    if (staysHere || form === askedFor || !document.querySelector("[data-silent]")) return;
    event.preventDefault();
    if (await ask(FORM_PATIENCE_MS)) {
      askedFor = form;
      form.requestSubmit(event.submitter);
      askedFor = null;
    } else {
      sayNotSent(form);
    }
  });

  if (document.querySelector("[data-asked-again]")) setTimeout(look, AGAIN_MS);
})();

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
