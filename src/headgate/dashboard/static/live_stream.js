// A browser opens only a few connections to one host, so a page that nobody sees keeps none. This
// stands between the SSE extension and the real stream, and opens and closes that as the page is
// shown and hidden. One that says nothing for too long is given up for another: whoever only listens
// is not told that a line was forgotten on the way, or that the service hangs.
"use strict";

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
