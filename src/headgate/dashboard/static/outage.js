// A page that could not be shown now is asked for again, and loaded when it can be: loading it each
// time would take the words away from whoever reads them. A form that is sent into an outage would
// take along what was typed, so the service is asked first; perhaps the stream alone is away.
"use strict";

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
