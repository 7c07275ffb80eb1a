// Main loop: poll the server once a second while the page is visible, and update the panels.

import { showPool, showStep } from "./bars.js";
import { forgetCurves, newest, showCurves } from "./curves.js";
import { byId, say } from "./dom.js";
import { seconds, whole } from "./format.js";
import { offerModels } from "./playground.js";
import { showReplicas } from "./replicas.js";
import { showRequests } from "./requests.js";
import { Refusal, get, useKey } from "./server.js";
import { showAdapters, showSequences } from "./tables.js";
import { showTree } from "./tree.js";

const PERIOD = 1000;
const SLOWEST = 5000;
const PATIENCE = 8000;

let started = null;
let loaded = null;
let failures = 0;
let timer = null;
let pollNumber = 0;

/** Poll, show, and schedule the next poll; an answer superseded by a newer poll is dropped. */
async function poll() {
  clearTimeout(timer);
  const own = ++pollNumber;
  const late = setTimeout(offerAtLeast, PERIOD);
  const [state, error] = await get(`ui/state?since=${newest()}`, AbortSignal.timeout(PATIENCE)).then(
    (found) => [found, null],
    (reason) => [null, reason],
  );
  clearTimeout(late);
  if (own !== pollNumber) return;
  failures = error ? failures + 1 : 0;
  const locked = error?.status === 401; // Until a key is entered.
  if (!locked && !document.hidden) timer = setTimeout(poll, Math.min(SLOWEST, PERIOD * (failures + 1)));
  if (error) explain(error);
  else show(state);
}

function show({ server, history, requests, engine, fleet, waiting }) {
  if (server.started !== started) {
    forgetCurves();
    started = server.started;
    loaded = null;
  }
  status(server.draining ? "closed" : "live", server.draining ? "shutting down" : "live");
  notice(waiting ?? "");
  const up = seconds(Math.max(0, requests.now - server.started));
  say(byId("model"), `${server.model} · up ${up} · context ${whole(server.max_model_len)} · version ${server.version}`);
  showCurves(history);
  showRequests(requests);
  showReplicas(fleet);
  const adapters = engine?.stats.adapters ?? loaded ?? 0;
  if (loaded !== adapters) {
    loaded = adapters;
    offerModels().catch(() => (loaded = null));
  }
  if (!engine) return; // No replica runs, or the engine is in a long step.
  showTree(engine);
  showStep(engine.stats);
  showPool(engine.stats, engine.page_size);
  showSequences(engine);
  showAdapters(engine);
}

/** Explain why there is no new data, and the remedy. */
function explain(error) {
  if (!(error instanceof Refusal)) {
    status("connecting", "reconnecting");
    notice(failures > 2 ? "The server does not answer. This page will be live again once it does." : "");
  } else if (error.status === 401) {
    status("locked", "locked");
    byId("key-error").textContent = byId("key-form").hidden ? "" : "That key is not valid here.";
    byId("key-form").hidden = false;
    byId("key").focus();
  } else if (error.status === 403) {
    status("partial", "playground only");
    notice("Tree, sequences and adapters need a key with the scope 'admin', which this one lacks. The playground works with the scope 'inference'.");
    offerAtLeast();
  } else {
    status("connecting", "reconnecting");
    notice(error.message);
    offerAtLeast();
  }
}

/** Offer the models while the panels have no data, which is late or refused: the playground works without. */
function offerAtLeast() {
  if (loaded === null) offerModels().catch(() => {});
}

/** Dim numbers that are not current; page.css hides what the key has no access to. */
function status(state, text) {
  byId("status").dataset.state = document.body.dataset.state = state;
  say(byId("status"), text);
  document.body.toggleAttribute("data-stale", state !== "live");
}

function notice(text) {
  say(byId("notice"), text);
  byId("notice").hidden = !text;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  poll().then(() => {
    byId("key-form").hidden = byId("status").dataset.state !== "locked";
  });
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
poll();
